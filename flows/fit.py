"""Train a policy from the store alone: on data sets that were played or imported, with `rft`, `dpo`, `kto` or `ppo`.

python -m flows.fit demo --data demo algorithm.type=rft run.name=demo-rft fit.where='best > 0.5'
"""

from prefect import flow

from flows.launch.cli import main
from flows.run.configuration import resolve
from flows.run.progress import iterations, newest_policy, report
from flows.run.resources import open_trainer, open_workers
from flows.run.workspace import open_run
from flows.stages.evaluate import evaluate
from flows.stages.fit import plan, with_versions
from flows.stages.problems import import_problems
from flows.stages.train import train
from flows.stages.warm_start import first_policy


@flow(name="fit")
def fit(config: str = "demo", overrides: list[str] | None = None, data: list[str] | None = None) -> str:
    """Train a policy on committed data sets, several times if asked; return the URI of the report.

    Args:
        config: see `math_mt_ppo`; what it says of rollouts does not count.
        overrides: see `math_mt_ppo`.
        data: runs, or versions of trajectories; may be repeated.
    """
    with open_run(with_versions(resolve(config, overrides), data or [])) as workspace:
        sets = import_problems(workspace)
        _, held_out_set = sets
        first = first_policy(workspace, sets, plays=False)
        updates = plan(workspace, first)
        policy = newest_policy(workspace) or first  # now that the number of updates is known
        with open_trainer(workspace) as trainer, open_workers(workspace) as workers:
            for number in iterations(workspace):  # only those that are not yet committed
                if number % workspace.config.evaluation.every == 0:
                    evaluate(workspace, workers, policy, held_out_set)
                policy = train(workspace, trainer, number, policy, updates[number])
            evaluate(workspace, workers, policy, held_out_set)
        return report(workspace, held_out_set)


if __name__ == "__main__":
    main(fit, data=[])
