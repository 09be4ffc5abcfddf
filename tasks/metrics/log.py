"""The log of a run's metrics, in `runs/<run>/metrics/`; it is made from committed manifests alone.

`000000.jsonl` has the stages of the first 100 iterations, `000100.jsonl` those of the next, and so on, written by the
holder of the run's lease as each stage commits. Each evaluation has a file of its own, `evaluation-….jsonl`, since any
flow may evaluate any policy. What a killed flow run could not write any more is written by the next one.
"""

import json
from collections import defaultdict
from collections.abc import Collection, Iterable
from datetime import datetime

from storage import layout
from storage.errors import DamagedError
from storage.objects.store import Store, in_parallel
from storage.version_names import version_of
from storage.versions import manifests
from tasks.metrics.rows import STAGES, Row, add_rest, by_iteration, numbers_of, order, row_of

PER_FILE = 100
"""Iterations in a file: few files to read, and little to write again with each row."""


def record(store: Store, version: str) -> None:
    """Write the row of a committed version, unless it is there; only the holder of a lease writes that of a stage."""
    if row := row_of(manifests.read(store, version)):
        _write(store, [row])


def begin_log(store: Store, run: str) -> None:
    """Begin the log of a run: with it, readers need not look for the run's versions."""
    if not store.exists(first := layout.metrics(run, 0)):
        store.write(first, b"")


def catch_up(store: Store, run: str) -> None:
    """Write the rows that the log of a run lacks, for the holder of its lease.

    The flow run before may have been killed, and older programs wrote none.

    Raises:
        DamagedError: see `read_rows`.
    """
    _write(store, _made(store, run, {row["version"] for row in _logged(store, run) or ()}))
    begin_log(store, run)


def read_rows(store: Store, run: str) -> list[Row]:
    """Read the rows of a run, in order. Without a log, in stores of older programs, make them from the manifests.

    Raises:
        DamagedError: a line is not a row; the message says what to do.
    """
    rows = _logged(store, run)
    return sorted(add_rest(_made(store, run)) if rows is None else rows, key=order)


def read_iteration(store: Store, run: str, number: int) -> Row:
    """Return the merged row of what an iteration has in the log so far."""
    key = layout.metrics(run, number // PER_FILE * PER_FILE)
    return by_iteration(_read(store, key) if store.exists(key) else ()).get(number, {})


def _logged(store: Store, run: str) -> list[Row] | None:
    """Read the files of a log; None if there are none but those of evaluations, as in a run of an older program."""
    keys = [item.path for item in store.walk(layout.metrics_folder(run)) if item.path.endswith(".jsonl")]
    if all("/evaluation-" in key for key in keys):
        return None
    return [row for rows in in_parallel(lambda key: _read(store, key), keys) for row in rows]


def _read(store: Store, key: str) -> list[Row]:
    """Read one file of the log.

    Raises:
        FileNotFoundError: it does not exist.
        DamagedError: a line is not a row; the message says that the file can be deleted.
    """
    try:
        rows: list[Row] = [json.loads(line) for line in store.read(key).splitlines()]
        assert all(type(value) in (int, float) for row in rows for value in numbers_of(row).values())
        assert all(version_of(row["version"]) and order(row) for row in rows)
        assert all(datetime.fromisoformat(row["at"]).tzinfo for row in rows)
    except (ValueError, TypeError, KeyError, AttributeError, AssertionError, RecursionError) as error:
        raise DamagedError(
            f"{store.uri(key)} is damaged ({type(error).__name__} {error}): "
            "delete the folder; the next flow run makes it again"
        ) from None
    return rows


def _write(store: Store, rows: Iterable[Row]) -> None:
    """Add rows to their files; write each file once."""
    files = defaultdict[str, dict[str, Row]](dict)
    for row in rows:
        of_hundred = layout.metrics(row["run"], row["iteration"] // PER_FILE * PER_FILE)
        key = layout.metrics_of_evaluation(row["version"]) if row["stage"] == "evaluate" else of_hundred
        files[key][row["version"]] = row
    for key, new in files.items():
        known = {row["version"]: row for row in _read(store, key)} if store.exists(key) else {}
        whole = add_rest((known | new).values())
        if whole != [*known.values()]:
            lines = [f"{json.dumps(row)}\n" for row in sorted(whole, key=order)]
            store.write(key, "".join(lines).encode())


def _made(store: Store, run: str, known: Collection[str] = ()) -> list[Row]:
    """Make the rows of the committed versions of a run, except those that are known."""
    listed = (version_of(layout.manifest_of(item.path) or "") for item in store.walk(f"runs/{run}"))
    versions = [version for version in listed if version and version.kind in STAGES and version not in known]
    return [row for row in in_parallel(lambda version: row_of(manifests.read(store, version)), versions) if row]
