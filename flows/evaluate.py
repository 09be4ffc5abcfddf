"""The evaluation alone: one policy version on the held-out problems.

python -m flows.evaluate demo --version 90
"""

from prefect import flow

import tasks.evaluate
from flows.cli import main
from storage import layout
from tasks.configuration import resolve
from tasks.import_problems import import_problems
from tasks.open_run import open_run
from tasks.resources import open_engine, open_verifier


@flow(name="evaluate")
def evaluate(config: str = "demo", overrides: list[str] | None = None, version: int = 0) -> str:
    """Play and judge the held-out problems with one policy version."""
    with open_run(resolve(config, overrides)) as workspace:
        _, held_out = import_problems(workspace)
        policy = layout.checkpoint(workspace.name, version)
        with open_engine(workspace) as engine, open_verifier(workspace) as verifier:
            return tasks.evaluate.evaluate(workspace, engine, verifier, policy, held_out)


if __name__ == "__main__":
    main(evaluate, version=0)
