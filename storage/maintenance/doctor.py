"""Tries out everything that the pipeline needs of a place, before versions are stored there.

It writes under `doctor/<nonce>/` only, and deletes everything at the end. A probe is a function that returns what it
found, or raises `Wrong` or `Untried`. Probes run in the order in which they stand here: those of single objects, of
put-if-absent, of local folders, and of S3.
"""

import contextlib
import copy
import os
import shutil
import statistics
import tempfile
import threading
import time
import timeit
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import psutil

from storage.errors import StorageError, UnavailableError
from storage.objects.store import Store, Upload, sha256

_LEAST_BYTES = 2**30
_SKEW_S = 60.0
_SECOND = 1.0  # resolution of S3's times
_SAMPLES = 7
_WRITERS = 16
_ROUNDS = 5
_PATIENCE_S = 120.0


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """The result of one probe.

    Example: ProbeResult("race", True, "one of 16 writers won each of 5 races, and its bytes were stored", "")
    """

    name: str
    ok: bool | None  # None: could not be tried
    found: str
    consequence: str  # what would go wrong in the pipeline; empty if nothing would


class Wrong(Exception):  # noqa: N818 - a finding, not an error of this program
    """A probe found a problem, which the message describes."""


class Untried(Exception):  # noqa: N818
    """A probe could not run, or does not apply; the message says why."""


def _demand(holds: bool, otherwise: str) -> None:
    if not holds:
        raise Wrong(otherwise)


class Place:
    """The folder `doctor/<nonce>/` of a store, with the keys of all objects written there."""

    def __init__(self, store: Store) -> None:
        self.store, self.folder = store, f"doctor/{uuid.uuid4().hex[:12]}"
        self._keys = set[str]()

    def key(self, name: str) -> str:
        """Return the key of `name` and remember it: `clear` deletes its object."""
        self._keys.add(key := f"{self.folder}/{name}")
        return key

    def written(self, name: str) -> tuple[str, bytes]:
        """Write a new small object; return its key and bytes.

        Raises:
            Untried: it cannot be written. Another probe reports that.
        """
        key, data = self.key(name), f"{name} {uuid.uuid4().hex}".encode()
        try:
            self.store.write(key, data)
        except (StorageError, OSError):
            raise Untried("needs an object, but none can be written") from None
        return key, data

    def local(self, name: str) -> Path:
        """Write a new small object to a local root; return its path."""
        return Path(self.store.path(self.written(name)[0]))

    def clear(self) -> str:
        """Delete what was written; return why something is left, or an empty text."""
        try:
            for key in self._keys:
                self.store.delete(key)
        except (StorageError, OSError) as error:
            return f"{self.folder} is left behind: {_why(error)}"
        if self.store.is_local:
            folder = Path(self.store.path(self.folder))
            with contextlib.suppress(OSError):  # it was never made, or another doctor is running
                folder.rmdir()
                folder.parent.rmdir()
        return ""


@dataclass(frozen=True, slots=True)
class Probe:
    """A check of one property of a place.

    Args:
        name: the property.
        consequence: what would go wrong in the pipeline without the property.
        refused: `ok` of the result if the place refuses: False, a problem; None, the property stays unknown.
        only: the kind of places that have this property; empty: all.
        look: the check; returns what it found, or raises `Wrong` or `Untried`.
    """

    name: str
    consequence: str
    refused: bool | None
    only: Literal["", "folder", "bucket"]
    look: Callable[[Place], str]

    def run(self, place: Place) -> ProbeResult:
        """Return the result, with the consequence unless the place has the property."""
        try:
            return ProbeResult(self.name, True, self.look(place), "")
        except Wrong as wrong:
            ok, found = False, str(wrong)
        except Untried as untried:
            ok, found = None, str(untried)
        except (StorageError, OSError) as error:
            ok, found = self.refused, _why(error)
        return ProbeResult(self.name, ok, found, self.consequence)


_PROBES: list[Probe] = []
Look = Callable[[Place], str]


def _probe(
    name: str, consequence: str, *, refused: bool | None = False, only: Literal["", "folder", "bucket"] = ""
) -> Callable[[Look], Look]:
    """Register a function as a `Probe`."""

    def register(look: Look) -> Look:
        _PROBES.append(Probe(name, consequence, refused, only, look))
        return look

    return register


