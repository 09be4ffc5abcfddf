"""A worker on a node whose engine only waits, so that tests of clusters need no vLLM.

python -m tests.support.waiting_node CONFIG key=value …     the main flow with such workers
"""

import asyncio
import os
from contextlib import nullcontext
from typing import Any

from storage.records import Trajectory
from tasks.agents.math_multi_turn import MathMultiTurnAgent
from tasks.cluster.node_worker import NodeWorker
from tests.support.waiting_engine import WaitingEngine, log_normal

SECONDS = "WAITING_NODE_SECONDS"
"""Environment variable: the median duration of a completion."""


class StopsTheLoop(MathMultiTurnAgent):
    """An agent that ends the rollout of its process."""

    async def collect_trajectory(self, *_: Any) -> list[Trajectory]:
        asyncio.get_running_loop().stop()
        return []


class WaitingNode(NodeWorker):
    def _open_engine(self) -> Any:
        return nullcontext(WaitingEngine(log_normal(float(os.environ.get(SECONDS, "0.05")), 0.5)))


if __name__ == "__main__":
    import sys
    from unittest.mock import patch

    from flows.math_mt_ppo import math_mt_ppo
    from storage import interrupts
    from tests.support import waiting_node  # nodes cannot import __main__

    def main() -> None:
        with patch("tasks.cluster.node_workers.NodeWorker", waiting_node.WaitingNode):
            math_mt_ppo(sys.argv[1], sys.argv[2:])

    interrupts.run(main)
