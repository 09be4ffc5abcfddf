"""Run all checks on data sets, and compute their numbers and histograms; the database has all cases."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from configs.audit import Audit, Checks
from storage.errors import counted
from storage.objects.store import Store
from tasks.audit.checks import AuditCheck, AuditEvidence, SkippedError, all_checks
from tasks.audit.checks.functions import open_evidence
from tasks.audit.database import AuditDatabase, open_database
from tasks.audit.results import AuditResult, CheckResult, Histogram, SetNumbers, Verdict, worst
from tasks.score.verifier import Verifier
from tasks.tables.sets import DataSet, fetch_data_sets


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
    progress: Callable[[str], None] = lambda _: None,
) -> Iterator[Audited]:
    """Run every check that is not ignored on `data_sets`. The database is open until the block ends.

    Raises:
        UnavailableError: the store does not answer.
    """
    seconds, begun = dict[str, float](), time.monotonic()

    def tell(step: str) -> None:
        nonlocal begun
        seconds[step], begun = time.monotonic() - begun, time.monotonic()
        progress(f"{step}: {seconds[step]:.1f} s")

    intake = fetch_data_sets(store, list(data_sets), cache)
    tell("fetch and verify")
    with open_database(data_sets, intake, settings) as database:
        tell("tables")
        evidence = open_evidence(database, store, cache, data_sets, intake, settings, verifier)
        results = list[CheckResult]()
        for name in Checks.model_fields:
            if getattr(settings.checks, name).severity != "ignore":
                results.append(_run_check(all_checks()[name], evidence))
                tell(name)
        sets, counts = set_numbers(database, evidence.drifts), histograms(database)
        tell("numbers")
        verdict = worst([result.verdict for result in results])
        if verdict == "pass" and not evidence.rows:  # no damage was found, but there was no row to check
            verdict = "skipped"
        yield Audited(AuditResult(store.root, verdict, results, sets, counts, seconds), database)


def _run_check(check: AuditCheck, evidence: AuditEvidence) -> CheckResult:
    """Run one check; if it cannot run, its verdict is `skipped` and `says` has the reason."""
    knob, settings, database = getattr(evidence.settings.checks, check.name), evidence.settings, evidence.database
    of_check: dict[str, Any] = {"name": check.name, "about": check.about, "unit": check.unit}
    of_check |= {"severity": knob.severity, "threshold": knob.threshold}
    try:
        database.set("left_out", [])
        left_out, words = evidence.left_out(check.needs)
        database.set("left_out", [each.number for each in left_out])
        measured = check.run(evidence)
    except SkippedError as reason:
        return CheckResult(**of_check, verdict="skipped", value=None, cases=0, of=0, says=str(reason))
    says = measured.says
    if left_out:
        says += f"; left out: {counted(len(left_out), 'data set')} without {words}, such as {left_out[0].version}"
    verdict: Verdict = knob.severity if measured.value > knob.threshold else "pass"
    if verdict == "pass" and measured.judged < settings.least_judged:
        verdict = "warn"
    return CheckResult(
        **of_check,
        verdict=verdict,
        value=measured.value,
        cases=int(database.number("select count(*) from cases where check_name = ?", check.name)),
        of=measured.of,
        share_of=measured.share_of,
        says=says,
        examples=database.cases(check.name, settings.examples),
    )


_BINS = 20
Values = np.ndarray[Any, Any]


def set_numbers(database: AuditDatabase, drifts: Mapping[str, float]) -> list[SetNumbers]:
    """Return the numbers of each readable data set; `drifts` maps a version to its logprob drift, if it is known."""
    found = database.records("select * exclude (data_set) from set_numbers order by data_set")
    return [SetNumbers(**columns, drift=drifts.get(columns["version"])) for columns in found]


def histograms(database: AuditDatabase) -> list[Histogram]:
    """Return histograms of turn lengths, success rates of groups, rewards, and staleness of episodes' oldest tokens.

    Bins have equal width: whole numbers if the values are whole.
    """
    query = """select title, unit, list(v), list(count) from (
        select number, title, unit, v, count(*) as count from histogram_values where isfinite(v) group by all
    ) group by number, title, unit order by number"""
    return [_histogram(title, unit, *map(np.array, columns)) for title, unit, *columns in database.all(query)]


def _histogram(title: str, unit: str, values: Values, weights: Values) -> Histogram:
    low, high = values.min(), values.max()
    edges = np.linspace(low, high, _BINS + 1) if high > low else np.array([low, low + 1])
    if (values == np.floor(values)).all() and high > 1:
        width = max(1.0, np.ceil((high - low + 1) / _BINS))
        edges = np.arange(low, high + width + 0.5, width)
    counts, _ = np.histogram(values, edges, weights=weights)
    return Histogram(title, unit, edges.tolist(), counts.astype(int).tolist())
