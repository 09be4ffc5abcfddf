"""The counts behind a rollout's progress and metrics."""

import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from storage.records import Trajectory
from storage.visible import visible

_PROGRESS_S = 5.0
_LONGEST_REASON = 400  # characters of one reason in a message that lists several


class Tally:
    """The counts behind progress and metrics."""

    def __init__(self, progress: Callable[[str], None]) -> None:
        self._progress = progress
        self._expected = self._groups = self._resumed = self._resumed_tokens = 0
        self._started = self._reported = time.monotonic()
        self._statuses: Counter[str] = Counter()
        self._reasons: Counter[str] = Counter()
        self._successes: Counter[int] = Counter()
        self._turns: Counter[int] = Counter()
        self._versions: set[int] = set()
        self.policies: set[int] = set()
        """Policy versions that sampled a token, or with which an episode began."""
        self._generated = self._tokens = self._solved = self._sequences = 0

    def expect(self, groups: int, size: int) -> None:
        """Add `groups` of `size` episodes to the total."""
        self._groups += groups
        self._expected += groups * size

    def resume(self, trajectories: Iterable[Trajectory]) -> None:
        """Count episodes that a killed attempt played; they do not count for the speed of this attempt."""
        for trajectory in trajectories:
            self.add(trajectory)
        self._resumed, self._resumed_tokens = self._statuses.total(), self._generated
        if self._resumed:
            self._progress(f"{self._resumed} episodes were already stored: going on from there")
        self._started = self._reported = time.monotonic()

    def start(self, at: float) -> None:
        """Measure the speed from a time of the monotonic clock, instead of the beginning of this attempt."""
        self._started = at

    def add(self, trajectory: Trajectory) -> None:
        self._statuses[trajectory.status] += 1
        if trajectory.status == "failed":
            self._reasons[trajectory.reason] += 1
        self._tokens += len(trajectory.token_ids)
        self._sequences += len(trajectory.sequence_starts)
        self._versions |= set(trajectory.versions) - {-1}
        self.policies |= {trajectory.policy_version, *self._versions}
        self._generated += sum(turn.end - turn.start for turn in trajectory.turns)
        self._solved += any(turn.reward > 0 for turn in trajectory.turns)
        for index, turn in enumerate(trajectory.turns):
            self._turns[index] += 1
            self._successes[index] += turn.reward > 0

    def report(self, *, last: bool = False) -> None:
        """Report progress, every few seconds and at the end."""
        now = time.monotonic()
        if now - self._reported < _PROGRESS_S and not last:
            return
        self._reported = now
        done = self._statuses.total()
        rate, solved = self._rate(now), self._solved / max(1, done)
        self._progress(f"{done}/{self._expected} episodes, {rate:.0f} tokens/s, {solved:.1%} solved")

    def check(self, max_failed_share: float) -> None:
        done, failed = self._statuses.total(), self._statuses["failed"]
        if done and failed / done > max_failed_share:
            listing = "; ".join(
                f"{count} x {visible(reason, _LONGEST_REASON)}" for reason, count in self._reasons.most_common(3)
            )
            raise ValueError(
                f"{failed} of {done} episodes failed, more than rollout.max_failed_share={max_failed_share:g}: "
                f"{listing}"
            )

    def _rate(self, now: float) -> float:
        return (self._generated - self._resumed_tokens) / (now - self._started)

    def metrics(self, groups_rejected: int) -> dict[str, Any]:
        """Return the metrics for the manifest; `seconds` and the speed belong to the last attempt."""
        now = time.monotonic()
        return {
            "episodes": self._statuses.total(),
            "episodes_resumed": self._resumed,
            "status": dict(self._statuses),
            "groups": self._groups,
            "groups_rejected": groups_rejected,
            "sequences": self._sequences,
            "policy_versions": sorted(self._versions),
            "tokens": self._tokens,
            "generated_tokens": self._generated,
            "tokens_per_second": self._rate(now),
            "solved": self._solved / max(1, self._statuses.total()),
            "success": [self._successes[turn] / self._turns[turn] for turn in sorted(self._turns)],
            "seconds": now - self._started,
        }
