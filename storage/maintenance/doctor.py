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


def examine(store: Store) -> list[ProbeResult]:
    """Run all probes on `store`; return a single result if the first finds that it cannot be reached."""
    scratch, results = store.below(f"doctor/{uuid.uuid4().hex[:12]}"), list[ProbeResult]()
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


def _demand(holds: bool, otherwise: str) -> None:
    if not holds:
        raise StorageError(otherwise)


def _write(scratch: Store) -> str:
    scratch.write("write", b"to be replaced")
    scratch.write("write", data := _new())
    _demand((found := scratch.read("write")) == data, f"wrote {data!r}, read {found!r}")
    _demand((size := scratch.size("write")) == len(data), f"wrote {len(data)} bytes, the store reports {size}")
    return "an object was written, replaced, and read back"


def _new() -> bytes:
    return uuid.uuid4().hex.encode()


def _delete(scratch: Store) -> str:
    """Probe deletion, and absent objects: AWS refuses to tell of them if the user may not list the bucket."""
    scratch.write("delete", b"to be deleted")
    scratch.delete("delete")
    try:
        _demand(not scratch.exists("delete"), "a deleted object is still there")
        with contextlib.suppress(FileNotFoundError):
            raise StorageError(f"an object that was deleted reads as {scratch.read('delete')[:20]!r}")
    except StorageError as error:
        if not _is_refusal(error):
            raise
        raise StorageError("refused instead of absent: on AWS this user needs s3:ListBucket on the bucket") from None
    scratch.delete("delete")
    return "an object was deleted, reported as absent, and deleted again"


def _create(scratch: Store) -> str:
    first = _new()
    _demand(scratch.create("create-once", first), "the create of an absent object was refused")
    _demand(not scratch.create("create-once", b"the second"), "the create of an existing object succeeded")
    found = scratch.read("create-once")
    _demand(found == first, f"a create was refused, but replaced {first!r} by {found!r}")
    return "the second create of a key was refused, and the first object was kept"


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


def _listing(scratch: Store) -> str:
    scratch.write("listed", b"to be listed")
    _demand(_lists(scratch, "listed"), "an object just written is not listed")
    scratch.delete("listed")
    _demand(not _lists(scratch, "listed"), "an object just deleted is still listed")
    return "shows an object just written, and does not show one just deleted"


def _lists(scratch: Store, key: str) -> bool:
    return any(item.path == key for item in scratch.walk())


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


def _tidy(scratch: Store) -> str:
    """Delete what was written; what a listing does not show is left to `gc`."""
    for item in list(scratch.walk()):
        scratch.delete(item.path)
    if scratch.is_local:
        with contextlib.suppress(OSError):  # it was never made, or another doctor is running
            (folder := Path(scratch.root)).rmdir()
            folder.parent.rmdir()
    return "what was written was deleted"


_PROBES: dict[str, tuple[Callable[[Store], str], str]] = {
    "write": (_write, "nothing can be committed, or no stage can read what another wrote"),
    "delete": (_delete, "`gc --delete` fails; or a run, which checks for absent versions, stops at its first check"),
    "second create": (_create, "a committed version could be replaced, or no version committed: do not use this root"),
    "race": (_race, "two writers could both think that they committed: do not use this root"),
    "listing": (_listing, "`gc` would miss leftovers of killed attempts; runs do not list"),
    "parts": (_parts, "checkpoints cannot be stored"),
    "tidied up": (_tidy, "the folder doctor/ stays: delete it by hand"),
}
"""The probes by name, in their order, each with what would go wrong in the pipeline without that property."""
