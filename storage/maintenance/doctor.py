"""Tries out what the pipeline needs of a store, before versions are put there.

It writes under `doctor/<nonce>/` only, and deletes everything at the end. A probe is a function that returns what it
found, or raises StorageError. It examines neither clocks (S3 refuses what a host signs whose clock is 15 minutes wrong)
nor what becomes of objects later: lifecycle rules, object locks, disks in memory.
"""

import contextlib
import os
import threading
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import compress
from pathlib import Path

from storage.errors import StorageError, UnavailableError
from storage.objects.store import Store, sha256
from storage.processes.folder import TemporaryFolder

_WRITERS = 16
_ROUNDS = 5
_PATIENCE_S = 20.0
_START_S = 120.0


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """The result of one probe.

    Example: ProbeResult("race", True, "one of 16 writers won each of 5 races, and its bytes were stored", "")
    """

    name: str
    ok: bool
    found: str
    consequence: str  # what would go wrong in the pipeline; empty if nothing would


class Scratch:
    """The folder `doctor/<nonce>/` of a store."""

    def __init__(self, store: Store) -> None:
        self.store, self.folder = store, f"doctor/{uuid.uuid4().hex[:12]}"

    def key(self, name: str) -> str:
        return f"{self.folder}/{name}"

    def written(self, name: str) -> tuple[str, bytes]:
        """Write a new small object; return its key and bytes."""
        key, data = self.key(name), f"{name} {uuid.uuid4().hex}".encode()
        self.store.write(key, data)
        return key, data


def _demand(holds: bool, otherwise: str) -> None:
    if not holds:
        raise StorageError(otherwise)


def examine(store: Store) -> list[ProbeResult]:
    """Run all probes on `store`; return a single result if the first finds that it cannot be reached."""
    scratch, results = Scratch(store), list[ProbeResult]()
    for name, (probe, consequence) in _PROBES.items():
        try:
            results.append(ProbeResult(name, True, probe(scratch), ""))
        except (StorageError, OSError) as problem:
            if not results and isinstance(problem, UnavailableError) and not _is_refusal(problem):
                return [ProbeResult("reached", False, str(problem), "nothing works: this root cannot be reached")]
            results.append(ProbeResult(name, False, str(problem), consequence))
    return results


def _is_refusal(error: BaseException) -> bool:
    """Return whether the store answered and refused this user."""
    return isinstance(error, PermissionError) or isinstance(error.__cause__, PermissionError)


def _write(scratch: Scratch) -> str:
    scratch.store.write(scratch.key("write"), b"to be replaced")
    key, data = scratch.written("write")
    _demand((found := scratch.store.read(key)) == data, f"wrote {data!r}, read {found!r}")
    _demand((size := scratch.store.size(key)) == len(data), f"wrote {len(data)} bytes, the store reports {size}")
    return "an object was written, replaced, and read back"


def _delete(scratch: Scratch) -> str:
    key, _ = scratch.written("delete")
    scratch.store.delete(key)
    _demand(not scratch.store.exists(key), "a deleted object is still there")
    scratch.store.delete(key)
    return "an object was deleted, and deleted again"


def _absence(scratch: Scratch) -> str:
    """Probe absent objects. AWS refuses a HEAD or GET of an absent object if the user may not list the bucket."""
    key = scratch.key("never-written")
    try:
        _demand(not scratch.store.exists(key), "an object that was never written is reported to exist")
        with contextlib.suppress(FileNotFoundError):
            raise StorageError(f"an object that was never written reads as {scratch.store.read(key)[:20]!r}")
    except StorageError as error:
        if not _is_refusal(error):
            raise
        raise StorageError("refused instead of absent: on AWS this user needs s3:ListBucket on the bucket") from None
    return "absent objects are reported as absent"


