"""The main job: a multi-turn math agent, trained end to end with PPO.

    problems ──┐
    policy 0 ──┴─> [ rollout ──> score ──> train ] x iterations ──> report
                       └── trajectories ── scores ── policy n+1     (evaluate before, every k-th, after)

Every arrow is a committed version in the store. A stage is skipped if its version exists. So the same command continues
a run, wherever it was stopped or killed.

    python -m flows.math_mt_ppo demo run.iterations=2
    python -m flows.math_mt_ppo demo --check
"""

import time
from typing import TYPE_CHECKING

from prefect import flow

from flows.launch.cli import main
from flows.run import configuration, progress, resources
from flows.run.check import check
from flows.run.workspace import Workspace, open_run
from flows.stages import problems, warm_start
from flows.stages.evaluate import evaluate
from flows.stages.rollout import Rollouts
from flows.stages.score import score
from flows.stages.train import train
from storage.telemetry.spans import span
from storage.version_names import PolicyVersion, ProblemsVersion
from tasks.inference.ahead import serve_ahead, servers_begun
from tasks.train.orders import OrderedTrainer, Part

if TYPE_CHECKING:
    from tasks.rollout.play import Workers


@flow(name="math-mt-ppo")
def math_mt_ppo(config: str = "demo", overrides: list[str] | None = None) -> str:
    """Train a policy; return the URI of the report.

    Args:
        config: name of a configuration in configs/, or the path of a YAML file.
        overrides: dotted overrides, such as ["run.iterations=2"].
    """
    with open_run(configuration.resolve(config, overrides)) as workspace:  # only one flow run at a time writes this run
        train_set, held_out_set = sets = problems.import_problems(workspace)  # a run keeps those that it began with
        policy = progress.newest_policy(workspace) or warm_start.first_policy(workspace, sets)
        serve_ahead(lambda: workspace.open_checkpoint(policy))  # while the workers open
        with resources.open_trainer(workspace) as trainer, resources.open_workers(workspace) as workers:
            policy = learn(workspace, policy, workers, trainer, train_set, held_out_set)
            evaluate(workspace, workers, policy, held_out_set)
        return progress.report(workspace, held_out_set)


def learn(
    workspace: Workspace,
    policy: PolicyVersion,
    workers: "Workers",
    trainer: OrderedTrainer,
    train_set: ProblemsVersion,
    held_out_set: ProblemsVersion | None = None,
) -> PolicyVersion:
    """Run the remaining iterations, within the run's budget, from the newest `policy`; return the last policy version.

    With `held_out_set`, policies are evaluated on it meanwhile.
    """
    with Rollouts(workspace, workers, train_set) as rollouts:  # its end stops what still plays
        since = time.monotonic()
        for iteration in progress.iterations(workspace):  # only those that are not yet committed
            with span("iteration", run=workspace.name, iteration=iteration):
                if held_out_set and iteration % workspace.config.evaluation.every == 0:
                    evaluate(workspace, workers, policy, held_out_set)
                    since = time.monotonic()
                trajectories = rollouts.take(iteration, policy)  # with run.overlap, later ones play meanwhile
                scores = score(workspace, workers, iteration, trajectories)
                parts = [Part(trajectories, scores)]
                policy = train(workspace, trainer, iteration, policy, parts, rollouts.swap, since)
                since = time.monotonic()
        workspace.settle()  # the last checkpoint is committed
    return policy


if __name__ == "__main__":
    main(math_mt_ppo, {"check": check}, servers_begun, resources.import_early)
