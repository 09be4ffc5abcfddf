"""The places where workers run (nodes, or numbers of processes), and what happened to workers there."""

import time
from collections import defaultdict

from tasks.rollout.remote.handout import WorkerFailedError

_PAUSE_S = 5.0
"""Time before another worker starts in a place whose last one was lost before it finished an episode; it doubles."""
_MOST_FAILURES = 5
"""After so many such losses in a row a place counts as broken."""


class Losses:
    """Decides where another worker may start after one was lost; used under a lock of the caller.

    A place is broken, and gets no other worker, if its worker ended with an error of its own, or if it loses one after
    the other.

    Args:
        rest_s: shortest time between a loss and the next start, in which servers of the lost worker end.
    """

    def __init__(self, rest_s: float = 0.0) -> None:
        self._rest_s = rest_s
        self._last: dict[str, float] = {}
        self._failures: dict[str, int] = defaultdict(int)
        """Workers of each place that were lost before they finished an episode, since the last one that did."""
        self.broken: dict[str, BaseException] = {}

    @property
    def all_broken(self) -> bool:
        """Return whether all places that have lost a worker are broken."""
        return self.broken.keys() >= self._last.keys()

    def note(self, place: str, error: BaseException, *, useful: bool) -> None:
        """Note that the worker of a place was lost, and whether it had finished an episode or graded a shard."""
        self._last[place] = time.monotonic()
        self._failures[place] = 0 if useful else self._failures[place] + 1
        if isinstance(error, WorkerFailedError) or self._failures[place] >= _MOST_FAILURES:
            self.broken[place] = error

    def may_start(self, place: str) -> bool:
        """Return whether a worker may start in a place that has none."""
        if place in self.broken:
            return False
        failures = self._failures[place]
        pause = max(self._rest_s, _PAUSE_S * 2 ** (failures - 1) if failures else 0.0)
        return time.monotonic() >= self._last.get(place, -pause) + pause

    @property
    def cause(self) -> BaseException | None:
        """Why the first of the broken places is broken."""
        cause = next(iter(self.broken.values()), None)
        return cause.failure.as_own() if isinstance(cause, WorkerFailedError) else cause
