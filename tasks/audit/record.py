"""Commit an audit as a version: the result, every case and the report. Its name is a digest of data and findings."""

import hashlib
import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from storage import layout
from storage.errors import DamagedError
from storage.objects.store import Store
from storage.records import CASE_SCHEMA
from storage.versions import manifests
from storage.versions.datasets import write_parquet
from storage.versions.drafts import Provenance, stage
from storage.versions.fetch import fetch
from storage.versions.manifests import Manifest, Parent
from tasks.audit.database import Conversation, read_conversations
from tasks.audit.report import page
from tasks.audit.results import AuditResult, from_dict
from tasks.audit.run import Audited
from tasks.tables.sets import DataSet

RESULT, REPORT, CASES = "audit.json", "report.html", "cases.parquet"


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
    result = audited.result
    parents = list[Parent]()
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
    rows = database.all(
        """select s.version, s.id, min(e.row)
        from shown s join episodes e on s.unit in ('trajectory', 'turn', 'call') and s.id = e.trajectory_id
            or s.unit in ('group', 'problem') and s.id = e.problem_id
        join data_sets d on d.data_set = e.data_set and (s.version = '' or s.version = d.version) group by 1, 2"""
    )
    spoken = {each["row"]: each for each in read_conversations(database, sorted({row for *_, row in rows}))}
    return {(version, name): spoken[row] for version, name, row in rows}


_NOT_REPEATED = ("secrets", "personal_data")
"""A version cannot be deleted, so the texts that these checks find must not be copied into the audit's version."""

_ALL_CASES = """select row_number() over (order by check_name, data_set, id, detail) - 1 as number,
    check_name, unit, id, data_set, detail from cases order by number"""