def examine(store: Store) -> list[ProbeResult]:
    """Run all probes on the place of `store`; return a single result if the place cannot be reached."""
    place = Place(store)
    if unreachable := _unreachable(place):
        consequence = "nothing works: this place cannot be reached, or rejects this user"
        return [ProbeResult("reached", False, unreachable, consequence)]
    kinds = ("", "folder" if store.is_local else "bucket" if store.root.startswith("s3://") else "")
    results: list[ProbeResult] = []
    try:
        results += [probe.run(place) for probe in _PROBES if probe.only in kinds]
    finally:
        left = place.clear()
    return [*results, ProbeResult("tidied up", False, left, "delete it by hand")] if left else results


def _unreachable(place: Place) -> str:
    """Return why the place does not answer; empty if it answers, even with a refusal."""
    store, folder = place.store, place.folder
    for request in (lambda: next(iter(store.walk(folder)), None), lambda: store.exists(f"{folder}/never-written")):
        try:
            request()
        except Exception as error:  # noqa: BLE001 - any error that prevents access is the finding
            if not _is_refusal(error):
                return _why(error)
    return ""


def _why(error: BaseException) -> str:
    """Describe an error on one line, with S3's code."""
    cause = error.__cause__ if isinstance(error, UnavailableError) and _is_refusal(error) else error
    return " ".join(f"{_code(error)} {cause}".split())


def _is_refusal(error: BaseException) -> bool:
    """Return whether the place answered and refused this user."""
    return _code(error) in ("AccessDenied", "AllAccessDisabled", "403")


def _code(error: BaseException | None) -> str:
    """Return S3's code of an error; empty if the error is not from S3."""
    while error is not None:
        response = getattr(error, "response", None)
        if isinstance(response, dict):
            return str(response.get("Error", {}).get("Code", ""))
        error = error.__cause__
    return ""


@_probe("write", "nothing can be committed: the first write of a run fails")
def _write(place: Place) -> str:
    place.store.write(place.key("write"), b"written")
    place.store.write(place.key("write"), b"replaced")
    return "an object was written, and replaced"


@_probe("read", "no stage can read what another wrote")
def _read(place: Place) -> str:
    key, data = place.written("read")
    _demand((found := place.store.read(key)) == data, f"wrote {data!r}, read {found!r}")
    return "what was written was read back"


@_probe("size", "a run cannot check whether a version exists: it stops at its first check")
def _size(place: Place) -> str:
    key, data = place.written("size")
    _demand((found := place.store.size(key)) == len(data), f"wrote {len(data)} bytes, the place reports {found}")
    return "reported correctly"


@_probe("delete", "`gc --delete` fails; runs do not delete")
def _delete(place: Place) -> str:
    key, _ = place.written("delete")
    place.store.delete(key)
    _demand(not place.store.exists(key), "a deleted object is still there")
    place.store.delete(key)
    return "an object was deleted, and deleted again"


@_probe("absence", "a run checks for versions that may not exist: it stops at its first check")
def _absence(place: Place) -> str:
    """Probe absent objects. AWS refuses a HEAD or GET of an absent object if the user may not list the bucket."""
    key = f"{place.folder}/never-written"
    try:
        exists = place.store.exists(key)
        with contextlib.suppress(FileNotFoundError):
            raise Wrong(f"an object that was never written reads as {place.store.read(key)[:20]!r}")
    except StorageError as error:
        if not _is_refusal(error):
            raise
        raise Wrong("refused instead of absent: on AWS this user needs s3:ListBucket on the bucket") from None
    _demand(not exists, "an object that was never written is reported to exist")
    return "absent objects are reported as absent"


@_probe("second create", "a committed version could be replaced, or no version committed: do not use this place")
def _create(place: Place) -> str:
    (_, first), key = place.written("create"), place.key("create-once")
    _demand(place.store.create(key, first), "the create of an absent object was refused")
    _demand(not place.store.create(key, b"the second"), "the create of an existing object succeeded")
    found = place.store.read(key)
    _demand(found == first, f"a create was refused, but replaced {first!r} by {found!r}")
    return "the second create of a key was refused, and the first object was kept"


@_probe("listing", "`gc` would miss leftovers of killed attempts; runs do not list")
def _listing(place: Place) -> str:
    key, data = place.written("listed")
    listed = [(item.path, item.bytes) for item in place.store.walk(place.folder)]
    _demand((key, len(data)) in listed, "an object just written is not listed")
    place.store.delete(key)
    listed = [(item.path, item.bytes) for item in place.store.walk(place.folder)]
    _demand((key, len(data)) not in listed, "an object just deleted is still listed")
    return "shows an object just written, and does not show one just deleted"


