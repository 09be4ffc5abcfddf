"""Tries out what the pipeline needs of a store, before versions are put there.

It writes under `doctor/<nonce>/` only, and deletes everything at the end; what a listing does not show is left to `gc`.
A probe is a function that returns what it found, or raises StorageError. It examines neither clocks (S3 refuses what a
host signs whose clock is 15 minutes wrong) nor what becomes of objects later: lifecycle rules, object locks, disks in
memory.
"""

import contextlib
import os
import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import compress
from pathlib import Path

from storage.errors import StorageError
from storage.objects.store import Store, sha256
from storage.processes.folder import TemporaryFolder

_WRITERS = 16
_ROUNDS = 5
_START_S = 120.0


def examine(store: Store) -> Iterator[tuple[str, str]]:
    """Yield what works: the name of each probe, and what it found.

    Raises:
        StorageError: the next probe found a problem; the message says what would go wrong in the pipeline.
    """
    scratch = store.below(f"doctor/{uuid.uuid4().hex[:12]}")
    for name, (probe, consequence) in _PROBES.items():
        try:
            yield name, probe(scratch)
        except (StorageError, OSError) as problem:
            if name != "write":  # else there is nothing, or no answer
                with contextlib.suppress(StorageError, OSError):
                    _tidy(scratch)
            raise StorageError(f"{name}: {problem}. So {consequence}") from problem


def _demand(holds: bool, otherwise: str) -> None:
    if not holds:
        raise StorageError(otherwise)


def _write(scratch: Store) -> str:
    scratch.write("write", b"to be replaced")
    scratch.write("write", data := os.urandom(16))
    _demand((found := scratch.read("write")) == data, f"wrote {data!r}, read {found!r}")
    _demand((size := scratch.size("write")) == len(data), f"wrote {len(data)} bytes, the store reports {size}")
    return "an object was written, replaced, and read back"


def _absence(scratch: Store) -> str:
    _demand(not scratch.exists("never-written"), "an object that was never written is reported to exist")
    with contextlib.suppress(FileNotFoundError):
        raise StorageError(f"an object that was never written reads as {scratch.read('never-written')[:20]!r}")
    return "absent objects are reported as absent"


def _race(scratch: Store) -> str:
    """Probe put-if-absent, on which all commits rely: of many writers of one object, exactly one succeeds."""
    start = threading.Barrier(_WRITERS)

    def create(key: str, number: int) -> bool:
        start.wait(_START_S)
        return scratch.create(key, f"writer {number}".encode())

    for key in (f"race-{race}" for race in range(_ROUNDS)):
        with ThreadPoolExecutor(_WRITERS) as writers:  # a reused executor may have too few threads
            winners = list(compress(range(_WRITERS), writers.map(partial(create, key), range(_WRITERS))))
        found, count = scratch.read(key), len(winners)
        _demand(count == 1, f"{_WRITERS} writers created one object at once, and {count} of them succeeded")
        stored = found == f"writer {winners[0]}".encode()
        _demand(stored, f"writer {winners[0]} created an object successfully, but {found!r} is stored")
    return f"one of {_WRITERS} writers won each of {_ROUNDS} races, and its bytes were stored"


def _parts(scratch: Store) -> str:
    """Probe large objects, which S3 gets in parts; elsewhere they are ordinary ones."""
    size = 40 * 2**20
    with TemporaryFolder() as folder:
        source, target = folder / "source", folder / "target"
        source.write_bytes(os.urandom(size))
        scratch.put("parts", source)
        scratch.get("parts", target)
        _demand(sha256(target) == sha256(source), "a large object is read with other bytes than were written")
    return f"{size / 2**20:.0f} MiB were sent in parts and read back unchanged"


def _listing(scratch: Store) -> str:
    _demand("write" in {item.path for item in scratch.walk()}, "an object just written is not listed")
    return "shows an object just written"


def _delete(scratch: Store) -> str:
    _tidy(scratch)
    _demand(not scratch.exists("write"), "a deleted object is still there")
    _demand(next(scratch.walk(), None) is None, "an object just deleted is still listed")
    return "what was written was deleted, and is not listed any more"


def _tidy(scratch: Store) -> None:
    for item in list(scratch.walk()):
        scratch.delete(item.path)
    if scratch.is_local:
        with contextlib.suppress(OSError):  # another doctor is running
            (folder := Path(scratch.root)).rmdir()
            folder.parent.rmdir()


_PROBES: dict[str, tuple[Callable[[Store], str], str]] = {
    "write": (_write, "nothing can be committed, or no stage can read what another wrote"),
    "absence": (_absence, "a run stops where it looks for a version; on AWS it needs s3:ListBucket on the bucket"),
    "race": (_race, "two writers could both think that they committed, or none could: do not use this root"),
    "parts": (_parts, "checkpoints cannot be stored"),
    "listing": (_listing, "`gc` would miss leftovers of killed attempts; runs do not list"),
    "delete": (_delete, "`gc --delete` fails, and the folder doctor/ stays; runs do not delete"),
}
"""The probes by name, in their order, each with what would go wrong in the pipeline without that property."""
