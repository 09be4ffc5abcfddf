"""The outcomes of finished groups: which episodes are trained on, and the counts behind progress, metrics and alarms.

Episodes that are not selected are stored, too, as `rejected` with a reason.
"""

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from configs import Config
from storage.records import Score, Trajectory
from storage.visible import Fleeting, visible
from tasks.rollout.plan import Group
from tasks.score.scorers import SAID, SuccessRule
from tasks.tables.words import any_turn, first_turn, is_trainable, without_variance
from tasks.train.samples import Sample, build_samples

_DIGITS = 6  # rewards are stored with seven
_PROGRESS_S = 5.0
_LONGEST_REASON = 400  # characters of one reason in a message that lists several
_ALARMING = (0.05, 0.1, 0.2, 0.4, 0.8)
"""Shares of an iteration's episodes that raise an alarm."""
_WHOSE = {
    "policy": "the policy's own behaviour. Is there too little room or time, or does the policy avoid answers",
    "set-up": "the set-up, and are not trained on. What fails: the agent, the environment, a tool, the engine",
}

Counts = Counter[tuple[str, Any]]
"""Sums over trajectories by what is counted: `("status", "completed")`, `("tokens", None)` …; they can be added up."""


def select_episodes(group: Sequence[Trajectory], config: Config) -> list[Trajectory]:
    """Return the episodes of one problem, with those marked as rejected that training leaves out.

    A group is rejected if its success rate is out of bounds or, with `rollout.reject_equal`, if its episodes have equal
    returns. Otherwise the `group_size` of `generation_size` episodes that earned most are kept. All rules use what the
    environment said. Keeping the best biases the group: the baseline of lucky episodes is too high.
    """
    settings = config.rollout
    if reason := _reason_to_reject(group, config):
        return [_reject(row, reason) for row in group]
    if settings.generation_size in (None, settings.group_size):
        return list(group)
    earned = {sample.trajectory_id: sample.earned for sample in _samples(group, config)}

    def rank(row: Trajectory) -> tuple[float, bool, int, int]:
        """Best first: what it `earned` if it is trainable, not ended by a fault, short, early."""
        return (-earned.get(row.trajectory_id, -math.inf), bool(row.fault), len(row.token_ids), row.sample)

    kept = {row.trajectory_id for row in sorted(group, key=rank)[: settings.group_size]}
    reason = f"not among the best {settings.group_size} of {settings.generation_size}"
    return [row if row.trajectory_id in kept else _reject(row, reason) for row in group]


def _reason_to_reject(group: Sequence[Trajectory], config: Config) -> str:
    rate = success_rate(group, config)
    low, high = config.rollout.success_rate_lb, config.rollout.success_rate_ub
    if rate is not None and not low <= rate <= high:
        return f"success rate of its group outside [{low:g}, {high:g}]: {rate:.2f}"
    if config.rollout.reject_equal and has_equal_returns(group, config):
        return "the episodes of its group have equal returns"
    return ""


def success_rate(group: Sequence[Trajectory], config: Config) -> float | None:
    """Return the fraction of right turns among all graded turns of the played episodes; None if there is none.

    The rate counts turns, as the baselines do: training can still learn from a group whose episodes all succeed, some
    of them only at the second turn. An episode that the policy ended before it answered counts as one wrong turn.
    """
    rule, right = SuccessRule.while_playing(config.score), list[bool]()
    for row in group:
        if is_trainable(row):
            turns = [rule.of(row, turn) == "correct" for turn in answered(row)]
            right += turns or [False] * (row.fault == "policy")
    return sum(right) / len(right) if right else None


def has_equal_returns(group: Sequence[Trajectory], config: Config) -> bool:
    """Return whether each turn has one return in all episodes that reached it, so that no baseline differs from it.

    The returns are those of training, if the scorer says what the environment said. Nobody knows those of another
    scorer while playing, such as a judge's, so they count as different. Where rewards are taken as they are, only
    training knows the least one, so an episode that the policy ended differs from the others.

    Example: all episodes are wrong, then right. Half of their turns are right, but there is nothing to learn. Wrong
    answers with different rewards for their format have different returns.
    """
    source = group[0].source
    scorer, environment = config.score.of(source), config.of_source(source).environment.type
    if scorer != "environment" and (scorer != "math-verify" or environment == "null"):
        return False
    samples = _samples(group, config)
    faults = {row.fault for row in group if is_trainable(row)}
    if len(faults) > 1 and config.reward.shape_of(scorer) == "raw" and config.reward.least is None:
        return False
    pairs = (pair for sample in samples for pair in sample.by_position)
    alike = without_variance((position, round(value, _DIGITS)) for position, value in pairs)
    return bool(alike) and all(alike.values())


