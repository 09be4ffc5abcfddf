"""Workers whose engine only waits, so that tests with Ray need no vLLM.

python -m tests.support.waiting_node CONFIG key=value …     the main flow with such workers
"""

import asyncio
import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

from storage.objects.store import Store
from storage.processes.child import Child
from storage.records import Trajectory
from tasks.agents.math_multi_turn import MathMultiTurnAgent
from tasks.cluster.workers import NodeWorker
from tests.support.cluster_runs import BESIDE
from tests.support.waiting_engine import WaitingEngine, log_normal
from tests.support.waiting_server import UnprovenEngine

SECONDS = "WAITING_NODE_SECONDS"
"""Environment variable of a node: the median duration of a completion."""
SPREAD = 0.5
"""The sigma of its log-normal distribution."""


class StopsTheLoop(MathMultiTurnAgent):
    """An agent that ends the rollout of its process."""

    async def play(self, *_: Any) -> list[Trajectory]:
        asyncio.get_running_loop().stop()
        return []


class WaitingNode(NodeWorker):
    """A worker whose engine waits, and which has started a process, as others have started vLLM."""

    @contextmanager
    def _open_engine(self) -> Iterator[Any]:
        with closing(Child(self._logs / "beside.log")) as beside:
            beside.start(["sh", "-c", f"{BESIDE} & wait"], os.environ)
            yield WaitingEngine(log_normal(float(os.environ.get(SECONDS, "0.05")), SPREAD))


class UnprovenNode(NodeWorker):
    """A worker whose servers need not prove which weights they have."""

    def _open_store(self) -> Store:
        return Store(self._config.storage.root)

    def _open_engine(self) -> UnprovenEngine:
        return UnprovenEngine(self._config.inference, self._config.rollout, self._logs)


if __name__ == "__main__":
    import sys
    from unittest.mock import patch

    from flows.math_mt_ppo import math_mt_ppo
    from storage import interrupts
    from tests.support import waiting_node  # nodes cannot import __main__

    def main() -> None:
        with patch("tasks.cluster.workers.NodeWorker", waiting_node.WaitingNode):
            math_mt_ppo(sys.argv[1], sys.argv[2:])

    interrupts.run(main)
