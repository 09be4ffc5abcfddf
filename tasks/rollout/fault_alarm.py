"""The alarm of a run in which more and more episodes end without a verdict."""

import math
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from storage import layout
from storage.objects.store import Store
from storage.versions import manifests

LEAST = 0.05
"""Share of an iteration's episodes from which on a doubling raises an alarm."""
_READERS = 16
_WHOSE = {
    "policy": "the policy's own behaviour. Is there too little room in the context, or time, or does the policy avoid "
    "answers",
    "set-up": "a fault of the set-up, and cannot be trained on. What fails: the agent, the environment, a tool, the "
    "engine",
}


def alarms(shares: Mapping[str, float], highest: Mapping[str, float]) -> list[str]:
    """Return an alarm for each kind of fault whose share reached 5, 10, 20, 40 or 80 % for the first time in a run.

    A comparison with the iterations just before would miss a share that grows slowly.

    Args:
        shares: of an iteration's episodes, by fault.
        highest: the highest shares of the iterations before; none: 0.
    """
    return [
        f"{share:.1%} of the episodes ended without a verdict by {_WHOSE[fault]}? Before it were at most "
        f"{highest.get(fault, 0.0):.1%}"
        for fault, share in shares.items()
        if _level(share) > _level(highest.get(fault, 0.0))
    ]


def _level(share: float) -> int:
    """Return how often a share has doubled since `LEAST`; -1 below it."""
    return math.floor(math.log2(share / LEAST)) if share >= LEAST else -1


class FaultAlarm:
    """The alarm of a run, which remembers the highest shares so far.

    Args:
        store: holds the manifests of the run's trajectories.
        run: its name.
    """

    def __init__(self, store: Store, run: str) -> None:
        self._store, self._run = store, run
        self._highest: dict[str, float] | None = None

    def look(self, iteration: int) -> list[str]:
        """Return the alarms of an iteration, whose trajectories are committed."""
        if self._highest is None:
            self._highest = {}
            with ThreadPoolExecutor(_READERS) as readers:
                for shares in readers.map(self._shares, range(iteration)):
                    self._note(shares)
        shares = self._shares(iteration)
        raised = alarms(shares, self._highest)
        self._note(shares)
        return raised

    def _note(self, shares: Mapping[str, float]) -> None:
        assert self._highest is not None
        for fault, share in shares.items():
            self._highest[fault] = max(share, self._highest.get(fault, 0.0))

    def _shares(self, iteration: int) -> dict[str, float]:
        """Return the shares of an iteration; older programs counted none."""
        metrics: Mapping[str, Any] = manifests.read(self._store, layout.trajectories(self._run, iteration)).metrics
        return dict(metrics.get("faults", {}))