def _samples(group: Sequence[Trajectory], config: Config) -> list[Sample]:
    """Return what training would make of a group if its scorer says what the environment said."""
    rule = SuccessRule.while_playing(config.score)
    scores = [score for row in group for score in _scores(row, rule)]
    return build_samples(group, scores, config.reward, scorers=config.score)


def _scores(row: Trajectory, rule: SuccessRule) -> Iterable[Score]:
    """Return scores as the environment would give them."""
    graded = set(answered(row))
    for index, turn in enumerate(row.turns):
        verdict = rule.of(row, index) if index in graded else "none"
        reward = turn.reward if index in graded else 0.0
        place, success, reason = (row.trajectory_id, index), float(verdict == "correct"), SAID.get(verdict, "")
        yield Score(*place, verdict, success, "", "", reason, reward)


def answered(row: Trajectory) -> list[int]:
    """List the graded turns: all but those that answer nothing, such as calls of tools."""
    calls = set(row.ungraded)
    return [index for index, turn in enumerate(row.turns) if index not in calls and turn.verdict != "none"]


def is_rejected(group: Sequence[Trajectory], selected: Sequence[Trajectory]) -> bool:
    """Return whether `select_episodes` rejected all episodes of a group that would be trained on."""
    before, after = (any(is_trainable(row) for row in rows) for rows in (group, selected))
    return before and not after


def _reject(row: Trajectory, reason: str) -> Trajectory:
    return replace(row, status="rejected", reason=reason) if is_trainable(row) else row


@dataclass(frozen=True, slots=True)
class FinishedGroup:
    """The result of a finished group, without its trajectories."""

    number: int
    problem_id: str
    rejected: bool
    counts: Counts

    @property
    def episodes(self) -> int:
        return sum(number for (name, _), number in self.counts.items() if name == "episodes")

    @classmethod
    def of(cls, group: Group, played: Sequence[Trajectory], selected: Sequence[Trajectory], config: Config) -> Self:
        """Sum up a group: all trajectories that were `played`, and the same as they are stored, after the selection."""
        counts = counts_of(selected, SuccessRule.while_playing(config.score))
        return cls(group.number, group.problem.problem_id, is_rejected(played, selected), counts)


