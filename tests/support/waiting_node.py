"""A worker on a node whose engine only waits, so that tests of clusters need no vLLM.

python -m tests.support.waiting_node CONFIG key=value …     the main flow with such workers
"""

import asyncio
import errno
import os
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from storage.objects.store import Store
from storage.records import Trajectory
from tasks.agents.math_multi_turn import MathMultiTurnAgent
from tasks.cluster.node_worker import NodeWorker
from tests.support.waiting_engine import WaitingEngine, log_normal
from tests.support.wrong_clock import set_clock_ahead

SECONDS = "WAITING_NODE_SECONDS"
"""Environment variable of a node: the median duration of a completion."""
SPREAD = 0.5
"""The sigma of its log-normal distribution."""
CACHE = "WAITING_NODE_CACHE"
"""Environment variable of a node: its `storage.cache`, as if its file system were another one."""
HOLD = "WAITING_NODE_HOLD"
"""Environment variable of a node: a file, as long as which exists uploads do not begin. They note themselves in it."""
NO_ENGINE = "no-engine"
"""Name of a file in a node's cache: if it is there, the node opens no engine, and deletes it."""

CLOCK = "WAITING_NODE_CLOCK"
"""Environment variable of a node: by how many seconds its clock is ahead."""


class StopsTheLoop(MathMultiTurnAgent):
    """An agent that ends the rollout of its process."""

    async def collect_trajectory(self, *_: Any) -> list[Trajectory]:
        asyncio.get_running_loop().stop()
        return []


class WaitingNode(NodeWorker):
    def __init__(self, values: dict[str, Any], name: str, *, plays: bool) -> None:
        set_clock_ahead(float(os.environ.get(CLOCK, "0")))
        cache = os.environ.get(CACHE, values["storage"]["cache"])
        super().__init__(values | {"storage": values["storage"] | {"cache": cache}}, name, plays=plays)

    def _open_engine(self) -> Any:
        if (order := self._cache / NO_ENGINE).exists():
            order.unlink()
            raise OSError(errno.ENOSPC, "No space left on device")
        return nullcontext(WaitingEngine(log_normal(float(os.environ.get(SECONDS, "0.05")), SPREAD)))

    def _open_store(self) -> Store:
        super()._open_store()
        return HeldStore.of(self._config.storage)


class HeldStore(Store):
    """A store whose uploads may be held back."""

    def put(self, key: str, source: Path) -> None:
        hold = Path(os.environ.get(HOLD, "/nonexistent"))
        if hold.exists():
            with hold.open("a") as note:
                note.write(f"{key}\n")
        while hold.exists():
            time.sleep(0.02)
        super().put(key, source)


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
