"""The score stage alone, for trajectories that are already stored: by the run's scorer, or by another one.

python -m flows.score demo --iteration 0
python -m flows.score demo --iteration 0 score.type=my_scorers:score
"""

from prefect import flow

import flows.stages.score
from flows.launch.cli import main
from flows.run import configuration, progress, resources
from flows.run.workspace import open_run
from storage import layout


@flow(name="score")
def score(config: str = "demo", overrides: list[str] | None = None, iteration: int = 0) -> str:
    """Grade one iteration's trajectories. Scores by another scorer than the run's stand beside the run's own.

    Args:
        config: see `math_mt_ppo`.
        overrides: see `math_mt_ppo`.
        iteration: its number, from 0.
    """
    opened = open_run(configuration.resolve(config, overrides), scoring=True)
    with opened as workspace, resources.open_workers(workspace, playing=False) as workers:
        trajectories = layout.trajectories(workspace.name, iteration)
        version = flows.stages.score.score(workspace, workers, iteration, trajectories)
        progress.log_last(workspace, version)
        return version


if __name__ == "__main__":
    main(score)
