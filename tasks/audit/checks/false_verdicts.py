"""Verdicts that a second checker contradicts: right answers that are called wrong teach a policy to avoid them."""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

from tasks.audit.checks.registry import AuditEvidence, Measured, register_check
from tasks.audit.results import Case
from tasks.audit.second_checker import Opinion, opinion
from tasks.evaluate.statistics import proportion

_SHOWN = 60  # characters
_LEAST = 20  # turns: of fewer each may be the odd one


def _contradicted(
    check: str, verdict: Literal["wrong", "correct"], contrary: Opinion, evidence: AuditEvidence
) -> Measured:
    """Shows a sample of `verdict` to the second checker; the value is the least share that is likely contradicted."""
    sample = evidence.database.all(
        """select trajectory_id, version, turn, text, solutions
        from (
            select row, data_set, turn, text, trajectory_id from turns where verdict = ?
            order by hash(row, turn), row, turn limit ?
        ) join (select row, solutions from trajectories) using (row) join data_sets using (data_set)
        order by row, turn""",
        verdict,
        evidence.settings.judged_again,
    )
    opinions = [opinion(text, solutions) for _, _, _, text, solutions in sample]
    pairs = zip(sample, opinions, strict=True)
    evidence.database.flag_all(
        check, [_case(row, answer, verdict) for row, (said, answer) in pairs if said == contrary]
    )
    return _measured([said for said, _ in opinions], verdict, contrary)


def _case(row: tuple[Any, ...], answer: str, verdict: str) -> Case:
    name, version, turn, _, solutions = row
    read = f"the second checker reads {answer[:_SHOWN]!r}, the gold is {_gold(solutions)}"
    return Case("turn", name, version, f"turn {turn + 1}: judged {verdict}; {read}")


def _gold(solutions: list[str]) -> str:
    return " or ".join(repr(solution[:_SHOWN]) for solution in solutions[:3])


def _measured(opinions: list[Opinion], verdict: str, contrary: Opinion) -> Measured:
    told: list[Opinion] = [said for said in opinions if said != "cannot say"]
    if not told:
        return Measured(0.0, 0, f"of {len(opinions):,} turns judged {verdict} the second checker could judge none")
    estimate = proportion([float(said == contrary) for said in told])
    says = (
        f"the second checker calls {told.count(contrary):,} of {len(told):,} turns judged {verdict} {contrary}: "
        f"{estimate.value:.1%}, 95 % interval {estimate.low:.1%} to {estimate.high:.1%}"
    )
    if len(told) < _LEAST:
        says += f"; fewer than {_LEAST} are no alarm"
    if silent := len(opinions) - len(told):
        says += f"; of {silent:,} more it cannot say"
    return Measured(estimate.low if len(told) >= _LEAST else 0.0, len(told), says)


false_negatives: Callable[[AuditEvidence], Measured] = partial(_contradicted, "false_negatives", "wrong", "right")
false_positives: Callable[[AuditEvidence], Measured] = partial(_contradicted, "false_positives", "correct", "wrong")

register_check("false_negatives", "Right answers judged wrong", "turn", false_negatives, needs_scores=True)
register_check("false_positives", "Wrong answers judged right", "turn", false_positives, needs_scores=True)
