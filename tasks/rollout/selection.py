"""The selection of played episodes for training. The others are stored too, as `rejected` with a reason."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial

from configs import Config
from storage.records import Score, Trajectory
from tasks.score.environment import SuccessRule
from tasks.train.endings import is_trainable
from tasks.train.samples import build_samples, with_known_returns

_DIGITS = 6  # rewards are stored with seven


def select_episodes(group: Sequence[Trajectory], config: Config) -> list[Trajectory]:
    """Return the episodes of one problem, with those marked as rejected that training leaves out.

    A group is rejected if its success rate is out of bounds or, with `rollout.reject_equal`, if its episodes have equal
    returns. Otherwise the best `group_size` of `generation_size` episodes are kept. All rules use what the environment
    said. Keeping the best biases the group: the baseline of lucky episodes is too high.
    """
    settings = config.rollout
    if reason := _reason_to_reject(group, config):
        return [_reject(row, reason, config) for row in group]
    if settings.generation_size in (None, settings.group_size):
        return list(group)
    kept = {row.trajectory_id for row in sorted(group, key=partial(_rank, config=config))[: settings.group_size]}
    reason = f"not among the best {settings.group_size} of {settings.generation_size}"
    return [row if row.trajectory_id in kept else _reject(row, reason, config) for row in group]


def _reason_to_reject(group: Sequence[Trajectory], config: Config) -> str:
    rate = success_rate(group, config)
    low, high = config.rollout.success_rate_lb, config.rollout.success_rate_ub
    if rate is not None and not low <= rate <= high:
        return f"success rate of its group outside [{low:g}, {high:g}]: {rate:.2f}"
    if config.rollout.reject_equal and has_equal_returns(group, config):
        return "the episodes of its group have equal returns"
    return ""


def success_rate(group: Sequence[Trajectory], config: Config) -> float | None:
    """Return the share of right turns among all graded turns of the played episodes; None if there is none.

    The rate counts turns, as the baselines do: training can still learn from a group whose episodes all succeed, some
    of them only at the second turn. An episode that the policy ended before it answered counts as one wrong turn,
    unless training leaves it out (`reward.unfinished`).
    """
    rule, right = SuccessRule.while_playing(config.score), list[bool]()
    for row in group:
        if is_trainable(row, config.reward):
            turns = [is_right(row, turn, rule) for turn in answered(row)]
            right += turns or [False] * (config.reward.counts_unfinished and row.fault == "policy")
    return sum(right) / len(right) if right else None


def has_equal_returns(group: Sequence[Trajectory], config: Config) -> bool:
    """Return whether each turn has one return in all episodes that reached it, so that no baseline differs from it.

    The returns are those of training, if the scorer says what the environment said. Where rewards are
    taken as they are, only training knows the least one, so an episode that the policy ended differs from the others.

    Example: all episodes are wrong, then right. Half of their turns are right, but there is nothing to learn. Wrong
    answers with different rewards for their format have different returns.
    """
    rule, credit = SuccessRule.while_playing(config.score), config.ppo.advantage.credit
    scores = [score for row in group for score in _scores(row, rule)]
    samples = build_samples(group, scores, config.reward, scorers=config.score.by_source, credit=credit)
    faults = {row.fault for row in group if is_trainable(row, config.reward)}
    if len(faults) > 1 and _least_is_unknown(group[0], config):
        return False
    returns = defaultdict[int, set[float]](set)
    for sample in with_known_returns(samples):
        for place, value in zip(sample.order.tolist(), sample.returns.tolist(), strict=True):
            returns[place].add(round(value, _DIGITS))
    return bool(returns) and all(len(values) == 1 for values in returns.values())


def _least_is_unknown(row: Trajectory, config: Config) -> bool:
    """Return whether the least reward of a problem's episodes follows from the other rewards of an update."""
    scorers, reward = config.score.by_source, config.reward
    shape = reward.shape_of(scorers.get(row.source, scorers["default"]))
    return shape == "raw" and reward.least is None and reward.counts_unfinished


def _scores(row: Trajectory, rule: SuccessRule) -> Iterable[Score]:
    """Return scores as the environment would give them."""
    graded = set(answered(row))
    for index, turn in enumerate(row.turns):
        verdict = rule.of(row, index) if index in graded else "none"
        reward = turn.reward if index in graded else 0.0
        yield Score(row.trajectory_id, index, verdict, float(verdict == "correct"), "", "", "", reward)


def answered(row: Trajectory) -> list[int]:
    """List the graded turns: all but those that answer nothing, such as calls of tools."""
    calls = set(row.ungraded)
    return [index for index, turn in enumerate(row.turns) if index not in calls and turn.verdict != "none"]


def is_right(row: Trajectory, turn: int, rule: SuccessRule) -> bool:
    """Return whether a turn is right for its environment; the scorer, which decides in training, comes later."""
    return rule.of(row, turn) == "correct"


def is_rejected(group: Sequence[Trajectory], selected: Sequence[Trajectory], config: Config) -> bool:
    """Return whether `select_episodes` rejected all episodes of a group that would be trained on."""
    before, after = ([row for row in rows if is_trainable(row, config.reward)] for rows in (group, selected))
    return bool(before) and not after


def _rank(row: Trajectory, config: Config) -> tuple[bool, bool, float, int, int]:
    """Return a sort key, best first: trainable, not failed, high mean reward of its graded turns, short, early."""
    rewards = [row.turns[turn].reward for turn in answered(row)]
    mean = sum(rewards) / max(1, len(rewards))
    return (not is_trainable(row, config.reward), row.status == "failed", -mean, len(row.token_ids), row.sample)


def _reject(row: Trajectory, reason: str, config: Config) -> Trajectory:
    return replace(row, status="rejected", reason=reason) if is_trainable(row, config.reward) else row
