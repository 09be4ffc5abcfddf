"""Outcomes of stored episodes: join trajectories with their scores, summarise them, and compare two policies."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from configs.score import Score as ScoreSettings
from storage.errors import first_few
from storage.grouping import grouped
from storage.objects.store import Store
from storage.version_names import ScoresVersion, TrajectoriesVersion, select
from storage.versions import datasets, manifests
from tasks.evaluate import statistics
from tasks.evaluate.statistics import mean, paired_difference, pass_at_k, proportion
from tasks.tables.words import any_turn, by_turn, first_turn, graded

_SPANS = ["turns.list.element.start", "turns.list.element.end"]  # the turns without their texts
COLUMNS = ["trajectory_id", "problem_id", "sample", "status", *_SPANS, "calls.list.element.status", "source"]
"""The columns of a trajectory data set that an outcome needs. Files before schema 4 have no calls and no source."""
_SCORE = ["trajectory_id", "turn", "verdict", "success", "reward", "parts"]  # before schema 4 without the last two

_DEFAULTS = ScoreSettings()


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one episode, or of one trajectory if the agent returned several for an episode."""

    problem_id: str
    sample: int
    status: str
    success: list[float]  # 1 or 0 for each graded turn; calls of tools, which answer nothing, are not graded
    tokens: list[int]  # sampled tokens of each turn
    failed_verdicts: int  # graded turns whose verdict is a timeout or an error
    calls: int = 0  # calls of tools
    failed_calls: int = 0  # calls that failed or could not be read
    rewards: list[float] = field(default_factory=list)  # of each graded turn; empty if they are the successes
    parts: list[tuple[str, float]] = field(default_factory=list)  # of the rewards: names and values
    source: str = ""  # of the problem
    last: bool = False  # only the last answer is paid (`score.tries`)

    @property
    def first(self) -> float:
        """The success of the first graded turn."""
        return first_turn(self.success)

    @property
    def any(self) -> float:
        """The best success of all turns."""
        return any_turn(self.success)

    @property
    def total(self) -> float:
        """The return of the episode, not discounted: the sum of the scorer's rewards, or the last answer's."""
        return sum((self.rewards or self.success)[-1 if self.last else 0 :])


def read_outcomes(store: Store, scores: ScoresVersion, cache: Path) -> list[Outcome]:
    """Read the outcomes of graded trajectories, given the scores, ordered by problem and sample.

    Raises:
        StorageError: a version is missing, damaged, or written by a newer schema.
        ValueError: a turn has two scores.
    """
    manifest = manifests.read(store, scores)
    settings = ScoreSettings.model_validate(manifest.knob("score") or {})
    played = scores.evaluation or select(TrajectoriesVersion, manifest.parent_names)[0]
    rows = datasets.rows(store, played, cache, COLUMNS)
    return join(rows, datasets.rows(store, scores, cache, _SCORE), settings)


def join(
    trajectories: Iterable[dict[str, Any]], scores: Iterable[dict[str, Any]], settings: ScoreSettings = _DEFAULTS
) -> list[Outcome]:
    """Make one outcome for each row of `trajectories`, ordered by problem and sample.

    A turn without a score, or with the verdict `none`, counts as not graded. Scores of other trajectories are ignored.

    Args:
        trajectories: rows with `COLUMNS`.
        scores: rows with `_SCORE`.
        settings: say what an episode earns whose answers were graded several times.

    Raises:
        ValueError: a turn has two scores.
    """
    of_rows = graded(scores)
    rows = sorted(trajectories, key=lambda row: (row["problem_id"], row["sample"], row["trajectory_id"]))
    return [_outcome(row, of_rows.get(row["trajectory_id"], []), settings) for row in rows]


def _outcome(row: dict[str, Any], graded: Sequence[Mapping[str, Any]], settings: ScoreSettings) -> Outcome:
    calls = [call["status"] for call in row.get("calls", ())]
    success = [score["success"] for score in graded]
    rewards: list[float] = [score["reward" if "reward" in score else "success"] for score in graded]
    return Outcome(
        problem_id=row["problem_id"],
        sample=row["sample"],
        status=row["status"],
        success=success,
        tokens=[turn["end"] - turn["start"] for turn in row["turns"]],
        failed_verdicts=sum(score["verdict"] in ("timeout", "error") for score in graded),
        calls=len(calls),
        failed_calls=sum(status in ("failed", "unparsable") for status in calls),
        rewards=[] if rewards == success else rewards,
        parts=[part for score in graded for part in dict(score.get("parts") or ()).items()],
        source=row.get("source") or "",
        last=settings.pays_last(row.get("source") or ""),
    )


