"""The log of a run's metrics: `runs/<run>/metrics/000000.jsonl`, the next 100 iterations in `000100.jsonl`, and so on.

The log is made from committed manifests alone, so it can be made again at any time. It is written as each stage
commits. What a killed flow run could not write any more is written by the next one.
"""

import itertools
import json
from collections.abc import Iterator

from storage import layout
from storage.errors import DamagedError
from storage.logs import catalog
from storage.logs.log import first_free
from storage.objects.store import Store, in_parallel
from storage.versions import manifests
from tasks.metrics.rows import STAGES, Row, by_iteration, order, row_of

PER_FILE = 100
"""Iterations in a file: few files to read, and little to write again with each row."""


class MetricsLog:
    """The log of one run, for its only writer, the holder of its lease."""

    def __init__(self, store: Store, run: str) -> None:
        self._store, self._run = store, run
        self._files: dict[int, dict[str, Row]] = {}  # rows by version, by number of the file

    def record(self, version: str) -> None:
        """Write the row of a committed version, unless it is there."""
        if row := row_of(manifests.read(self._store, version)):
            self._add(row)

    def catch_up(self) -> None:
        """Write the rows of versions that were committed after the newest row: a flow run may have been killed then.

        A run of an older program has no log yet: it gets all of its rows.
        """
        known = {row["version"] for row in _logged(self._store, self._run)}
        newest = itertools.takewhile(
            lambda row: row["version"] not in known, _made_newest_first(self._store, self._run)
        )
        for row in reversed(list(newest)):
            self._add(row)

    def iteration(self, number: int) -> Row:
        """Return the merged row of an iteration whose stages were recorded (see `by_iteration`)."""
        return by_iteration(row for row in self._rows(number).values() if row["iteration"] == number)[number]

    def _rows(self, iteration: int) -> dict[str, Row]:
        """Return the rows by version of the file for an iteration."""
        number = iteration // PER_FILE
        if number not in self._files:
            self._files[number] = {known["version"]: known for known in _read(self._store, self._run, number)}
        return self._files[number]

    def _add(self, row: Row) -> None:
        rows = self._rows(row["iteration"])
        if rows.get(row["version"]) != row:
            rows[row["version"]] = row
            lines = (json.dumps(each) for each in sorted(rows.values(), key=order))
            first = row["iteration"] // PER_FILE * PER_FILE
            self._store.write(layout.metrics(self._run, first), "\n".join([*lines, ""]).encode())


def read_rows(store: Store, run: str) -> list[Row]:
    """Read the rows of a run, in order. Without a log, in stores of older programs, make them from the manifests."""
    return sorted(_logged(store, run) or _made_newest_first(store, run), key=order)


def _logged(store: Store, run: str) -> list[Row]:
    files = first_free(lambda number: store.exists(layout.metrics(run, number * PER_FILE)))
    return [row for rows in in_parallel(lambda number: _read(store, run, number), range(files)) for row in rows]


def _read(store: Store, run: str, number: int) -> list[Row]:
    """Read one file of the log; no rows if it does not exist.

    Raises:
        DamagedError: a line is not a row; the message says that the file can be deleted.
    """
    key = layout.metrics(run, number * PER_FILE)
    try:
        rows = [json.loads(line) for line in store.read(key).splitlines()]
        for row in rows:
            order(row)
    except FileNotFoundError:
        return []
    except (ValueError, TypeError, KeyError) as error:
        raise DamagedError(
            f"{store.uri(key)} is damaged ({error}): delete the folder, and it is made again from the manifests"
        ) from None
    return rows


def _made_newest_first(store: Store, run: str) -> Iterator[Row]:
    """Make the rows of all committed versions of a run, each once, newest first."""
    seen = set[str]()
    for entry in catalog.newest_first(store):
        if isinstance(entry, DamagedError):  # `python -m storage verify` reports it
            continue
        if entry.kind in STAGES and layout.run_of(entry.version) == run and entry.version not in seen:
            seen.add(entry.version)
            manifest = manifests.find(store, entry.version)
            if manifest and (row := row_of(manifest)):
                yield row
