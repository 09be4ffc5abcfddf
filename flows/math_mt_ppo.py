"""The main job: a multi-turn math agent, trained end to end with PPO.

    problems ──┐
    policy 0 ──┴─> [ rollout ──> score ──> train ] x iterations ──> report
                       └── trajectories ── scores ── policy n+1     (evaluate before, every k-th, after)

Every arrow is a committed version in the store. A stage whose version exists is skipped, so running
the same run again continues it, wherever it was stopped or killed.

    python -m flows.math_mt_ppo demo run.iterations=2
"""

from prefect import flow

from flows.launch.cli import main
from tasks.evaluate.task import evaluate
from tasks.problems.task import import_problems
from tasks.rollout.task import Rollouts
from tasks.run.configuration import resolve
from tasks.run.opening import open_run
from tasks.run.progress import iterations, newest_policy
from tasks.run.report import report
from tasks.run.resources import open_engine, open_trainer, open_verifier
from tasks.score.task import score
from tasks.train.task import train
from tasks.warm_start.task import first_policy


@flow(name="math-mt-ppo")
def math_mt_ppo(config: str = "demo", overrides: list[str] | None = None) -> str:
    """Train a policy; returns the URI of the report.

    Args:
        config: name of a configuration in configs/ or a YAML file's path.
        overrides: dotted, such as ["run.iterations=2"].
    """
    with open_run(resolve(config, overrides)) as workspace:  # by one flow run at a time
        problems, held_out = import_problems(workspace)
        policy = newest_policy(workspace) or first_policy(workspace)
        with (
            open_verifier(workspace) as verifier,
            open_engine(workspace) as engine,  # ends first, and with it a rollout that plays ahead
            open_trainer(workspace) as trainer,
        ):
            rollouts = Rollouts(workspace, engine, verifier, problems)
            for iteration in iterations(workspace):  # those not yet committed
                if iteration % workspace.config.evaluation.every == 0:
                    evaluate(workspace, engine, verifier, policy, held_out)
                trajectories = rollouts.take(iteration, policy)  # with run.overlap the next are played from here on
                scores = score(workspace, verifier, iteration, trajectories)
                policy = train(workspace, trainer, iteration, policy, trajectories, scores)
                rollouts.swap(policy)
            rollouts.finish()
            evaluate(workspace, engine, verifier, policy, held_out)
        return report(workspace, held_out)


if __name__ == "__main__":
    main(math_mt_ppo)