@_probe(
    "clocks",
    "`gc` misjudges the age of objects; S3 refuses requests if clocks differ by more than 15 minutes",
    refused=None,
)
def _clocks(place: Place) -> str:
    before = time.time()
    key, _ = place.written("clock")
    after = time.time()
    modified = next((item.modified for item in place.store.walk(place.folder) if item.path == key), None)
    if modified is None:
        raise Untried("an object just written is not listed")
    difference = max(0.0, before - _SECOND - modified, modified - after - _SECOND)
    skew = f"the clocks of this machine and of the place differ by {difference:.0f} s"
    _demand(difference <= _SKEW_S, skew)
    return skew


@_probe("latency", "", refused=None)
def _latency(place: Place) -> str:
    key, _ = place.written("latency")
    writing, reading = (
        statistics.median(timeit.repeat(act, number=1, repeat=_SAMPLES))
        for act in (lambda: place.store.write(key, b"a small object"), lambda: place.store.read(key))
    )
    return f"a small write takes {1e3 * writing:.1f} ms, a small read {1e3 * reading:.1f} ms (median of {_SAMPLES})"


@_probe("race", "two writers could both think that they committed: do not use this place")
def _race(place: Place) -> str:
    """Probe put-if-absent, on which all commits rely: of many writers of one object, exactly one succeeds."""
    stores = [_another(place.store) for _ in range(_WRITERS)]
    with ThreadPoolExecutor(_WRITERS) as connecting:  # connecting takes time, so it comes before the race
        list(connecting.map(lambda store: store.exists(place.key("race")), stores))
    try:
        stores[0].create(place.key("race-alone"), b"alone")
    except (StorageError, OSError):
        raise Untried("needs put-if-absent, and a create failed") from None
    for number in range(_ROUNDS):
        _race_once(stores, place.key(f"race-{number}"))
    return f"one of {_WRITERS} writers won each of {_ROUNDS} races, and its bytes were stored"


def _another(store: Store) -> Store:
    """Return a store of the same place with its own connections."""
    twin = copy.copy(store)
    twin.positions = {}
    connect = getattr(store.backend, "another", None)
    twin.backend = connect() if connect else copy.copy(store.backend)
    return twin


def _race_once(stores: list[Store], key: str) -> None:
    start = threading.Barrier(len(stores))

    def create(number: int) -> bool:
        start.wait(_PATIENCE_S)
        return stores[number].create(key, f"writer {number}".encode())

    with ThreadPoolExecutor(len(stores)) as writers:  # a reused executor may have too few threads
        winners = [number for number, won in enumerate(writers.map(create, range(len(stores)))) if won]
    count, found = len(winners), stores[0].read(key)
    _demand(count == 1, f"{len(stores)} writers created one object at once, and {count} of them succeeded")
    stored = found == f"writer {winners[0]}".encode()
    _demand(stored, f"writer {winners[0]} created an object successfully, but {found!r} is stored")


@_probe("free space", "checkpoints will not fit", only="folder")
def _space(place: Place) -> str:
    free = shutil.disk_usage(place.local("space").parent).free
    space = f"{free / 2**30:.1f} GiB are free"
    _demand(free >= _LEAST_BYTES, space)
    return space


@_probe("hard links", "versions cannot be committed: creating an object is a hard link", only="folder")
def _links(place: Place) -> str:
    file, link = place.local("linked"), Path(place.store.path(place.key("link")))
    os.link(file, link)
    _demand(link.read_bytes() == file.read_bytes(), "a hard link does not show its file")
    return "work"


@_probe("sync", "a power cut could destroy committed versions", only="folder")
def _sync(place: Place) -> str:
    file = place.local("synced")
    for path in (file, file.parent):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    return "files and folders can be synced"


@_probe("lasting", "a reboot deletes everything", refused=None, only="folder")
def _lasting(place: Place) -> str:
    path = place.local("lasting").resolve()
    mounts = [each for each in psutil.disk_partitions(all=True) if path.is_relative_to(each.mountpoint)]
    if not mounts:
        raise Untried("this machine does not say what is mounted where")
    mount = max(reversed(mounts), key=lambda each: len(each.mountpoint))  # the last one hides others at its point
    found = f"{place.store.root} lies on {mount.fstype}, mounted at {mount.mountpoint}"
    _demand(mount.fstype not in ("tmpfs", "ramfs"), f"{found}: it is memory")
    return found


