"""Probes of local folders: what their file system can do, and whether it keeps files."""

import os
import re
import shutil
from pathlib import Path

from storage.maintenance.probes.place import Place, Probe, Untried, Wrong

_LEAST_BYTES = 2**30
_IN_MEMORY = ("tmpfs", "ramfs")
_MOUNTS = Path("/proc/mounts")


def _space(place: Place) -> str:
    key, _ = place.written("space")
    free = shutil.disk_usage(Path(place.store.path(key)).parent).free
    space = f"{free / 2**30:.1f} GiB are free"
    if free < _LEAST_BYTES:
        raise Wrong(space)
    return space


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
    for synced in (path, path.parent):
        descriptor = os.open(synced, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    return "files and folders can be synced"


def _lasting(place: Place) -> str:
    key, _ = place.written("lasting")
    if not _MOUNTS.exists():
        raise Untried(f"this machine has no {_MOUNTS}")
    point, kind = mount_of(Path(place.store.path(key)), _MOUNTS.read_text())
    mount = f"{place.store.root} lies on {kind}, mounted at {point}"
    if kind in _IN_MEMORY:
        raise Wrong(f"{mount}: it is memory")
    return mount


def mount_of(path: Path, mounts: str) -> tuple[str, str]:
    """Return mount point and type of the file system that holds `path`; `mounts` is the text of /proc/mounts."""
    here = path.resolve()
    mount = ("/", "unknown")
    for line in mounts.splitlines():
        point, kind = [_unescaped(word) for word in line.split()[1:3]]
        if here.is_relative_to(point) and len(point) >= len(mount[0]):  # the last mount at a point hides earlier ones
            mount = point, kind
    return mount


def _unescaped(word: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), word)


PROBES = [
    Probe("free space", _space, "checkpoints will not fit"),
    Probe("hard links", _links, "versions cannot be committed: creating an object is a hard link"),
    Probe("sync", _sync, "a power cut could destroy committed versions"),
    Probe("lasting", _lasting, "a reboot deletes everything", refused=None),
]
