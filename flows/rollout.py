"""The rollout stage alone, for those who deploy the stages apart.

python -m flows.rollout demo --iteration 0
"""

from prefect import flow

import tasks.rollout
from flows.cli import main
from storage import layout
from tasks.configuration import resolve
from tasks.first_policy import first_policy
from tasks.import_problems import import_problems
from tasks.open_run import open_run
from tasks.resources import open_engine, open_verifier


@flow(name="rollout")
def rollout(config: str = "demo", overrides: list[str] | None = None, iteration: int = 0) -> str:
    """Play one iteration's episodes with the policy version of the same number."""
    with open_run(resolve(config, overrides)) as workspace:
        problems, _ = import_problems(workspace)
        policy = layout.checkpoint(workspace.name, iteration) if iteration else first_policy(workspace)
        policy = tasks.rollout.lagging_policy(workspace, iteration) or policy
        with open_engine(workspace) as engine, open_verifier(workspace) as verifier:
            return tasks.rollout.rollout(workspace, engine, verifier, iteration, policy, problems)


if __name__ == "__main__":
    main(rollout, iteration=0)