@_probe("parts", "checkpoints cannot be stored", only="bucket")
def _parts(place: Place) -> str:
    from storage.objects.s3 import PART_BYTES

    key, size = place.key("parts"), 5 * PART_BYTES // 2  # more than two parts: a small file is sent in one request
    with tempfile.TemporaryDirectory(prefix="doctor-") as folder:
        source, target = Path(folder) / "source", Path(folder) / "target"
        source.write_bytes(os.urandom(size))
        place.store.put(key, source)
        stored = place.store.size(key)
        _demand(stored == size, f"{size} bytes were sent in parts, {stored} were stored")
        place.store.get(key, target)
        _demand(sha256(target) == sha256(source), "an object that was sent in parts is read with other bytes")
    return f"{size / 2**20:.0f} MiB were sent in parts and read back unchanged"


@_probe("unfinished uploads", "parts of killed uploads cost storage for ever: `gc` cannot abort them", only="bucket")
def _unfinished(place: Place) -> str:
    key, backend = place.key("unfinished"), _backend(place)
    begun = backend.begin_upload(place.store.path(key))
    try:
        listed = [item.id for item in place.store.uploads(place.folder)]
    finally:
        place.store.abort_upload(Upload(key, begun.id, begun.begun))
    _demand(begun.id in listed, "an unfinished upload is not listed")
    still = [item.id for item in place.store.uploads(place.folder)]
    _demand(begun.id not in still, "an upload that was aborted is still listed")
    return "can be listed and aborted"


@_probe("versioning", "", refused=None, only="bucket")
def _versioning(place: Place) -> str:
    state = _settings(place, "get_bucket_versioning").get("Status")
    return "on: what gc deletes stays as an old version and still costs storage" if state == "Enabled" else "off"


@_probe("lifecycle", "the bucket deletes or archives committed versions", refused=None, only="bucket")
def _lifecycle(place: Place) -> str:
    rules = _settings(place, "get_bucket_lifecycle_configuration").get("Rules", [])
    prefix = place.store.path("x").removesuffix("x").partition("/")[2]
    harms = [harm for rule in rules if _concerns(rule, prefix) for harm in _harms(rule)]
    _demand(not harms, "; ".join(harms))
    return f"{len(rules)} rules, none of which affects committed versions" if rules else "no rules"


def _concerns(rule: dict[str, Any], prefix: str) -> bool:
    """Return whether a lifecycle rule applies to objects of this store, which have no tags."""
    limits = rule.get("Filter") or {}
    limits = limits.get("And", limits)
    target = limits.get("Prefix", rule.get("Prefix", ""))
    tagged = "Tag" in limits or limits.get("Tags")
    return rule.get("Status") == "Enabled" and not tagged and (target.startswith(prefix) or prefix.startswith(target))


def _harms(rule: dict[str, Any]) -> list[str]:
    name, expiry, moves = rule.get("ID", "a rule"), rule.get("Expiration", {}), rule.get("Transitions", [])
    deletes = [f"after {expiry['Days']} days"] if "Days" in expiry else [f"at {expiry['Date']}"] * ("Date" in expiry)
    archives = {move.get("StorageClass") for move in moves} & {"GLACIER", "DEEP_ARCHIVE"}
    return [f"{name} deletes objects {when}" for when in deletes] + [
        f"{name} moves objects to {archive}, where they cannot be read" for archive in sorted(archives)
    ]


@_probe("object lock", "`gc --delete` fails", refused=None, only="bucket")
def _lock(place: Place) -> str:
    lock = _settings(place, "get_object_lock_configuration").get("ObjectLockConfiguration", {})
    retention = lock.get("Rule", {}).get("DefaultRetention", {})
    terms = ", ".join(f"{name} {value}" for name, value in sorted(retention.items()))
    _demand(not retention, f"new objects are locked: {terms}")
    return "on, but new objects are not locked" if lock.get("ObjectLockEnabled") == "Enabled" else "off"


def _settings(place: Place, method: str) -> dict[str, Any]:
    """Read a setting of the bucket without retries, because servers without this setting may answer with an error."""
    settings: dict[str, Any] = _backend(place).another(patience_s=0).settings(method, place.store.path("x"))
    return settings


def _backend(place: Place) -> Any:
    """Return the backend, which is that of S3 in probes of buckets."""
    return place.store.backend
