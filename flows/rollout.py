"""The rollout stage alone, for deployments with one flow per stage.

python -m flows.rollout demo --iteration 0
"""

from prefect import flow

from flows.launch.cli import main
from storage import layout
from tasks.problems.task import import_problems
from tasks.rollout.task import Rollouts
from tasks.run.configuration import resolve
from tasks.run.resources import open_workers
from tasks.run.workspace import open_run
from tasks.warm_start.task import first_policy


@flow(name="rollout")
def rollout(config: str = "demo", overrides: list[str] | None = None, iteration: int = 0) -> str:
    """Play one iteration's episodes with the policy version of the same number."""
    with open_run(resolve(config, overrides)) as workspace:
        train_set, _ = sets = import_problems(workspace)
        policy = layout.checkpoint(workspace.name, iteration) if iteration else first_policy(workspace, sets)
        with open_workers(workspace) as workers, Rollouts(workspace, workers, train_set) as rollouts:
            return rollouts.take(iteration, policy)


if __name__ == "__main__":
    main(rollout, iteration=0)
