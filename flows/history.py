"""The success rates of all problems over all runs of a store, and the problems that were never solved.

python -m flows.history demo
"""

from typing import Any

from prefect import flow

from flows.launch.cli import main
from flows.run.configuration import resolve
from flows.run.workspace import open_unleased
from flows.stages.problems import report_history


@flow(name="history")
def history(config: str = "demo", overrides: list[str] | None = None, suspects: int = 20) -> dict[str, Any]:
    """Commit the success rates of all problems in all runs, and show a summary (see `problems.sampling`).

    Args:
        config: see `math_mt_ppo`; only its `storage` and `problems.sampling` are used.
        overrides: see `math_mt_ppo`.
        suspects: how many of the never solved problems to show.
    """
    with open_unleased(resolve(config, overrides)) as workspace:
        return report_history(workspace, suspects)


if __name__ == "__main__":
    main(history)
