"""A draft whose finished shards outlive its writer: a killed rollout is continued, not repeated.

Each finished shard is entered into the journal, the numbered log `<version>/journal`. A writer that continues the
version takes over the shards in it with an entry of its own. If the writer before is still alive, it then finds the
next number taken and stops. So no two writers mix their shards, and no episode is stored twice.
"""

import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from storage import layout
from storage.errors import DamagedError, StorageError, TakenOverError, UnavailableError
from storage.logs.fence import Fence
from storage.logs.log import Log
from storage.objects.seal import field_errors, newer
from storage.objects.store import Store
from storage.versions.drafts import Draft, Shard
from storage.versions.fetch import fetch_file
from storage.versions.manifests import File, Kind

logger = logging.getLogger(__name__)
_READERS = 16


class _NewerError(StorageError):
    """A newer program wrote an entry of the journal: its content is not lost, so the rollout must not repeat it."""


class JournaledDraft(Draft):
    """A draft that begins with the shards of earlier attempts, in `adopted`, and with their `notes`.

    Example: a writer with nonce 9e41… finishes two shards and is killed; a writer with nonce 77c2… continues. The
    entries of the journal are then

    0  {"attempt": "9e41…", "adopted": []}
    1  {"attempt": "9e41…", "file": {"name": "part-00000.parquet", …}, "notes": […]}
    2  {"attempt": "9e41…", "file": {"name": "part-00001.parquet", …}, "notes": […]}
    3  {"attempt": "77c2…", "adopted": ["<version>/9e41…/part-00000.parquet", "<version>/9e41…/part-00001.parquet"]}
    4  {"attempt": "77c2…", "shards": [{"file": {…}, "notes": […]}, …]}    several, which other processes have written

    Args:
        store: the store of the version.
        version: the version to write.
        kind: its kind.
        fence: the lease of the run, checked before each entry.
    """

    def __init__(self, store: Store, version: str, kind: Kind, fence: Fence | None = None) -> None:
        super().__init__(store, version, kind)
        self._fence = fence
        self._log = Log(store, layout.journal(version))
        self._claim()

    def add_shard(self, path: Path, name: str, rows: int, notes: list[Any]) -> File:
        """`add` a shard and enter it into the journal, so that a later attempt finds it."""
        file = super().add_shard(path, name, rows, notes)
        self._enter({"file": file.model_dump(), "notes": notes})
        return file

    def accept_shards(self, shards: Sequence[Shard]) -> None:
        """Take over shards that other processes have added, with one entry for all of them."""
        super().accept_shards(shards)
        listed = [{"file": shard.file.model_dump(), "notes": shard.notes} for shard in shards]
        self._enter({"shards": listed})

    def discard(self) -> None:
        """Forbid later attempts to take over these shards, because their rows must be made again."""
        self._enter({"adopted": []})

    def _claim(self) -> None:
        """Take over all readable shards with one entry at the journal's end that lists them; retry if it grew."""
        whole: dict[str, bool] = {}
        while True:
            self._next = self._log.length()
            finished = shards(self.store, self.version, self._next)
            new = [path for path in finished if path not in whole]
            with ThreadPoolExecutor(_READERS) as readers:
                whole |= zip(new, readers.map(self._is_whole, [finished[path] for path in new]), strict=True)
            adopted = [finished[path] for path in finished if whole[path]]
            if self._put({"adopted": [shard.file.path for shard in adopted]}):
                break
        self.adopted = [shard.file for shard in adopted]
        self.notes = [note for shard in adopted for note in shard.notes]
        self._files = list(self.adopted)

    def _is_whole(self, shard: Shard) -> bool:
        try:
            fetch_file(self.store, shard.file, self.scratch)
        except DamagedError as error:  # damaged, or collected by gc as a leftover
            logger.warning("%s; its rows are made again", error)
            return False
        return True

    def _enter(self, values: dict[str, Any]) -> None:
        if not self._put(values):
            raise TakenOverError(
                f"{self.store.uri(self.version)}: another writer has taken over this version; two flow runs work on "
                "one run name. This one stops; nothing is lost"
            )

    def _put(self, values: dict[str, Any]) -> bool:
        if self._fence:
            self._fence.check()
        entered = self._log.put(self._next, {"attempt": self.nonce, **values})
        self._next += entered
        return entered


def shards(store: Store, version: str, length: int | None = None) -> dict[str, Shard]:
    """Return the finished shards of an uncommitted version by path: those of its last writer and those it took over."""
    log, finished = Log(store, layout.journal(version)), dict[str, Shard]()
    numbers = range(log.length() if length is None else length)
    with ThreadPoolExecutor(_READERS) as readers:
        contents = list(readers.map(lambda number: _read(log, number), numbers))
    for content in contents:
        if isinstance(content, dict):
            finished |= content
        else:
            finished = {path: finished[path] for path in content if path in finished}
    return finished


def _read(log: Log, number: int) -> dict[str, Shard] | list[str]:
    """Return the content of an entry; that of a damaged one is that its writer took over nothing.

    The entry may have rejected earlier shards, so none of them is used.
    """
    try:
        return _content(log.read(number), log.uri(number))
    except (UnavailableError, _NewerError):
        raise
    except StorageError as error:
        logger.warning("%s; what was entered before it is made again", error)
        return []


def _content(entry: dict[str, Any], where: str) -> dict[str, Shard] | list[str]:
    """Return the shards of an entry by path, or the paths of the shards that its writer took over."""
    adopted, listed = entry.get("adopted"), entry.get("shards", [entry])
    if isinstance(adopted, list) and all(isinstance(path, str) for path in adopted):
        return adopted
    if adopted is not None or not isinstance(listed, list):
        raise DamagedError(f"{where} lists no shards: it is damaged")
    entered = [_shard(item, where) for item in listed]
    return {shard.file.path: shard for shard in entered}


def _shard(item: Any, where: str) -> Shard:
    notes = item.get("notes") if isinstance(item, dict) else None
    if not isinstance(notes, list):
        raise DamagedError(f"{where} lists no shards: it is damaged")
    try:
        return Shard(File.model_validate(item.get("file")), notes)
    except ValidationError as error:
        if unknown := newer(error):
            raise _NewerError(f"{where} has {unknown}, which this code does not know: upgrade") from None
        raise DamagedError(f"{where} does not hold a file ({field_errors(error)}): it is damaged") from None
