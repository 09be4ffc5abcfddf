"""Check verdicts with a second checker: right answers that are judged wrong teach the policy to avoid them."""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

from tasks.audit.checks.registry import AuditEvidence, Measured, register_check
from tasks.audit.results import Case
from tasks.audit.second_checker import Opinion, opinion
from tasks.evaluate.statistics import proportion

_SHOWN = 60  # characters
_LEAST = 20  # turns; fewer are too few for a share


def _contradicted(
    check: str, verdict: Literal["wrong", "correct"], contrary: Opinion, evidence: AuditEvidence
) -> Measured:
    """Judge a sample of math-verify's turns with `verdict` again, and flag those that the second checker contradicts.

    The value is the lower end of the 95 % interval of the share that the second checker contradicts.
    """
    sample = evidence.database.all(
        """select trajectory_id, version, turn, text, solutions
        from (
            select row, data_set, turn, text, trajectory_id from turns
            where verdict = ? and scorer = 'math-verify'
            order by hash(row, turn), row, turn limit ?
        ) join (select row, solutions from trajectories) using (row) join data_sets using (data_set)
        order by row, turn""",
        verdict,
        evidence.settings.judged_again,
    )
    opinions = [opinion(text, solutions) for _, _, _, text, solutions in sample]
    pairs = zip(sample, opinions, strict=True)
    evidence.database.flag_all(
        check, [_case(row, answer, verdict) for row, (judged, answer) in pairs if judged == contrary]
    )
    return _measured([judged for judged, _ in opinions], verdict, contrary)


def _case(row: tuple[Any, ...], answer: str, verdict: str) -> Case:
    name, version, turn, _, solutions = row
    read = f"the second checker reads {answer[:_SHOWN]!r}, the gold is {_gold(solutions)}"
    return Case("turn", name, version, f"turn {turn + 1}: judged {verdict}; {read}")


def _gold(solutions: list[str]) -> str:
    return " or ".join(repr(solution[:_SHOWN]) for solution in solutions[:3])


def _measured(opinions: list[Opinion], verdict: str, contrary: Opinion) -> Measured:
    decided: list[Opinion] = [opinion for opinion in opinions if opinion != "cannot say"]
    if not decided:
        return Measured(0.0, 0, f"the second checker could judge none of {len(opinions):,} turns judged {verdict}")
    estimate = proportion([float(opinion == contrary) for opinion in decided])
    says = (
        f"the second checker calls {decided.count(contrary):,} of {len(decided):,} turns judged {verdict} {contrary}: "
        f"{estimate.value:.1%}, 95 % interval {estimate.low:.1%} to {estimate.high:.1%}"
    )
    if len(decided) < _LEAST:
        says += f"; fewer than {_LEAST} turns raise no alarm"
    if undecided := len(opinions) - len(decided):
        says += f"; it cannot judge {undecided:,} more"
    return Measured(estimate.low if len(decided) >= _LEAST else 0.0, len(decided), says)


false_negatives: Callable[[AuditEvidence], Measured] = partial(_contradicted, "false_negatives", "wrong", "right")
false_positives: Callable[[AuditEvidence], Measured] = partial(_contradicted, "false_positives", "correct", "wrong")

register_check("false_negatives", "Right answers judged wrong", "turn", false_negatives, needs_scores=True)
register_check("false_positives", "Wrong answers judged right", "turn", false_positives, needs_scores=True)
