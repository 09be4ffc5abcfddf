"""Check verdicts with a second checker. `verdicts.sql` has the other checks of verdicts."""

from collections.abc import Sequence
from typing import Literal

from tasks.audit.checks import AuditEvidence, Measured, check
from tasks.audit.checks.second_checker import Opinion, opinion
from tasks.evaluate.statistics import proportion
from tasks.tables.sets import Case

_SHOWN = 60  # characters
_LEAST = 20  # turns; fewer are too few for a share


@check("false_negatives", "turn", needs="scores golds")
def false_negatives(evidence: AuditEvidence) -> Measured:
    """Estimate the share of right answers among those judged wrong, which teach the policy to avoid them."""
    return _contradicted("false_negatives", "wrong", "right", evidence)


@check("false_positives", "turn", needs="scores golds")
def false_positives(evidence: AuditEvidence) -> Measured:
    """Estimate the share of wrong answers among those judged right."""
    return _contradicted("false_positives", "correct", "wrong", evidence)


def _contradicted(
    name: str, verdict: Literal["wrong", "correct"], contrary: Opinion, evidence: AuditEvidence
) -> Measured:
    """Grade a sample of math-verify's turns with `verdict` again, and flag those that the second checker contradicts.

    The value is the lower end of the 95 % interval of the share that the second checker contradicts. If it could judge
    too few, those that it could not judge are flagged, too.
    """
    sample = evidence.database.all(
        """select trajectory_id, version, turn, given, solutions
        from (
            select row, data_set, turn, given, trajectory_id from turns
            where verdict = ? and scorer = 'math-verify' and not is_left_out(data_set)
            order by hash(row, turn), row, turn limit ?
        ) join (select row, solutions from trajectories) using (row) join data_sets using (data_set)
        order by row, turn""",
        verdict,
        evidence.settings.judged_again,
    )
    opinions = [opinion(given, solutions) for *_, given, solutions in sample]
    measured = _measured([each for each, _ in opinions], verdict, contrary)
    flagged = {contrary, "cannot say"} if measured.judged < evidence.settings.least_judged else {contrary}
    cases = list[Case]()
    for (row, version, turn, given, solutions), (second, answer) in zip(sample, opinions, strict=True):
        if second in flagged:
            cannot = f"cannot judge {given[-_SHOWN:]!r}"
            read = cannot if second == "cannot say" else f"reads {answer[:_SHOWN]!r}"
            gold = " or ".join(repr(solution[:_SHOWN]) for solution in solutions[:3])
            detail = f"turn {turn + 1}: judged {verdict}; the second checker {read}, the gold is {gold}"
            cases.append(Case("turn", row, version, detail))
    evidence.database.flag_all(name, cases)
    return measured


def _measured(opinions: Sequence[Opinion], verdict: str, contrary: Opinion) -> Measured:
    decided: list[Opinion] = [opinion for opinion in opinions if opinion != "cannot say"]
    judged = len(decided) / len(opinions) if len(opinions) >= _LEAST else 1.0
    if not decided:
        says = f"the second checker could judge none of {len(opinions):,} turns judged {verdict}"
        return Measured(0.0, 0, says, judged)
    estimate = proportion([float(opinion == contrary) for opinion in decided])
    says = (
        f"the second checker calls {decided.count(contrary):,} of {len(decided):,} turns judged {verdict} {contrary}: "
        f"{estimate.value:.1%}, 95 % interval {estimate.low:.1%} to {estimate.high:.1%}"
    )
    if len(decided) < _LEAST:
        says += f"; fewer than {_LEAST} turns raise no alarm"
    if undecided := len(opinions) - len(decided):
        says += f"; it cannot judge {undecided:,} more"
    return Measured(estimate.low if len(decided) >= _LEAST else 0.0, len(decided), says, judged)
