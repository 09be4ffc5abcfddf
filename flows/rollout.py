"""The rollout stage alone, for deployments with one flow per stage.

python -m flows.rollout demo --iteration 0
"""

from prefect import flow

from flows.launch.cli import main
from flows.run import configuration, progress, resources
from flows.run.workspace import open_run
from flows.stages import problems, warm_start
from flows.stages.rollout import Rollouts
from storage import layout
from tasks.inference.ahead import servers_begun


@flow(name="rollout")
def rollout(config: str = "demo", overrides: list[str] | None = None, iteration: int = 0) -> str:
    """Play one iteration's episodes with the policy version of the same number.

    Args:
        config: see `math_mt_ppo`.
        overrides: see `math_mt_ppo`.
        iteration: its number, from 0.
    """
    with open_run(configuration.resolve(config, overrides)) as workspace:
        train_set, _ = sets = problems.import_problems(workspace)
        policy = layout.checkpoint(workspace.name, iteration) if iteration else warm_start.first_policy(workspace, sets)
        with resources.open_workers(workspace) as workers, Rollouts(workspace, workers, train_set) as rollouts:
            version = rollouts.take(iteration, policy)
        progress.log_last(workspace, version)
        return version


if __name__ == "__main__":
    main(rollout, ahead=servers_begun)
