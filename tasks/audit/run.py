"""Run all checks on data sets, compute their numbers and histograms, and commit what was found as a version.

The version has the result, every case and the report. Its name is a digest of data and findings.
"""

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from configs.audit import Audit, Checks
from storage import layout
from storage.errors import DamagedError, counted
from storage.objects.store import Store
from storage.records import CASE_SCHEMA
from storage.versions import manifests
from storage.versions.datasets import write_parquet
from storage.versions.drafts import Provenance, stage
from storage.versions.fetch import fetch
from storage.versions.manifests import Manifest, Parent
from tasks.audit.checks import AuditCheck, AuditEvidence, SkippedError, all_checks
from tasks.audit.checks.functions import add_functions
from tasks.audit.database import AuditDatabase, Conversation, open_database, read_conversations
from tasks.audit.report import page
from tasks.audit.results import AuditResult, CheckResult, Histogram, Level, SetNumbers, from_dict, worst
from tasks.score.verifier import Verifier
from tasks.tables.sets import DataSet, fetch_data_sets

RESULT, REPORT, CASES = "audit.json", "report.html", "cases.parquet"


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
        evidence = AuditEvidence(database, store, cache, list(data_sets), intake, settings, verifier)
        add_functions(evidence)
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
    verdict: Level = knob.severity if measured.value > knob.threshold else "pass"
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


def commit_audit(
    store: Store, data_sets: Sequence[DataSet], audited: Audited, provenance: Provenance, cache: Path, reader: str
) -> Manifest:
    """Commit report, result and cases; an audit with the same findings on the same data returns its committed version.

    Args:
        store: the store to write to.
        data_sets: the audited data sets.
        audited: the result and the database with the cases.
        provenance: the configuration.
        cache: gets the files if the store is remote, so that they can be opened.
        reader: command that shows all cases, without the version at its end.
    """
    result, parents = audited.result, list[Parent]()
    for version in [version for each in data_sets for version in (each.version, *each.scores[-1:])]:
        with suppress(DamagedError):  # a check has reported it by now
            parents.append(manifests.as_parent(store, version))
    version = layout.audit(_fingerprint(audited, parents, provenance))
    metrics = {
        "verdict": result.verdict,
        "checks": {check.name: check.verdict for check in result.checks},
        "data_sets": len(data_sets),
        "trajectories": sum(each.trajectories for each in result.sets),
    }
    with stage(store, version) as draft:
        if draft:
            html = page.render(result, _examples(audited), f"{reader} {version}")
            (draft.scratch / RESULT).write_text(json.dumps(asdict(result), indent=1))
            (draft.scratch / REPORT).write_text(html, encoding="utf-8")
            cases = audited.database.connection.sql(_ALL_CASES).to_arrow_table().cast(CASE_SCHEMA)
            write_parquet(cases, draft.scratch / CASES)
            for name, rows in ((RESULT, None), (REPORT, None), (CASES, cases.num_rows)):
                draft.add(draft.scratch / name, name, rows)
            draft.commit(provenance, [parent.version for parent in parents], metrics)
            draft.hand_over(cache)
    return manifests.read(store, version)


def read_audit(store: Store, version: str, cache: Path) -> tuple[AuditResult, Path]:
    """Fetch a committed audit; return its result and a local folder with its files.

    Raises:
        StorageError: there is no such version, or it is damaged.
    """
    manifest = manifests.read(store, version)
    paths = [fetch(store, manifest, file.name, cache) for file in manifest.files]
    folder = paths[0].parent
    return from_dict(json.loads((folder / RESULT).read_text())), folder


def _fingerprint(audited: Audited, parents: Sequence[Parent], provenance: Provenance) -> str:
    """Return a digest of data, knobs and findings, without durations and measured values, whose last bits vary."""
    cases = "select bit_xor(hash(check_name, id, data_set)), count(*) from (select distinct * from cases)"
    identity: dict[str, Any] = {
        "parents": [parent.sha256 for parent in parents],
        "audit": provenance.config.get("audit"),
        "cases": list(map(str, audited.database.one(cases))),
        "checks": [(each.name, each.verdict, each.cases, each.of) for each in audited.result.checks],
    }
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]


def _examples(audited: Audited) -> dict[tuple[str, str], Conversation]:
    """Return a conversation for each case that the report shows; for a group or a problem, one of its episodes.

    Cases of checks whose findings must not be repeated have no conversation.
    """
    database = audited.database
    checks = [check for check in audited.result.checks if check.name not in _NOT_REPEATED]
    cases = {(case.unit, case.data_set, case.id) for check in checks for case in check.examples}
    database.connection.execute("create or replace temp table shown (unit varchar, version varchar, id varchar)")
    database.insert("shown", sorted(cases))
    query = """select s.version, s.id, min(e.row)
        from shown s join episodes e on s.unit in ('trajectory', 'turn', 'call') and s.id = e.trajectory_id
            or s.unit in ('group', 'problem') and s.id = e.problem_id
        join data_sets d on d.data_set = e.data_set and (s.version = '' or s.version = d.version) group by 1, 2"""
    rows = database.all(query)
    spoken = {each["row"]: each for each in read_conversations(database, sorted({row for *_, row in rows}))}
    return {(version, name): spoken[row] for version, name, row in rows}


_NOT_REPEATED = ("secrets", "personal_data")
"""A version cannot be deleted, so the texts that these checks find must not be copied into the audit's version."""

_ALL_CASES = """select row_number() over (order by check_name, data_set, id, detail) - 1 as number,
    check_name, unit, id, data_set, detail from cases order by number"""
