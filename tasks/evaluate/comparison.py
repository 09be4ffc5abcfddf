"""Compare two policies on the same problems: is the second better, and by how much?"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from statistics import fmean
from typing import Any

from tasks.evaluate.outcomes import Outcome, by_problem
from tasks.evaluate.statistics import mcnemar, paired_difference, paired_means, paired_proportions, sign_flip

_NAMED = 3  # problems that an error message names

Groups = Mapping[str, Sequence[Outcome]]
"""Outcomes by problem, in the order of the problems' ids."""


def compare(before: Sequence[Outcome], after: Sequence[Outcome]) -> dict[str, Any]:
    """Compute the differences after - before, paired by problem, JSON-ready.

    `first_turn` and `any_turn` hold the mean accuracy over problems before and after, and their difference with a 95 %
    bootstrap interval over problems. If each problem has one outcome, they also hold McNemar's exact test (the numbers
    of problems solved `only_before` and `only_after`, and p) and the difference's `score_interval`, which is valid even
    if few problems differ. If problems have several outcomes, a problem's accuracy is their mean, p comes from
    `sign_flip`, `adjusted_interval` replaces the score interval, and the counts are None.
    `answer_tokens`: mean number of sampled tokens of a turn, None without turns. `truncated`: share of episodes.

    Raises:
        ValueError: there are no outcomes, or before and after have different problems.
    """
    old, new = by_problem(before), by_problem(after)
    _check(old, new)
    return {
        "problems": len(old),
        "first_turn": _accuracy(old, new, "first"),
        "any_turn": _accuracy(old, new, "any"),
        "answer_tokens": _answer_tokens(before, after),
        "truncated": {"before": _truncated(before), "after": _truncated(after)},
    }


def _check(old: Groups, new: Groups) -> None:
    if not old and not new:
        raise ValueError("there are no outcomes to compare")
    unpaired = {"only before": sorted(old.keys() - new.keys()), "only after": sorted(new.keys() - old.keys())}
    if lines := [f"{len(ids)} {side} ({_first_ids(ids)})" for side, ids in unpaired.items() if ids]:
        raise ValueError(f"the outcomes are not of the same problems: {', '.join(lines)}. Compare results on one set")


def _first_ids(ids: Sequence[str]) -> str:
    return ", ".join(ids[:_NAMED]) + (" …" if len(ids) > _NAMED else "")


def _accuracy(old: Groups, new: Groups, measure: str) -> dict[str, Any]:
    before, after = (
        [fmean(getattr(outcome, measure) for outcome in group) for group in groups.values()] for groups in (old, new)
    )
    single = all(len(group) == 1 for groups in (old, new) for group in groups.values())
    return {
        "before": fmean(before),
        "after": fmean(after),
        "difference": paired_difference(before, after).as_dict(),
        **(_test_single_outcomes(before, after) if single else _test_means(before, after)),
    }


def _test_single_outcomes(before: Sequence[float], after: Sequence[float]) -> dict[str, Any]:
    test = mcnemar(before, after)
    interval = paired_proportions(test.only_before, test.only_after, len(before))
    return {**asdict(test), "score_interval": interval.as_dict(), "adjusted_interval": None}


def _test_means(before: Sequence[float], after: Sequence[float]) -> dict[str, Any]:
    return {
        "only_before": None,
        "only_after": None,
        "p": sign_flip(before, after),
        "score_interval": None,
        "adjusted_interval": paired_means(before, after).as_dict(),
    }


def _answer_tokens(before: Sequence[Outcome], after: Sequence[Outcome]) -> dict[str, float | None]:
    old, new = _mean_tokens(before), _mean_tokens(after)
    return {"before": old, "after": new, "ratio": new / old if old and new is not None else None}


def _mean_tokens(outcomes: Sequence[Outcome]) -> float | None:
    counts = [count for outcome in outcomes for count in outcome.tokens]
    return fmean(counts) if counts else None


def _truncated(outcomes: Sequence[Outcome]) -> float:
    return fmean(outcome.status == "truncated" for outcome in outcomes)