def by_problem(outcomes: Iterable[Outcome]) -> dict[str, list[Outcome]]:
    """Group outcomes by problem, in the order of the problems' ids."""
    return dict(sorted(grouped((outcome.problem_id, outcome) for outcome in outcomes).items()))


def by_source(outcomes: Iterable[Outcome]) -> dict[str, list[Outcome]]:
    """Group outcomes by the source of their problem, in the order of names; empty if all have the same source."""
    groups = grouped((outcome.source, outcome) for outcome in outcomes)
    return dict(sorted(groups.items())) if len(groups) > 1 else {}


def summarise(greedy: Sequence[Outcome]) -> dict[str, Any]:
    """Summarise the greedy episodes of an evaluation, JSON-ready; each number has its 95 % interval.

    `first_turn`, `any_turn`: accuracy. `by_turn`: accuracy of each turn over the episodes that reached
    it. `fix_rate`: among the wrong turns that another turn follows, the share with a right next turn. `break_rate`:
    among the right turns that another turn follows, the share with a wrong next turn. `truncated`: share of episodes.
    `answer_tokens`: tokens of a turn. `failed_verdicts`: share of turns. `called`: share of episodes with a call of a
    tool. `calls_failed`: share of calls that failed or could not be read. `rewards`: mean `return` of an episode with a
    graded turn, and means of the named parts of rewards; empty if all rewards are successes. Shares have Wilson's
    interval, which treats the turns of one episode as independent; tokens and rewards have a bootstrap interval. A
    number without observations is None. `by_source`: the same for the problems of each source, if there are several.

    Raises:
        ValueError: there is no greedy episode.
    """
    pairs = [(now > 0.5, after > 0.5) for each in greedy for now, after in pairwise(each.success)]
    return {
        "episodes": len(greedy),
        "first_turn": proportion([each.first for each in greedy])._asdict(),
        "any_turn": proportion([each.any for each in greedy])._asdict(),
        "by_turn": [
            proportion(of)._asdict() | {"episodes": len(of)} for of in by_turn(each.success for each in greedy)
        ],
        "fix_rate": _share([after for now, after in pairs if not now]),
        "break_rate": _share([not after for now, after in pairs if now]),
        "truncated": _share([each.status == "truncated" for each in greedy]),
        "answer_tokens": _mean((each.problem_id, each.tokens) for each in greedy),
        "failed_verdicts": _share([n < each.failed_verdicts for each in greedy for n in range(len(each.success))]),
        "called": _share([each.calls > 0 for each in greedy]),
        "calls_failed": _share([n < each.failed_calls for each in greedy for n in range(each.calls)]),
        "rewards": _rewards(greedy),
        "by_source": {source: summarise(own) for source, own in by_source(greedy).items()},
    }


def _share(observed: Sequence[float]) -> dict[str, float] | None:
    return proportion(observed)._asdict() if observed else None


def _mean(observed: Iterable[tuple[str, Sequence[float]]]) -> dict[str, float] | None:
    """Compute the mean over all values, given as pairs of a problem's id and values.

    The bootstrap resamples whole problems, weighted by their numbers of values.
    """
    problems = grouped((problem, value) for problem, values in observed for value in values)
    played = [values for _, values in sorted(problems.items())]
    return mean([fmean(values) for values in played], [len(values) for values in played])._asdict() if played else None


def _rewards(outcomes: Sequence[Outcome]) -> dict[str, dict[str, float] | None]:
    if not any(each.rewards or each.parts for each in outcomes):
        return {}
    parts = grouped((f"part {name}", (each.problem_id, [value])) for each in outcomes for name, value in each.parts)
    of_parts = {part: _mean(values) for part, values in sorted(parts.items())}
    return {"return": _mean((each.problem_id, [each.total]) for each in outcomes if each.success)} | of_parts


