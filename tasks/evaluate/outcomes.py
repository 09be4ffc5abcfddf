"""Outcomes of stored episodes: trajectories joined with their scores, and what they amount to."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from storage.objects.store import Store
from storage.version_names import ScoresVersion, TrajectoriesVersion
from storage.versions import datasets
from tasks.evaluate.statistics import mean, pass_at_k, proportion

_SPANS = ["turns.list.element.start", "turns.list.element.end"]  # not the texts
COLUMNS = ["trajectory_id", "problem_id", "sample", "status", *_SPANS]
"""Columns of a trajectory data set that an outcome needs."""
_SCORE = ["trajectory_id", "turn", "verdict", "success"]
_FAILED = ("timeout", "error")

Judged = dict[int, dict[str, Any]]
"""Scores of one trajectory by turn."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one episode; of one trajectory, where an agent returned several for an episode."""

    problem_id: str
    sample: int
    status: str
    success: list[float]  # 1 or 0 for each judged turn
    tokens: list[int]  # sampled tokens of each turn
    failed_verdicts: int  # judged turns whose verdict is a timeout or an error

    @property
    def first(self) -> float:
        """Success of the first turn."""
        return self.success[0] if self.success else 0.0

    @property
    def any(self) -> float:
        """Success of any turn."""
        return max(self.success, default=0.0)


def read_outcomes(store: Store, trajectories: TrajectoriesVersion, scores: ScoresVersion, cache: Path) -> list[Outcome]:
    """Outcomes of two versions, trajectories and their scores, ordered by problem and sample.

    Raises:
        StorageError: one of them is missing, damaged, or written by a newer schema.
        ValueError: a turn has two scores.
    """
    return join(
        datasets.rows(store, trajectories, cache, COLUMNS),
        datasets.rows(store, scores, cache, _SCORE),
    )


def join(trajectories: Iterable[dict[str, Any]], scores: Iterable[dict[str, Any]]) -> list[Outcome]:
    """One outcome for each row of `trajectories`, ordered by problem and sample.

    A turn without a score counts as not judged; scores of other trajectories are ignored.

    Raises:
        ValueError: a turn has two scores.
    """
    judged: dict[str, Judged] = defaultdict(dict)
    for score in scores:
        name, turn = score["trajectory_id"], score["turn"]
        if turn in judged[name]:
            raise ValueError(f"two scores for turn {turn} of {name}: give the rows of one scorer")
        judged[name][turn] = score
    rows = [(row["trajectory_id"], _outcome(row, judged.get(row["trajectory_id"], {}))) for row in trajectories]
    rows.sort(key=lambda row: (row[1].problem_id, row[1].sample, row[0]))
    return [outcome for _, outcome in rows]


def _outcome(row: dict[str, Any], judged: Judged) -> Outcome:
    return Outcome(
        problem_id=row["problem_id"],
        sample=row["sample"],
        status=row["status"],
        success=[judged[turn]["success"] for turn in sorted(judged)],
        tokens=[turn["end"] - turn["start"] for turn in row["turns"]],
        failed_verdicts=sum(score["verdict"] in _FAILED for score in judged.values()),
    )


def by_problem(outcomes: Iterable[Outcome]) -> dict[str, list[Outcome]]:
    """The outcomes of each problem; problems in the order of their ids."""
    groups: dict[str, list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        groups[outcome.problem_id].append(outcome)
    return dict(sorted(groups.items()))


def summarise(greedy: Sequence[Outcome], sampled: Sequence[Outcome] = ()) -> dict[str, Any]:
    """What the episodes of an evaluation amount to, JSON-ready; each number with its 95 % interval.

    Of the greedy episodes: accuracy of the first turn, of any turn, and of each turn over the episodes that reached
    it; `fix_rate`, of the wrong turns that were followed by another the share followed by a right one; `break_rate`,
    of the right ones the share followed by a wrong one; the share of episodes that were `truncated`; the tokens of an
    answer; the share of turns whose verdict failed. Shares have Wilson's interval, which takes turns of one episode
    as independent; tokens have a bootstrap's. None stands where nothing was observed.

    Of the sampled ones, where there are any: `pass_at` k, for the powers of two up to n and for n, the smallest
    number of episodes of a problem. Here an episode is solved when any of its turns is right. `sampled`: mean accuracy
    of the first turn and of any turn. The intervals are a bootstrap's over problems.

    Raises:
        ValueError: no greedy episode.
    """
    turns, failed = sum(len(outcome.success) for outcome in greedy), sum(o.failed_verdicts for o in greedy)
    return {
        "episodes": len(greedy),
        "first_turn": proportion([outcome.first for outcome in greedy]).as_dict(),
        "any_turn": proportion([outcome.any for outcome in greedy]).as_dict(),
        "by_turn": _by_turn(greedy),
        **_transitions(greedy),
        "truncated": _share([outcome.status == "truncated" for outcome in greedy]),
        "answer_tokens": _answer_tokens(greedy),
        "failed_verdicts": _share([1] * failed + [0] * (turns - failed)),
        **(summarise_sampled(sampled) if sampled else {}),
    }


def _by_turn(outcomes: Sequence[Outcome]) -> list[dict[str, float]]:
    reached: dict[int, list[float]] = defaultdict(list)
    for outcome in outcomes:
        for turn, success in enumerate(outcome.success):
            reached[turn].append(success)
    return [proportion(reached[turn]).as_dict() | {"episodes": len(reached[turn])} for turn in sorted(reached)]


def _transitions(outcomes: Sequence[Outcome]) -> dict[str, dict[str, float] | None]:
    """The same two rates as `tasks.train.metrics` has for training."""
    pairs = [(now > 0.5, after > 0.5) for outcome in outcomes for now, after in pairwise(outcome.success)]
    return {
        "fix_rate": _share([after for now, after in pairs if not now]),
        "break_rate": _share([not after for now, after in pairs if now]),
    }


def _share(observed: Sequence[float]) -> dict[str, float] | None:
    return proportion(observed).as_dict() if observed else None


def _answer_tokens(outcomes: Sequence[Outcome]) -> dict[str, float] | None:
    """Mean over all turns. Problems are resampled whole: what has more turns counts for more."""
    problems = [[count for outcome in group for count in outcome.tokens] for group in by_problem(outcomes).values()]
    played = [counts for counts in problems if counts]
    return mean([fmean(counts) for counts in played], [len(counts) for counts in played]).as_dict() if played else None


def summarise_sampled(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Of sampled episodes: see `summarise`."""
    groups = by_problem(outcomes).values()
    counts = [(len(group), sum(o.any > 0.5 for o in group)) for group in groups]
    least = min(n for n, _ in counts)
    chosen = sorted({2**power for power in range(least.bit_length())} | {least})
    pass_at = {str(k): mean([pass_at_k(n, c, k) for n, c in counts]).as_dict() for k in chosen}
    first_turn = mean([fmean(outcome.first for outcome in group) for group in groups])
    return {
        "pass_at": pass_at,
        "sampled": {"first_turn": first_turn.as_dict(), "any_turn": pass_at["1"]},
        "sampled_episodes": len(outcomes),
    }
