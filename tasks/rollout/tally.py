"""The counts behind a rollout's progress and metrics."""

import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from storage.records import Trajectory
from storage.visible import visible
from tasks.rollout.selection import answered, is_right
from tasks.score.environment import SuccessRule

_PROGRESS_S = 5.0
_LONGEST_REASON = 400  # characters of one reason in a message that lists several

Counts = Counter[tuple[str, Any]]
"""Sums over trajectories by what is counted: `("status", "completed")`, `("tokens", None)` …; they can be added up."""


def counts_of(trajectories: Iterable[Trajectory], rule: SuccessRule) -> Counts:
    """Count the trajectories of a group; `rule` says which turns are right.

    `("version", v)` counts trajectories with tokens of policy version v, `("policy", v)` those that also began with it.
    `("turn", k)` counts turns by number, without those that answer nothing. `("part", name)` is the sum of a part of
    rewards, `("parts", name)` the number of turns that have it. `("call", status)` counts calls of tools.
    `("fault", f)` counts episodes without a verdict, `("reason", r)` those of them by the set-up's fault.
    """
    counts = Counts()
    for trajectory in trajectories:
        counts["status", trajectory.status] += 1
        fault = trajectory.fault or ("set-up" if trajectory.status == "failed" else "")  # older programs named none
        if fault:
            counts["fault", fault] += 1
        if fault == "set-up":
            counts["reason", trajectory.reason] += 1
        versions = set(trajectory.versions) - {-1}
        counts.update(("version", version) for version in versions)
        counts.update(("policy", version) for version in {trajectory.policy_version, *versions})
        counts["tokens", None] += len(trajectory.token_ids)
        counts["sequences", None] += len(trajectory.sequence_starts)
        counts["generated", None] += sum(turn.end - turn.start for turn in trajectory.turns)
        counts.update(("call", call.status) for call in trajectory.calls)
        answers = answered(trajectory)
        right = [is_right(trajectory, turn, rule) for turn in answers]
        counts["solved", None] += any(right)
        for index, turn in enumerate(answers):
            counts["turn", index] += 1
            counts["success", index] += right[index]
            counts["reward", None] += trajectory.turns[turn].reward  # type: ignore[assignment]  # a Counter adds floats, too
        for name, value in (part for parts in trajectory.reward_parts for part in parts.items()):
            counts["part", name] += value  # type: ignore[assignment]
            counts["parts", name] += 1
    return counts


class Tally:
    """The counts of a data set while it is played; `rule` says which turns are right."""

    def __init__(self, progress: Callable[[str], None], rule: SuccessRule) -> None:
        self._progress, self._rule = progress, rule
        self._expected = self._groups = self._resumed = self._resumed_tokens = 0
        self._started = self._reported = time.monotonic()
        self._counts = Counts()

    @property
    def policies(self) -> set[int]:
        """Policy versions that sampled a token, or with which an episode began."""
        return set(self._of("policy"))

    def expect(self, groups: int, size: int) -> None:
        """Add `groups` of `size` episodes to the total."""
        self._groups += groups
        self._expected += groups * size

    def resume(self, trajectories: Iterable[Trajectory]) -> None:
        """Count episodes that a killed attempt played; they do not count for the speed of this attempt."""
        for trajectory in trajectories:
            self.add(counts_of([trajectory], self._rule))
        self._resumed, self._resumed_tokens = self._done, self._sum("generated")
        if self._resumed:
            self._progress(f"{self._resumed} episodes were already stored: going on from there")
        self._started = self._reported = time.monotonic()

    def start(self, at: float) -> None:
        """Measure the speed from a time of the monotonic clock, instead of the beginning of this attempt."""
        self._started = at

    def add(self, counts: Counts) -> None:
        self._counts.update(counts)

    def remove(self, counts: Counts) -> None:
        """Take back what `add` added."""
        self._counts.subtract(counts)

    def report(self, *, last: bool = False) -> None:
        """Report progress, every few seconds and at the end."""
        now = time.monotonic()
        if now - self._reported < _PROGRESS_S and not last:
            return
        self._reported = now
        done = self._done
        rate, solved = self._rate(now), self._sum("solved") / max(1, done)
        self._progress(f"{done}/{self._expected} episodes, {rate:.0f} tokens/s, {solved:.1%} solved")

    def check(self, max_failed_share: float) -> None:
        """Raise ValueError if more episodes failed by the set-up's fault; what the policy does stops no run."""
        done, failed = self._done, self._of("fault")["set-up"]
        if done and failed / done > max_failed_share:
            listing = "; ".join(
                f"{count} x {visible(reason, _LONGEST_REASON)}" for reason, count in self._of("reason").most_common(3)
            )
            raise ValueError(
                f"{failed} of {done} episodes failed by the set-up's fault, more than the share {max_failed_share:g} "
                f"(rollout.max_failed_share, in evaluations also evaluation.max_failed_share): {listing}"
            )

    @property
    def _done(self) -> int:
        return self._of("status").total()

    def _of(self, kind: str) -> Counter[Any]:
        """Return the counts of a kind by their second key."""
        return Counter({key: count for (name, key), count in self._counts.items() if name == kind and count})

    def _sum(self, kind: str) -> int:
        return self._counts[kind, None]

    def _rate(self, now: float) -> float:
        return (self._sum("generated") - self._resumed_tokens) / (now - self._started)

    def metrics(self, groups_rejected: int) -> dict[str, Any]:
        """Return the metrics for the manifest; `seconds` and the speed belong to the last attempt."""
        now, turns, successes = time.monotonic(), self._of("turn"), self._of("success")
        return {
            "episodes": self._done,
            "episodes_resumed": self._resumed,
            "status": dict(self._of("status")),
            "faults": {fault: count / max(1, self._done) for fault, count in sorted(self._of("fault").items())},
            "groups": self._groups,
            "groups_rejected": groups_rejected,
            "sequences": self._sum("sequences"),
            "policy_versions": sorted(self._of("version")),
            "tokens": self._sum("tokens"),
            "generated_tokens": self._sum("generated"),
            "tokens_per_second": self._rate(now),
            "solved": self._sum("solved") / max(1, self._done),
            "success": [successes[turn] / turns[turn] for turn in sorted(turns)],
            "reward": self._sum("reward") / max(1, turns.total()),
            "calls": {status: count / max(1, self._done) for status, count in sorted(self._of("call").items())},
            "parts": {name: self._counts["part", name] / count for name, count in sorted(self._of("parts").items())},
            "seconds": now - self._started,
        }