def _create(scratch: Scratch) -> str:
    (_, first), key = scratch.written("create"), scratch.key("create-once")
    _demand(scratch.store.create(key, first), "the create of an absent object was refused")
    _demand(not scratch.store.create(key, b"the second"), "the create of an existing object succeeded")
    found = scratch.store.read(key)
    _demand(found == first, f"a create was refused, but replaced {first!r} by {found!r}")
    return "the second create of a key was refused, and the first object was kept"


def _race(scratch: Scratch) -> str:
    """Probe put-if-absent, on which all commits rely: of many writers of one object, exactly one succeeds."""
    store, is_bucket = scratch.store, scratch.store.root.startswith("s3://")
    stores = [Store(store.root, patience_s=_PATIENCE_S) if is_bucket else store for _ in range(_WRITERS)]
    with ThreadPoolExecutor(_WRITERS) as connecting:  # connecting takes time, so it comes before the race
        list(connecting.map(lambda store: store.exists(scratch.key("race")), stores))
    start = threading.Barrier(_WRITERS)

    def create(key: str, number: int) -> bool:
        start.wait(_START_S)
        return stores[number].create(key, f"writer {number}".encode())

    for key in (scratch.key(f"race-{race}") for race in range(_ROUNDS)):
        with ThreadPoolExecutor(_WRITERS) as writers:  # a reused executor may have too few threads
            winners = list(compress(range(_WRITERS), writers.map(partial(create, key), range(_WRITERS))))
        found, count = store.read(key), len(winners)
        _demand(count == 1, f"{_WRITERS} writers created one object at once, and {count} of them succeeded")
        stored = found == f"writer {winners[0]}".encode()
        _demand(stored, f"writer {winners[0]} created an object successfully, but {found!r} is stored")
    return f"one of {_WRITERS} writers won each of {_ROUNDS} races, and its bytes were stored"


def _listing(scratch: Scratch) -> str:
    key, data = scratch.written("listed")
    listed = [(item.path, item.bytes) for item in scratch.store.walk(scratch.folder)]
    _demand((key, len(data)) in listed, "an object just written is not listed")
    scratch.store.delete(key)
    listed = [(item.path, item.bytes) for item in scratch.store.walk(scratch.folder)]
    _demand((key, len(data)) not in listed, "an object just deleted is still listed")
    return "shows an object just written, and does not show one just deleted"


def _parts(scratch: Scratch) -> str:
    """Probe large objects, which S3 gets in parts; elsewhere they are ordinary ones."""
    key, size = scratch.key("parts"), 40 * 2**20
    with TemporaryFolder() as folder:
        source, target = folder / "source", folder / "target"
        source.write_bytes(os.urandom(size))
        scratch.store.put(key, source)
        scratch.store.get(key, target)
        _demand(sha256(target) == sha256(source), "a large object is read with other bytes than were written")
    return f"{size / 2**20:.0f} MiB were sent in parts and read back unchanged"


def _tidy(scratch: Scratch) -> str:
    """Delete what was written; what a listing does not show is left to `gc`."""
    for item in list(scratch.store.walk(scratch.folder)):
        scratch.store.delete(item.path)
    if scratch.store.is_local:
        with contextlib.suppress(OSError):  # it was never made, or another doctor is running
            (folder := Path(scratch.store.path(scratch.folder))).rmdir()
            folder.parent.rmdir()
    return "what was written was deleted"


_PROBES: dict[str, tuple[Callable[[Scratch], str], str]] = {
    "write": (_write, "nothing can be committed, or no stage can read what another wrote"),
    "delete": (_delete, "`gc --delete` fails; runs do not delete"),
    "absence": (_absence, "a run checks for versions that may not exist: it stops at its first check"),
    "second create": (_create, "a committed version could be replaced, or no version committed: do not use this root"),
    "race": (_race, "two writers could both think that they committed: do not use this root"),
    "listing": (_listing, "`gc` would miss leftovers of killed attempts; runs do not list"),
    "parts": (_parts, "checkpoints cannot be stored"),
    "tidied up": (_tidy, "the folder doctor/ stays: delete it by hand"),
}
"""The probes by name, in their order, each with what would go wrong in the pipeline without that property."""
