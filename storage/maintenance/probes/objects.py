"""Probes of single objects: which operations are allowed, and whether their answers are right."""

import statistics
import time
from collections.abc import Callable

from storage.errors import StorageError
from storage.maintenance.probes.place import Place, Probe, Untried, Wrong, is_refusal, why

_SKEW_S = 60.0
_SECOND = 1.0  # resolution of S3's times
_SAMPLES = 7


def _write(place: Place) -> str:
    place.store.write(place.key("write"), b"written")
    place.store.write(place.key("write"), b"replaced")
    return "an object was written, and replaced"


def _read(place: Place) -> str:
    key, data = place.written("read")
    if (found := place.store.read(key)) != data:
        raise Wrong(f"wrote {data!r}, read {found!r}")
    return "what was written was read back"


def _size(place: Place) -> str:
    key, data = place.written("size")
    if (found := place.store.size(key)) != len(data):
        raise Wrong(f"wrote {len(data)} bytes, the place reports {found}")
    return "reported correctly"


def _delete(place: Place) -> str:
    key, _ = place.written("delete")
    place.store.delete(key)
    if place.store.exists(key):
        raise Wrong("a deleted object is still there")
    place.store.delete(key)
    return "an object was deleted, and deleted again"


def _absent(place: Place) -> str:
    """Probe absent objects. AWS refuses a HEAD or GET of an absent object if the user may not list the bucket."""
    key = f"{place.folder}/never-written"
    try:
        exists = place.store.exists(key)
        _read_absent(place, key)
    except StorageError as error:
        if not is_refusal(error):
            raise
        raise Wrong("refused instead of absent: on AWS this user needs s3:ListBucket on the bucket") from None
    if exists:
        raise Wrong("an object that was never written is reported to exist")
    return "absent objects are reported as absent"


def _read_absent(place: Place, key: str) -> None:
    try:
        data = place.store.read(key)
    except FileNotFoundError:
        return
    raise Wrong(f"an object that was never written reads as {data[:20]!r}")


def _create(place: Place) -> str:
    (_, first), key = place.written("create"), place.key("create-once")
    if not place.store.create(key, first):
        raise Wrong("the create of an absent object was refused")
    if place.store.create(key, b"the second"):
        raise Wrong("the create of an existing object succeeded")
    if (found := place.store.read(key)) != first:
        raise Wrong(f"a create was refused, but replaced {first!r} by {found!r}")
    return "the second create of a key was refused, and the first object was kept"


def _listing(place: Place) -> str:
    key, data = place.written("listed")
    if (key, len(data)) not in [(item.path, item.bytes) for item in place.store.walk(place.folder)]:
        raise Wrong("an object just written is not listed")
    place.store.delete(key)
    if key in [item.path for item in place.store.walk(place.folder)]:
        raise Wrong("an object just deleted is still listed")
    return "shows an object just written, and does not show one just deleted"


def _clocks(place: Place) -> str:
    before = time.time()
    key, _ = place.written("clock")
    after = time.time()
    modified = next((item.modified for item in place.store.walk(place.folder) if item.path == key), None)
    if modified is None:
        raise Untried("an object just written is not listed")
    difference = max(0.0, before - _SECOND - modified, modified - after - _SECOND)
    skew = f"the clocks of this machine and of the place differ by {difference:.0f} s"
    if difference > _SKEW_S:
        raise Wrong(skew)
    return skew


def _latency(place: Place) -> str:
    key, _ = place.written("latency")
    writing = _median(lambda: place.store.write(key, b"a small object"))
    reading = _median(lambda: place.store.read(key))
    return f"a small write takes {1e3 * writing:.1f} ms, a small read {1e3 * reading:.1f} ms (median of {_SAMPLES})"


def _median(act: Callable[[], object]) -> float:
    seconds = []
    for _ in range(_SAMPLES):
        begin = time.perf_counter()
        act()
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds)


def reach(place: Place) -> str:
    """Return why the place does not answer; empty if it answers, even with a refusal."""
    for request in (_list_objects, _head_object):
        try:
            request(place)
        except Exception as error:  # noqa: BLE001 - any error that prevents access is the finding
            if not is_refusal(error):
                return why(error)
    return ""


def _list_objects(place: Place) -> None:
    next(iter(place.store.walk(place.folder)), None)


def _head_object(place: Place) -> None:
    place.store.exists(f"{place.folder}/never-written")


PROBES = [
    Probe("write", _write, "nothing can be committed: the first write of a run fails"),
    Probe("read", _read, "no stage can read what another wrote"),
    Probe("size", _size, "a run cannot check whether a version exists: it stops at its first check"),
    Probe("delete", _delete, "`gc --delete` fails; runs do not delete"),
    Probe("absence", _absent, "a run checks for versions that may not exist: it stops at its first check"),
    Probe("second create", _create, "a committed version could be replaced, or no version committed: do not use this "
          "place"),
    Probe("listing", _listing, "`gc` would miss leftovers of killed attempts; runs do not list"),
    Probe("clocks", _clocks, "`gc` misjudges the age of objects; S3 refuses requests if clocks differ by more than 15 "
          "minutes", refused=None),
    Probe("latency", _latency, "", refused=None),
]  # fmt: skip
