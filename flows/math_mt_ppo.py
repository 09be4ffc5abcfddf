"""The main job: a multi-turn math agent, trained end to end with PPO.

    problems ──┐
    policy 0 ──┴─> [ rollout ──> score ──> train ] x iterations ──> report
                       └── trajectories ── scores ── policy n+1     (evaluate before, every k-th, after)

Every arrow is a committed version in the store. A stage is skipped if its version exists. So the same command continues
a run, wherever it was stopped or killed.

    python -m flows.math_mt_ppo demo run.iterations=2
    python -m flows.math_mt_ppo demo --check
"""

from prefect import flow

from flows.launch.cli import main
from storage.telemetry.spans import span
from tasks.evaluate.task import evaluate
from tasks.inference.ahead import servers_begun
from tasks.problems.task import import_problems
from tasks.rollout.task import Rollouts
from tasks.run.check import check
from tasks.run.configuration import resolve
from tasks.run.progress import iterations, newest_policy
from tasks.run.report import report
from tasks.run.resources import open_trainer, open_workers
from tasks.run.workspace import open_run
from tasks.score.task import score
from tasks.train.orders import Part
from tasks.train.task import train
from tasks.warm_start.task import first_policy


@flow(name="math-mt-ppo")
def math_mt_ppo(config: str = "demo", overrides: list[str] | None = None) -> str:
    """Train a policy; return the URI of the report.

    Args:
        config: name of a configuration in configs/, or the path of a YAML file.
        overrides: dotted overrides, such as ["run.iterations=2"].
    """
    with open_run(resolve(config, overrides)) as workspace:  # only one flow run at a time writes this run
        train_set, held_out_set = sets = import_problems(workspace)  # a run keeps those that it began with
        policy = newest_policy(workspace) or first_policy(workspace, sets)
        with open_trainer(workspace) as trainer, open_workers(workspace) as workers:
            with Rollouts(workspace, workers, train_set) as rollouts:  # its end stops what still plays
                for iteration in iterations(workspace):  # only those that are not yet committed
                    with span("iteration", run=workspace.name, iteration=iteration):
                        if iteration % workspace.config.evaluation.every == 0:
                            evaluate(workspace, workers, policy, held_out_set)
                        trajectories = rollouts.take(iteration, policy)  # with run.overlap, later ones play meanwhile
                        scores = score(workspace, workers, iteration, trajectories)
                        policy = train(workspace, trainer, iteration, policy, [Part(trajectories, scores)])
                        rollouts.swap(policy)
            evaluate(workspace, workers, policy, held_out_set)
        return report(workspace, held_out_set)


if __name__ == "__main__":
    main(math_mt_ppo, {"check": check}, servers_begun)
