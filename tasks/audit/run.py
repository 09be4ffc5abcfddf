"""Run all checks on data sets: the result has their verdicts and numbers, the database has all cases."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from configs.audit import Audit, Checks
from storage.objects.store import Store
from tasks.audit.checks import CHECKS, AuditCheck, AuditEvidence, SkippedError
from tasks.audit.database import AuditDatabase, open_database
from tasks.audit.intake import fetch_data_sets
from tasks.audit.numbers import histograms, set_numbers
from tasks.audit.results import AuditResult, CheckResult, Verdict, worst
from tasks.audit.selection import DataSet
from tasks.score.verifier import Verifier

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Audited:
    """The result of an audit, and the database with all its cases."""

    result: AuditResult
    database: AuditDatabase


@contextmanager
def audit(
    store: Store,
    data_sets: Sequence[DataSet],
    settings: Audit,
    cache: Path,
    verifier: Verifier,
    progress: Progress = lambda _: None,
) -> Iterator[Audited]:
    """Run every check that is not ignored on `data_sets`. The database is open until the block ends.

    Raises:
        UnavailableError: the store does not answer.
    """
    clock = _Clock(progress)
    with clock.step("fetch and verify"):
        intake = fetch_data_sets(store, list(data_sets), cache)
    with clock.opened("tables", open_database(data_sets, intake, settings)) as database:
        evidence = AuditEvidence(database, store, cache, list(data_sets), intake, settings, verifier)
        names = [name for name in Checks.model_fields if getattr(settings.checks, name).severity != "ignore"]
        checks = [_run_check(CHECKS[name], evidence, clock) for name in names]
        with clock.step("numbers"):
            sets, counts = set_numbers(database, evidence.drifts), histograms(database)
        verdict = worst([check.verdict for check in checks])
        if verdict == "pass" and not evidence.rows:  # no damage was found, but there was no row to check
            verdict = "skipped"
        yield Audited(AuditResult(store.root, verdict, checks, sets, counts, clock.seconds), database)


def _run_check(check: AuditCheck, evidence: AuditEvidence, clock: "_Clock") -> CheckResult:
    """Run one check; if it cannot run, its verdict is `skipped` and `says` has the reason."""
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
            if reason := _reason_to_skip(check, evidence):
                raise SkippedError(reason)
            measured = check.run(evidence)
        except SkippedError as reason:
            return replace(result, says=str(reason))
        database = evidence.database
        verdict: Verdict = knob.severity if measured.value > knob.threshold else "pass"
        if verdict == "pass" and measured.judged < evidence.settings.least_judged:
            verdict = "warn"
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


def _reason_to_skip(check: AuditCheck, evidence: AuditEvidence) -> str:
    """Return why the data lack what the check needs; empty if it can run."""
    if check.name in _INTEGRITY:
        return ""
    if not evidence.rows:
        return "there is no row to check"
    if check.needs_scores and not evidence.scored:
        return "the data sets have no scores: run the score stage (python -m flows.score) first"
    if check.needs_calls and not evidence.calls:
        return "no turn calls a tool"
    return ""


class _Clock:
    """The duration of each step in seconds; it also reports progress."""

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
        """Enter a context; entering it is a step."""
        with ExitStack() as stack:
            with self.step(name):
                database = stack.enter_context(opening)
            yield database
