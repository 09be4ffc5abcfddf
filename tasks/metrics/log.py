"""The log of a run's metrics, in `runs/<run>/metrics/`; it is made from committed manifests alone.

`000000.jsonl` has the stages of the first 100 iterations, `000100.jsonl` those of the next, and so on, written by the
holder of the run's lease as each stage commits. Each evaluation has a file of its own, `evaluation-….jsonl`, since any
flow may evaluate any policy. What a killed flow run could not write any more is written by the next one.
"""

import itertools
import json
import logging
from collections.abc import Iterator

from storage import layout
from storage.errors import DamagedError
from storage.logs import catalog
from storage.objects.store import Store, in_parallel
from storage.versions import manifests
from tasks.metrics.rows import STAGES, Row, by_iteration, order, row_of

logger = logging.getLogger(__name__)
PER_FILE = 100
"""Iterations in a file: few files to read, and little to write again with each row."""


class MetricsLog:
    """The log of one run, for the holder of its lease."""

    def __init__(self, store: Store, run: str) -> None:
        self._store, self._run = store, run
        self._files: dict[str, dict[str, Row]] = {}  # rows by version, by key of the file

    def record(self, version: str) -> None:
        """Write the row of a committed version, unless it is there."""
        if row := row_of(manifests.read(self._store, version)):
            self._add(row)

    def catch_up(self) -> None:
        """Write the rows of versions that were committed after the newest row: a flow run may have been killed then.

        A run of an older program, and one whose log is damaged, gets all of its rows.
        """
        try:
            known = {row["version"] for row in _logged(self._store, self._run)}
        except DamagedError as error:
            logger.warning("%s", error)
            known = set()
        made = _made_newest_first(self._store, self._run)
        for row in reversed(list(itertools.takewhile(lambda row: row["version"] not in known, made))):
            self._add(row)

    def iteration(self, number: int) -> Row:
        """Return the merged row of an iteration whose stages were recorded (see `by_iteration`)."""
        rows = self._rows(layout.metrics(self._run, number // PER_FILE * PER_FILE))
        return by_iteration(row for row in rows.values() if row["iteration"] == number)[number]

    def _rows(self, key: str) -> dict[str, Row]:
        """Return the rows of a file by version; a damaged one is written anew."""
        if key not in self._files:
            try:
                self._files[key] = {known["version"]: known for known in _read(self._store, key)}
            except (FileNotFoundError, DamagedError):
                self._files[key] = {}
        return self._files[key]

    def _add(self, row: Row) -> None:
        if row["stage"] == "evaluate":
            record_evaluation(self._store, row["version"])
            return
        key = layout.metrics(self._run, row["iteration"] // PER_FILE * PER_FILE)
        rows = self._rows(key)
        if rows.get(row["version"]) != row:
            rows[row["version"]] = row
            lines = (json.dumps(each) for each in sorted(rows.values(), key=order))
            self._store.write(key, "\n".join([*lines, ""]).encode())


def record_evaluation(store: Store, scores: str) -> None:
    """Write the row of an evaluation, given its scores, to the log of its policy's run; needs no lease."""
    key = layout.metrics_of_evaluation(scores)
    if not store.exists(key) and (row := row_of(manifests.read(store, scores))):
        store.write(key, f"{json.dumps(row)}\n".encode())


def read_rows(store: Store, run: str) -> list[Row]:
    """Read the rows of a run, in order. Without a log, in stores of older programs, make them from the manifests.

    Raises:
        DamagedError: a line is not a row; the message says what to do.
    """
    return sorted(_logged(store, run) or _made_newest_first(store, run), key=order)


def _logged(store: Store, run: str) -> list[Row]:
    keys = [item.path for item in store.walk(layout.metrics_folder(run)) if item.path.endswith(".jsonl")]
    return [row for rows in in_parallel(lambda key: _read(store, key), keys) for row in rows]


def _read(store: Store, key: str) -> list[Row]:
    """Read one file of the log.

    Raises:
        FileNotFoundError: it does not exist.
        DamagedError: a line is not a row; the message says that the file can be deleted.
    """
    try:
        rows: list[Row] = [json.loads(line) for line in store.read(key).splitlines()]
        for row in rows:
            assert isinstance(row["version"], str)
            order(row)
    except (ValueError, TypeError, KeyError, AssertionError) as error:
        raise DamagedError(
            f"{store.uri(key)} is damaged ({error!r}): delete the folder; the next flow run makes it again"
        ) from None
    return rows


def _made_newest_first(store: Store, run: str) -> Iterator[Row]:
    """Make the rows of all committed versions of a run, each once, newest first."""
    seen = set[str]()
    for entry in catalog.newest_first(store):
        if isinstance(entry, DamagedError):  # `python -m storage verify` reports it
            continue
        if entry.version == layout.run(run):  # the first that was committed of it
            return
        if entry.kind in STAGES and layout.run_of(entry.version) == run and entry.version not in seen:
            seen.add(entry.version)
            manifest = manifests.find(store, entry.version)
            if manifest and (row := row_of(manifest)):
                yield row
