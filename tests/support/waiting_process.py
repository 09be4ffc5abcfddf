"""A process of the host (`rollout.processes`) whose engine only waits, so that tests need no vLLM.

python -m tests.support.waiting_process CONFIG key=value …     the main flow with such processes
"""

import os
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tasks.rollout.remote.shares import Share
from tests.support.waiting_engine import WaitingEngine, log_normal

SECONDS = "WAITING_PROCESS_SECONDS"
"""Environment variable: the median duration of a completion."""
PIDS = "pids"
"""Folder with a file for each process that has opened its engine, named by its process id."""


def open_waiting(share: Share, logs: Path) -> AbstractContextManager[Any]:
    """Replace `tasks.rollout.remote.host_process.open_engine`."""
    pids = Path(share.config.storage.cache) / PIDS
    pids.mkdir(parents=True, exist_ok=True)
    (pids / str(os.getpid())).write_text(logs.name)
    return nullcontext(WaitingEngine(log_normal(float(os.environ.get(SECONDS, "0.05")), 0.5)))


if __name__ == "__main__":
    from flows.math_mt_ppo import math_mt_ppo
    from storage import interrupts
    from tests.support import waiting_process  # the processes cannot import from __main__

    def main() -> None:
        with patch("tasks.rollout.remote.host_processes.open_engine", waiting_process.open_waiting):
            math_mt_ppo(sys.argv[1], sys.argv[2:])

    interrupts.run(main)
