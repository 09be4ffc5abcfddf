"""Room on the disks: what the checkpoints of a run need, compared with what is free, and what a full disk means.

Only checkpoints are counted, since all else of a run is small beside them. A bucket cannot be asked how much it takes.
"""

import re
import shutil
import traceback
from collections.abc import Callable, Iterator
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
    more: int = 0  # beyond what the run holds now, until its last iteration

    def __str__(self) -> str:
        return (
            f"{self.folder} has {size(self.free)} free, and the checkpoints of this run need {size(self.next)} for the "
            f"next one, {size(self.more)} until the last iteration"
        )


def stored_bytes(config: Config) -> tuple[int, int]:
    """Return the bytes of weights and train state of the newest checkpoint, as `disks` takes them."""
    store, name = Store.of(config.storage), config.run.name
    count = first_free(lambda number: manifests.committed(store, layout.checkpoint(name, number)))
    if not count:
        return 0, 0
    newest = manifests.read(store, layout.checkpoint(name, count - 1))
    state = sum(file.bytes for file in newest.files if file.name.startswith(layout.STATE))
    return newest.bytes - state, state


def held_bytes(config: Config, weights: int, state: int) -> int:
    """Return the most bytes of checkpoints that a run holds: number 0, all that it keeps, and one being written."""
    keep, last, every = config.storage.keep, config.run.iterations, config.evaluation.every
    numbers = range(1, last + 1)
    newest = max(keep.last, config.train.state_every) if keep else 0
    whole = [n for n in numbers if not keep or n > last - newest or (keep.every and n % keep.every == 0)]
    evaluated = {n for n in numbers if n % every == 0}.difference(whole)
    resumable = [n for n in whole if n % config.train.state_every == 0 or n == last]
    return weights * (2 + len(evaluated) + len(whole)) + state * (len(resumable) + 1)


def disks(config: Config, weights: int, state: int = 0) -> list[Disk]:
    """Compare what a run needs with what is free. A checkpoint is written to the cache before it is stored.

    Args:
        config: the run's configuration.
        weights: the bytes of a checkpoint without its train state.
        state: those of the train state; 0: computed as those of two moments, of a critic of its own with two moments,
            and of a moving reference policy.
    """
    critic, kl = config.algorithm.critic, config.algorithm.kl
    copies = 2 + 3 * (critic is not None and critic.model == "own") + (kl.kl_ctl > 0 and kl.reference == "ema")
    state = state or copies * weights
    storage, needed, local = config.storage, held_bytes(config, weights, state), Store.of(config.storage).is_local
    place = storage.root if local else storage.cache  # which has copies of what a bucket gets
    limit = needed if local else min(needed, int(storage.cache_gib * 2**30))
    held = sum(item.bytes for item in Store(place).walk(f"runs/{config.run.name}/checkpoints"))
    found = dict[int, Disk]()
    each = weights + state
    for folder, to_write, more in ((storage.cache, each, each), (place, local * each, max(0, limit - held))):
        path = Path(folder).expanduser().absolute()
        there = next(each for each in (path, *path.parents) if each.exists())
        disk = found.setdefault(there.stat().st_dev, Disk(folder, shutil.disk_usage(there).free))
        disk.next += to_write
        disk.more += more
    return list(found.values())


def check_room(config: Config, warn: Callable[[str], None]) -> None:
    """Compare what a run that has checkpoints needs with what is free; `warn` if it will not be enough.

    Raises:
        StorageError: not even the next checkpoint has room.
    """
    for disk in disks(config, *stored_bytes(config)):
        if disk.next > disk.free:
            raise StorageError(f"{disk}. {remedy(config)}")
        if disk.more > disk.free:
            warn(f"{disk}. {remedy(config)}")


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
        needs = "; ".join(map(str, disks(config, *stored_bytes(config))))
        raise StorageError(
            f"a disk is full: {cause}. {needs}. {remedy(config)}. Then the same command continues"
        ) from error
