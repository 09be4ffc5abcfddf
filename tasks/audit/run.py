"""The audit itself: data sets in, verdicts, numbers and cases out."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from configs.audit import Audit, Checks
from storage.objects.store import Store
from tasks.audit.checks import CHECKS, AuditCheck, AuditEvidence, SkippedError
from tasks.audit.database import AuditDatabase, open_database
from tasks.audit.intake import take_in
from tasks.audit.numbers import histograms, set_numbers
from tasks.audit.results import AuditResult, CheckResult, Verdict, worst
from tasks.audit.selection import DataSet

if TYPE_CHECKING:
    from tasks.score.verifier import Verifier

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Audited:
    """What came of it, and the database in which all cases stand."""

    result: AuditResult
    database: AuditDatabase


@contextmanager
def audit(
    store: Store,
    data_sets: Sequence[DataSet],
    settings: Audit,
    cache: Path,
    verifier: "Verifier",
    progress: Progress = lambda _: None,
) -> Iterator[Audited]:
    """Look at `data_sets` with every check that is not ignored; the database stands while the block lasts.

    Raises:
        UnavailableError: the store does not answer.
    """
    clock = _Clock(progress)
    with clock.step("fetch and verify"):
        intake = take_in(store, list(data_sets), cache)
    with clock.opened("tables", open_database(data_sets, intake, settings)) as database:
        evidence = AuditEvidence(database, store, cache, list(data_sets), intake, settings, verifier)
        checks = [_checked(CHECKS[name], evidence, clock) for name in Checks.model_fields if _wanted(name, settings)]
        with clock.step("numbers"):
            sets, counts = set_numbers(database, evidence.drifts), histograms(database)
        verdict = worst([check.verdict for check in checks])
        if verdict == "pass" and not evidence.rows:  # whole, but nothing was looked at
            verdict = "skipped"
        yield Audited(AuditResult(store.root, verdict, checks, sets, counts, clock.seconds), database)


def _wanted(name: str, settings: Audit) -> bool:
    return bool(getattr(settings.checks, name).severity != "ignore")


def _checked(check: AuditCheck, evidence: AuditEvidence, clock: "_Clock") -> CheckResult:
    """A check that cannot be made is skipped, and says why."""
    knob = getattr(evidence.settings.checks, check.name)
    result = CheckResult(
        name=check.name,
        title=check.title,
        about=check.about,
        verdict="skipped",
        severity=knob.severity,
        value=None,
        threshold=knob.threshold,
        cases=0,
        of=0,
        unit=check.unit,
        says="",
    )
    with clock.step(check.name):
        try:
            if reason := _missing(check, evidence):
                raise SkippedError(reason)
            measured = check.run(evidence)
        except SkippedError as reason:
            return replace(result, says=str(reason))
        database = evidence.database
        verdict: Verdict = knob.severity if measured.value > knob.threshold else "pass"
        return replace(
            result,
            verdict=verdict,
            value=measured.value,
            cases=int(database.number("select count(*) from cases where check_name = ?", check.name)),
            of=measured.of,
            says=measured.says,
            examples=database.cases(check.name, evidence.settings.examples),
        )


_INTEGRITY = ("damaged_objects", "wrong_schema", "broken_parents")


def _missing(check: AuditCheck, evidence: AuditEvidence) -> str:
    """Why there is nothing to look at; empty where there is."""
    if check.name in _INTEGRITY:
        return ""
    if not evidence.rows:
        return "there is no row to look at"
    if check.needs_scores and not evidence.scored:
        return "the data sets have no scores: run the score stage (python -m flows.score) first"
    return ""


class _Clock:
    """Seconds by step, and progress."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self.seconds: dict[str, float] = {}

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        begun = time.monotonic()
        yield
        self.seconds[name] = time.monotonic() - begun
        self._progress(f"{name}: {self.seconds[name]:.1f} s")

    @contextmanager
    def opened(self, name: str, opening: AbstractContextManager[AuditDatabase]) -> Iterator[AuditDatabase]:
        """A context whose beginning is a step."""
        with ExitStack() as stack:
            with self.step(name):
                database = stack.enter_context(opening)
            yield database