def summarise_sampled(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Summarise the sampled episodes of an evaluation, JSON-ready.

    `pass_at` k, for the powers of two up to n and for n, where n is the smallest number of episodes of a problem; an
    episode is solved if any of its turns is right. `sampled`: mean accuracy of the first turn and of any turn. Their
    intervals are bootstrap intervals over problems. `by_source`: as in `summarise`.
    """
    groups = by_problem(outcomes).values()
    counts = [(len(group), sum(o.any > 0.5 for o in group)) for group in groups]
    least = min(n for n, _ in counts)
    chosen = sorted({2**power for power in range(least.bit_length())} | {least})
    pass_at = {str(k): mean([pass_at_k(n, c, k) for n, c in counts])._asdict() for k in chosen}
    first_turn = mean([fmean(outcome.first for outcome in group) for group in groups])
    return {
        "pass_at": pass_at,
        "sampled": {"first_turn": first_turn._asdict(), "any_turn": pass_at["1"]},
        "sampled_episodes": len(outcomes),
        "by_source": {source: summarise_sampled(own) for source, own in by_source(outcomes).items()},
    }


def compare(before: Sequence[Outcome], after: Sequence[Outcome]) -> dict[str, Any]:
    """Compute the differences after - before, paired by problem, JSON-ready.

    `first_turn` and `any_turn` hold the mean accuracy over problems before and after, and their difference with a 95 %
    bootstrap interval over problems and an `adjusted_interval`, which is valid even if few problems differ, and p of
    `sign_flip`. If each problem has one outcome, p is that of McNemar's exact test, the interval is the score interval,
    and `only_before` and `only_after` count problems solved; otherwise a problem's accuracy is its outcomes' mean.
    `answer_tokens`: mean number of sampled tokens of a turn, None without turns. `truncated`: share of episodes.
    `return`: mean over problems before and after, and their difference; None if all rewards are successes.
    `by_source`: the same for the problems of each source, if there are several.

    Raises:
        ValueError: there are no outcomes, or before and after have different problems.
    """
    old, new = by_problem(before), by_problem(after)
    unpaired = {"only before": sorted(old.keys() - new.keys()), "only after": sorted(new.keys() - old.keys())}
    if lines := [f"{len(ids)} {side} ({first_few(ids)})" for side, ids in unpaired.items() if ids]:
        raise ValueError(f"the outcomes are not of the same problems: {', '.join(lines)}. Compare results on one set")
    played = [[count for outcome in outcomes for count in outcome.tokens] for outcomes in (before, after)]
    old_tokens, new_tokens = (fmean(counts) if counts else None for counts in played)
    ratio = new_tokens / old_tokens if old_tokens and new_tokens is not None else None
    truncated = [fmean(each.status == "truncated" for each in outcomes) for outcomes in (before, after)]
    later = by_source(after)
    return {
        "problems": len(old),
        "first_turn": _accuracy(old, new, "first"),
        "any_turn": _accuracy(old, new, "any"),
        "answer_tokens": {"before": old_tokens, "after": new_tokens, "ratio": ratio},
        "truncated": {"before": truncated[0], "after": truncated[1]},
        "return": _returns(old, new) if any(each.rewards for each in (*before, *after)) else None,
        "by_source": {source: compare(own, later[source]) for source, own in by_source(before).items() if later},
    }


def _returns(old: dict[str, list[Outcome]], new: dict[str, list[Outcome]]) -> dict[str, Any] | None:
    """Compare the mean returns of problems with graded turns before and after; return None if there is none."""
    totals = [[[each.total for each in groups[name] if each.success] for name in old] for groups in (old, new)]
    pairs = [(fmean(earlier), fmean(later)) for earlier, later in zip(*totals, strict=True) if earlier and later]
    return _paired(*zip(*pairs, strict=True)) if pairs else None


def _paired(before: Sequence[float], after: Sequence[float]) -> dict[str, Any]:
    difference = paired_difference(before, after)._asdict()
    return {"before": fmean(before), "after": fmean(after), "difference": difference}


def _accuracy(old: dict[str, list[Outcome]], new: dict[str, list[Outcome]], measure: str) -> dict[str, Any]:
    """Compare a measure by problem."""
    before, after = (
        [fmean(getattr(outcome, measure) for outcome in group) for group in groups.values()] for groups in (old, new)
    )
    lost = won = None
    adjusted = statistics.paired_means(before, after)
    if all(len(group) == 1 for groups in (old, new) for group in groups.values()):
        pairs = [(earlier > 0.5, later > 0.5) for earlier, later in zip(before, after, strict=True)]
        lost, won = pairs.count((True, False)), pairs.count((False, True))
        adjusted = statistics.paired_proportions(lost, won, len(pairs))
    return {
        **_paired(before, after),
        "only_before": lost,
        "only_after": won,
        "p": statistics.sign_flip(before, after),
        "adjusted_interval": adjusted._asdict(),
    }


_COUNTS = ("turns", "verdicts", "reward", "return_mean", "parts", "seconds", "set", "problem_set")
"""Metrics of scores that are not about the policy."""


def summary_of(store: Store, versions: Sequence[str]) -> dict[str, Any]:
    """Read the summary of a policy on one set from the manifests of its scores, greedy and sampled."""
    numbers: dict[str, Any] = {}
    for version in versions:
        metrics, known = manifests.read(store, version).metrics, numbers.get("by_source", {})
        of_each = {source: known.get(source, {}) | own for source, own in metrics.get("by_source", {}).items()}
        numbers |= metrics | {"by_source": of_each}
    return {key: value for key, value in numbers.items() if key not in _COUNTS} | {"scores": list(versions)}
