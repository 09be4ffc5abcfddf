"""Local folders: what the file system under them can do, and how long it lasts."""

import os
import re
import shutil
from pathlib import Path

from storage.maintenance.probes.place import Place, Probe, Untried, Wrong

_LEAST_BYTES = 2**30
_FLEETING = ("tmpfs", "ramfs")
_MOUNTS = Path("/proc/mounts")


def _space(place: Place) -> str:
    key, _ = place.written("space")
    free = shutil.disk_usage(Path(place.store.path(key)).parent).free
    told = f"{free / 2**30:.1f} GiB are free"
    if free < _LEAST_BYTES:
        raise Wrong(told)
    return told


def _links(place: Place) -> str:
    key, data = place.written("linked")
    link = Path(place.store.path(place.key("link")))
    os.link(place.store.path(key), link)
    if link.read_bytes() != data:
        raise Wrong("a hard link does not show its file")
    return "work"


def _sync(place: Place) -> str:
    key, _ = place.written("synced")
    path = Path(place.store.path(key))
    for each in (path, path.parent):
        descriptor = os.open(each, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    return "files and folders can be synced"


def _lasting(place: Place) -> str:
    key, _ = place.written("lasting")
    if not _MOUNTS.exists():
        raise Untried(f"there is no {_MOUNTS} here")
    point, kind = mount_of(Path(place.store.path(key)), _MOUNTS.read_text())
    told = f"{place.store.root} lies on {kind}, mounted at {point}"
    if kind in _FLEETING:
        raise Wrong(f"{told}: it is memory")
    return told


def mount_of(path: Path, mounts: str) -> tuple[str, str]:
    """Mount point and type of the file system that holds `path`, by the text of /proc/mounts."""
    here = path.resolve()
    found = ("/", "unknown")
    for line in mounts.splitlines():
        point, kind = [_unescaped(word) for word in line.split()[1:3]]
        if here.is_relative_to(point) and len(point) >= len(found[0]):  # the last one at a point hides others
            found = point, kind
    return found


def _unescaped(word: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), word)


PROBES = [
    Probe("free space", _space, "checkpoints will not fit"),
    Probe("hard links", _links, "versions cannot be committed: creating an object is a hard link"),
    Probe("sync", _sync, "a power cut could take what was said to be committed"),
    Probe("lasting", _lasting, "everything is gone after a reboot", refused=None),
]
