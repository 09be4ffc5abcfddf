"""The score stage alone, for trajectories that are already stored.

python -m flows.score demo --iteration 0
"""

from prefect import flow

import tasks.score.task
from flows.launch.cli import main
from storage import layout
from tasks.run.configuration import resolve
from tasks.run.resources import open_workers
from tasks.run.workspace import open_run


@flow(name="score")
def score(config: str = "demo", overrides: list[str] | None = None, iteration: int = 0) -> str:
    """Grade one iteration's trajectories."""
    with open_run(resolve(config, overrides)) as workspace, open_workers(workspace, playing=False) as workers:
        return tasks.score.task.score(workspace, workers, iteration, layout.trajectories(workspace.name, iteration))


if __name__ == "__main__":
    main(score, iteration=0)
