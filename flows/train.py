"""The train stage alone, for trajectories and scores that are already stored.

python -m flows.train demo --iteration 0
"""

from prefect import flow

import flows.stages.train
from flows.launch.cli import main
from flows.run import configuration, progress, resources
from flows.run.workspace import open_run
from storage import layout
from tasks.train.orders import Part


@flow(name="train")
def train(config: str = "demo", overrides: list[str] | None = None, iteration: int = 0) -> str:
    """Update the policy on one iteration's scored trajectories.

    Args:
        config: see `math_mt_ppo`.
        overrides: see `math_mt_ppo`.
        iteration: its number, from 0.
    """
    with open_run(configuration.resolve(config, overrides)) as workspace, resources.open_trainer(workspace) as trainer:
        name, scores = workspace.name, layout.scores(workspace.name, iteration, workspace.scorer)
        policy, parts = layout.checkpoint(name, iteration), [Part(layout.trajectories(name, iteration), scores)]
        version = flows.stages.train.train(workspace, trainer, iteration, policy, parts)
        workspace.settle()
        progress.log_last(workspace, version)
        return version


if __name__ == "__main__":
    main(train)
