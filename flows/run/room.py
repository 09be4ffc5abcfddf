"""Room on the disks: what the next checkpoint of a run needs, compared with what is free, and what a full disk means.

Only checkpoints are counted, since all else of a run is small beside them. A bucket cannot be asked how much it takes.
"""

import re
import shutil
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from prefect.settings import PREFECT_HOME

from configs import Config
from storage import layout
from storage.commands.program import size
from storage.errors import StorageError
from storage.logs.log import first_free
from storage.objects.store import Store
from storage.versions import manifests

_FULL = re.compile(r"^\S.*(No space left on device|disk is full|quota exceeded).*", re.IGNORECASE | re.MULTILINE)
"""The line of a traceback that has what the system, SQLite and quotas say, perhaps in an error of a library."""
_NO_BYTES = 2**20
"""Free bytes below which an error of Prefect's server, which says nothing, comes from a full disk."""


@dataclass(slots=True)
class Disk:
    """A disk to which a run writes checkpoints, and the bytes that it needs there."""

    folder: str  # one that is on it
    free: int
    next: int = 0  # for the next checkpoint

    def __str__(self) -> str:
        return f"{self.folder} has {size(self.free)} free, and the next checkpoint of this run needs {size(self.next)}"


def next_bytes(config: Config) -> int:
    """Return the bytes of a run's next checkpoint: those of the newest one with a train state; 0 if there is none."""
    store, name = Store.of(config.storage), config.run.name
    count = first_free(lambda number: manifests.committed(store, layout.checkpoint(name, number)))
    if not count:
        return 0
    newest = manifests.read(store, layout.checkpoint(name, count - 1))
    return newest.bytes if newest.names_in("state") else computed_bytes(config, newest.bytes)


def computed_bytes(config: Config, weights: int) -> int:
    """Return the bytes of a checkpoint with so many bytes of weights.

    Its train state has two moments, a critic of its own with two moments, and a moving reference policy.
    """
    critic, kl = config.algorithm.critic, config.algorithm.kl
    copies = 2 + 3 * (critic is not None and critic.model == "own") + (kl.kl_ctl > 0 and kl.reference == "ema")
    return (1 + copies) * weights


def disks(config: Config, checkpoint: int) -> list[Disk]:
    """Compare the bytes of the next checkpoint with what is free; it is written to the cache before it is stored."""
    places = [config.storage.cache, *([config.storage.root] if Store.of(config.storage).is_local else [])]
    found = dict[int, Disk]()
    for folder in places:
        path = Path(folder).expanduser().absolute()
        there = next(each for each in (path, *path.parents) if each.exists())
        disk = found.setdefault(there.stat().st_dev, Disk(folder, shutil.disk_usage(there).free))
        disk.next += checkpoint
    return list(found.values())


def check_room(config: Config) -> None:
    """Compare what the next checkpoint of a run that has some needs with what is free.

    Raises:
        StorageError: it has no room.
    """
    for disk in disks(config, next_bytes(config)):
        if disk.next > disk.free:
            raise StorageError(f"{disk}. {remedy(config)}")


def remedy(config: Config) -> str:
    """Say what frees room."""
    return (
        "A run holds less with a lower storage.keep.last and a higher storage.keep.every; "
        f"`python -m storage --root {config.storage.root} gc --delete --older-than-hours 0` frees what no run needs "
        "any more, and what failed attempts left"
    )


@contextmanager
def telling_full_disks(config: Config) -> Iterator[None]:
    """Raise an error of the block that came from a full disk as StorageError: the folder, the bytes, the remedy."""
    try:
        yield
    except Exception as error:
        home, said = PREFECT_HOME.value(), _FULL.search("".join(traceback.format_exception(error)))
        if not said and not (home.exists() and shutil.disk_usage(home).free < _NO_BYTES):
            raise
        cause = said[0] if said else f"Prefect's database in {home} has no room"
        needs = "; ".join(map(str, disks(config, next_bytes(config))))
        raise StorageError(
            f"a disk is full: {cause}. {needs}. {remedy(config)}. Then the same command continues"
        ) from error
