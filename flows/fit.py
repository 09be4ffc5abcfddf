"""Train a policy from the store alone, on played or imported data, with `rft`, `dpo`, `kto`, `ppo` or one of your own.

python -m flows.fit demo --data demo algorithm.type=rft run.name=demo-rft fit.where='best > 0.5'
"""

from prefect import flow

from flows.launch.cli import main
from flows.run import configuration, progress, resources
from flows.run.workspace import open_run
from flows.stages import problems, warm_start
from flows.stages.evaluate import evaluate
from flows.stages.fit import plan, with_versions
from flows.stages.train import train


@flow(name="fit")
def fit(config: str = "demo", overrides: list[str] | None = None, data: list[str] | None = None) -> str:
    """Train a policy on committed data sets, several times if asked; return the URI of the report.

    Args:
        config: see `math_mt_ppo`; nothing is played, but its knobs must fit each other.
        overrides: see `math_mt_ppo`.
        data: runs, or versions of trajectories; may be repeated.
    """
    with open_run(with_versions(configuration.resolve(config, overrides), data or [])) as workspace:
        sets = problems.import_problems(workspace)
        _, held_out_set = sets
        first = warm_start.first_policy(workspace, sets, plays=False)
        updates = plan(workspace, first)
        policy = progress.newest_policy(workspace) or first  # now that the number of updates is known
        with resources.open_trainer(workspace) as trainer, resources.open_workers(workspace) as workers:
            for number in progress.iterations(workspace):  # only those that are not yet committed
                if number % workspace.config.evaluation.every == 0:
                    evaluate(workspace, workers, policy, held_out_set)
                policy = train(workspace, trainer, number, policy, updates[number])
            evaluate(workspace, workers, policy, held_out_set)
        return progress.report(workspace, held_out_set)


if __name__ == "__main__":
    main(fit)
