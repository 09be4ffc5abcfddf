"""Single objects: what may be done with them, and whether the place says the truth about them."""

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
    return "what was written is what is read"


def _size(place: Place) -> str:
    key, data = place.written("size")
    if (found := place.store.size(key)) != len(data):
        raise Wrong(f"wrote {len(data)} bytes, told {found}")
    return "told right"


def _delete(place: Place) -> str:
    key, _ = place.written("delete")
    place.store.delete(key)
    if place.store.exists(key):
        raise Wrong("a deleted object is still there")
    place.store.delete(key)
    return "an object was deleted, and deleted again"


def _absent(place: Place) -> str:
    """On AWS a HEAD or GET of what is not there is refused to users who may not list."""
    key = f"{place.folder}/never-written"
    try:
        exists = place.store.exists(key)
        _read_absent(place, key)
    except StorageError as error:
        if not is_refusal(error):
            raise
        raise Wrong("refused instead of absent: on AWS this user needs s3:ListBucket on the bucket") from None
    if exists:
        raise Wrong("an object that nobody wrote is said to exist")
    return "absent objects are said to be absent"


def _read_absent(place: Place, key: str) -> None:
    try:
        data = place.store.read(key)
    except FileNotFoundError:
        return
    raise Wrong(f"an object that nobody wrote reads as {data[:20]!r}")


def _create(place: Place) -> str:
    (_, first), key = place.written("create"), place.key("create-once")
    if not place.store.create(key, first):
        raise Wrong("a create where nothing stood was refused")
    if place.store.create(key, b"the second"):
        raise Wrong("a create where an object stood went through")
    if (found := place.store.read(key)) != first:
        raise Wrong(f"a create that was refused left {found!r} in place of {first!r}")
    return "a second create of a key was refused, the first one's object stands"


def _listing(place: Place) -> str:
    key, data = place.written("listed")
    if (key, len(data)) not in [(found.path, found.bytes) for found in place.store.walk(place.folder)]:
        raise Wrong("an object just written is not listed")
    place.store.delete(key)
    if key in [found.path for found in place.store.walk(place.folder)]:
        raise Wrong("an object just deleted is still listed")
    return "shows what was just written, and not what was just deleted"


def _clocks(place: Place) -> str:
    before = time.time()
    key, _ = place.written("clock")
    after = time.time()
    there = next((found.modified for found in place.store.walk(place.folder) if found.path == key), None)
    if there is None:
        raise Untried("an object just written is not listed")
    difference = max(0.0, before - _SECOND - there, there - after - _SECOND)
    told = f"this machine's and the place's differ by {difference:.0f} s"
    if difference > _SKEW_S:
        raise Wrong(told)
    return told


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
    """Empty where the place answers, if only to refuse; else why it does not."""
    for look in (_list, _look):
        try:
            look(place)
        except Exception as error:  # noqa: BLE001 - whatever keeps us from the place is the finding
            if not is_refusal(error):
                return why(error)
    return ""


def _list(place: Place) -> None:
    next(iter(place.store.walk(place.folder)), None)


def _look(place: Place) -> None:
    place.store.exists(f"{place.folder}/never-written")


PROBES = [
    Probe("write", _write, "nothing can be committed: the first write of a run fails"),
    Probe("read", _read, "no stage can read what another wrote"),
    Probe("size", _size, "whether a version exists cannot be told: a run stops at its first look"),
    Probe("delete", _delete, "`gc --delete` fails; runs do not delete"),
    Probe("absence", _absent, "the pipeline looks for versions that may not exist: a run stops at its first look"),
    Probe("second create", _create, "a committed version could be replaced, or none committed: do not use this place"),
    Probe("listing", _listing, "`gc` would miss what killed attempts left; runs do not list"),
    Probe("clocks", _clocks, "`gc` takes objects for older or younger than they are; S3 refuses requests beyond 15 "
          "minutes", refused=None),
    Probe("latency", _latency, "", refused=None),
]  # fmt: skip
