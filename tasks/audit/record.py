"""An audit as a version: what it found, every case, and the report, under a name that follows from what it found."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from storage import layout
from storage.errors import DamagedError
from storage.objects.store import Store
from storage.records import CASE_SCHEMA
from storage.versions import manifests
from storage.versions.drafts import Draft, Provenance
from storage.versions.manifests import Manifest, Parent
from tasks.audit.conversations import Conversation, read_conversations
from tasks.audit.report import page
from tasks.audit.results import AuditResult, from_dict
from tasks.audit.run import Audited
from tasks.audit.selection import DataSet

RESULT, REPORT, CASES = "audit.json", "report.html", "cases.parquet"
_BATCH_ROWS = 100_000


def commit_audit(
    store: Store, data_sets: Sequence[DataSet], audited: Audited, provenance: Provenance, cache: Path, reader: str
) -> Manifest:
    """Write report, result and cases as a version; one that found the same in the same data is that version.

    Args:
        store: where to.
        data_sets: what was looked at.
        audited: what was found.
        provenance: the configuration.
        cache: gets the files where the store is remote, so that they can be opened.
        reader: command that shows all cases, less the version.
    """
    result = audited.result
    named = [version for each in data_sets for version in (each.version, *each.scores[-1:])]
    parents = [parent for version in named if (parent := _readable(store, version))]
    version = layout.audit(_fingerprint(audited, parents, provenance))
    if manifests.committed(store, version):
        return manifests.read(store, version)
    with Draft(store, version, "audit") as draft:
        (draft.scratch / RESULT).write_text(json.dumps(result.as_dict(), indent=1))
        html = page.render(result, _examples(audited), f"{reader} {version}")
        (draft.scratch / REPORT).write_text(html, encoding="utf-8")
        rows = _write_cases(audited, draft.scratch / CASES)
        draft.add(draft.scratch / RESULT, RESULT)
        draft.add(draft.scratch / REPORT, REPORT)
        draft.add(draft.scratch / CASES, CASES, rows)
        verdicts = {check.name: check.verdict for check in result.checks}
        metrics = {
            "verdict": result.verdict,
            "checks": verdicts,
            "data_sets": len(data_sets),
            "trajectories": sum(each.trajectories for each in result.sets),
        }
        manifest = draft.commit(
            provenance.model_copy(update={"fence": None}), [parent.version for parent in parents], metrics
        )
        draft.hand_over(cache)
    return manifest


def read_audit(store: Store, version: str, cache: Path) -> tuple[AuditResult, Path]:
    """A committed audit, and a local folder with its files.

    Raises:
        StorageError: there is none, or it is damaged.
    """
    from storage.versions.fetch import fetch

    manifest = manifests.read(store, version)
    paths = [fetch(store, manifest, file.name, cache) for file in manifest.files]
    folder = paths[0].parent
    return from_dict(json.loads((folder / RESULT).read_text())), folder


def _readable(store: Store, version: str) -> Parent | None:
    """`version` as a parent; None where its manifest is damaged, which a check has told by now."""
    try:
        return manifests.as_parent(store, version)
    except DamagedError:
        return None


def _fingerprint(audited: Audited, parents: Sequence[Parent], provenance: Provenance) -> str:
    """Of data, knobs and findings; not of how long it took, nor of the last bits of sums."""
    found = audited.database.one(
        "select bit_xor(hash(check_name, id, data_set)), count(*) from (select distinct * from cases)"
    )
    identity: dict[str, Any] = {
        "parents": [parent.sha256 for parent in parents],
        "audit": provenance.config.get("audit"),
        "cases": [str(value) for value in found],
        "checks": [(each.name, each.verdict, each.cases, each.of) for each in audited.result.checks],
    }
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]


def _examples(audited: Audited) -> dict[tuple[str, str], Conversation]:
    """What was said in the cases that the report shows; of a group or a problem in one of its episodes.

    Not where that is what should not be repeated.
    """
    database = audited.database
    cases = {
        (column, case.data_set, case.id)
        for check in audited.result.checks
        if check.name not in _NOT_REPEATED
        for case in check.examples
        if (column := _NAMED_BY.get(case.unit))
    }
    names = [{"named_by": column, "version": version, "id": name} for column, version, name in sorted(cases)]
    if not names:
        return {}
    database.connection.register("shown", pa.Table.from_pylist(names))
    rows = database.all(
        """select s.version, s.id, min(e.row)
        from shown s join episodes e
            on s.id = case s.named_by when 'problem_id' then e.problem_id else e.trajectory_id end
        join data_sets d on d.data_set = e.data_set and (s.version = '' or s.version = d.version) group by 1, 2"""
    )
    database.connection.unregister("shown")
    spoken = {each.row: each for each in read_conversations(database, sorted({row for *_, row in rows}))}
    return {(version, name): spoken[row] for version, name, row in rows}


_NAMED_BY = {"trajectory": "trajectory_id", "turn": "trajectory_id", "group": "problem_id", "problem": "problem_id"}
"""By unit of a case the column of its id."""
_NOT_REPEATED = ("secrets", "personal_data")
"""A version cannot be deleted: what these checks find shall stand in none but the data set's own."""


def _write_cases(audited: Audited, path: Path) -> int:
    """All cases as Parquet, streamed; returns how many."""
    reader = audited.database.connection.sql(
        """select row_number() over (order by check_name, data_set, id, detail) - 1 as number, * from (
            select check_name, unit, id, data_set, detail from cases
        ) order by number"""
    ).to_arrow_reader(_BATCH_ROWS)
    rows = 0
    with pq.ParquetWriter(path, CASE_SCHEMA, compression="zstd", write_page_checksum=True) as writer:
        for batch in reader:
            writer.write_batch(batch.cast(CASE_SCHEMA))
            rows += batch.num_rows
    return rows