def counts_of(trajectories: Iterable[Trajectory], rule: SuccessRule) -> Counts:
    """Count the trajectories of a group; `rule` says which turns are right.

    `("version", v)` counts trajectories with tokens of policy version v, `("policy", v)` those that also began with it.
    `("turn", k)` counts turns by number, without those that answer nothing. `("part", name)` is the sum of a part of
    rewards, `("parts", name)` the number of turns that have it. `("call", status)` counts calls of tools.
    `("fault", f)` counts episodes without a verdict, and `("reason", r)` those of them by the set-up's fault. By the
    source of their problems are counted `episodes`, those that are `rejected`, those with `graded` turns, those that
    are right at the `first` or at `any` turn; and the sum of rewards, `reward`.
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
        answers, source = answered(trajectory), trajectory.source
        right = [rule.of(trajectory, turn) == "correct" for turn in answers]
        counts["episodes", source] += 1
        counts["rejected", source] += trajectory.status == "rejected"
        counts["graded", source] += bool(answers)
        counts["first", source] += int(first_turn(right))
        counts["any", source] += int(any_turn(right))
        counts["reward", source] += sum(trajectory.turns[turn].reward for turn in answers)  # type: ignore[assignment]
        counts.update(("turn", index) for index in range(len(answers)))
        counts.update(("success", index) for index, is_right in enumerate(right) if is_right)
        for name, value in (part for parts in trajectory.reward_parts for part in parts.items()):
            counts["part", name] += value  # type: ignore[assignment]
            counts["parts", name] += 1
    return counts


class Tally:
    """The counts of a data set while it is played; `rule` says which turns are right, `mixed` that there is a mixture.

    Attributes:
        counts: the sums over the trajectories of finished groups.
        started: when the measured time began, on the monotonic clock: with this attempt, unless set.
    """

    def __init__(self, progress: Callable[[str], None], rule: SuccessRule, *, mixed: bool = False) -> None:
        self._progress, self._rule, self._mixed = progress, rule, mixed
        self._expected = self._groups = self._resumed = self._resumed_tokens = 0
        self.started = self._reported = time.monotonic()
        self.counts = Counts()

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
        self.counts.update(counts_of(trajectories, self._rule))
        self._resumed, self._resumed_tokens = self._done, self.counts["generated", None]
        if self._resumed:
            self._progress(f"{self._resumed} episodes were already stored: going on from there")
        self.started = self._reported = time.monotonic()

    def report(self, *, last: bool = False) -> None:
        """Report progress, every few seconds and at the end."""
        now = time.monotonic()
        if now - self._reported < _PROGRESS_S and not last:
            return
        self._reported = now
        done = self._done
        rate, solved = self._rate(now), self._of("any").total() / max(1, done)
        self._progress(Fleeting(f"{done}/{self._expected} episodes, {rate:.0f} tokens/s, {solved:.1%} solved"))

    def check(self, max_failed_share: float) -> None:
        """Raise ValueError if more episodes failed by the set-up's fault; what the policy does stops no run."""
        done, failed = self._done, self._of("fault")["set-up"]
        if done and failed / done > max_failed_share:
            reasons = self._of("reason").most_common(3)
            listing = "; ".join(f"{count} x {visible(reason, _LONGEST_REASON)}" for reason, count in reasons)
            raise ValueError(
                f"{failed} of {done} episodes failed by the set-up's fault, more than the share {max_failed_share:g} "
                f"(rollout.max_failed_share, in evaluations also evaluation.max_failed_share): {listing}"
            )

    def _by_source(self) -> dict[str, dict[str, float]]:
        """Return the numbers of each source, with the names that they have in the log of metrics."""
        counts = self.counts
        found = {
            source: {
                "episodes": episodes,
                "episodes/rejected": counts["rejected", source] / episodes,
                "success/turn_1": counts["first", source] / max(1, counts["graded", source]),
                "success/any_turn": counts["any", source] / episodes,
                "environment/return": counts["reward", source] / max(1, counts["graded", source]),
            }
            for source, episodes in sorted(self._of("episodes").items())
        }
        return found if len(found) > 1 or self._mixed else {}

    @property
    def _done(self) -> int:
        return self._of("episodes").total()

    def _of(self, kind: str) -> Counter[Any]:
        """Return the counts of a kind by their second key."""
        return Counter({key: count for (name, key), count in self.counts.items() if name == kind and count})

    def _rate(self, now: float) -> float:
        return (self.counts["generated", None] - self._resumed_tokens) / (now - self.started)

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
            "sequences": self.counts["sequences", None],
            "policy_versions": sorted(self._of("version")),
            "tokens": self.counts["tokens", None],
            "generated_tokens": self.counts["generated", None],
            "tokens_per_second": self._rate(now),
            "solved": self._of("any").total() / max(1, self._done),
            "success": [successes[turn] / turns[turn] for turn in sorted(turns)],
            "reward": self._of("reward").total() / max(1, turns.total()),
            "return_mean": self._of("reward").total() / max(1, self._of("graded").total()),
            "calls": {status: count / max(1, self._done) for status, count in sorted(self._of("call").items())},
            "parts": {name: self.counts["part", name] / count for name, count in sorted(self._of("parts").items())},
            "seconds": now - self.started,
            "by_source": self._by_source(),
        }


class FaultAlarm:
    """Raises an alarm when 5, 10, 20, 40 or 80 % of the episodes have a kind of fault for the first time in a flow run.

    A comparison with the iterations just before would miss a fraction that grows slowly.
    """

    def __init__(self) -> None:
        self._raised: set[tuple[str, float]] = set()

    def raised_by(self, metrics: Mapping[str, Any]) -> list[str]:
        """Return the alarms that the metrics of an iteration raise; older programs counted no faults."""
        alarms = list[str]()
        for fault, share in metrics.get("faults", {}).items():
            reached = {(fault, level) for level in _ALARMING if share >= level}
            if not reached <= self._raised:
                alarms.append(f"{share:.1%} of the episodes ended without a verdict by {_WHOSE[fault]}?")
            self._raised |= reached
        return alarms
