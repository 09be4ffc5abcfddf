"""A draft whose finished shards outlive its writer: a killed rollout is continued, not repeated.

Each finished shard is entered into `<version>/journal`, a numbered log. Whoever continues the version takes over the
shards found there by an entry of his own; the writer before him, should he still live, then finds the next number
taken and stops. So no two writers mix their shards, and no episode is stored twice.
"""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from storage import layout
from storage.errors import DamagedError, StorageError, TakenOverError, UnavailableError
from storage.logs.fence import Fence
from storage.logs.log import Log
from storage.objects.seal import field_errors, newer
from storage.objects.store import Store
from storage.versions.drafts import Draft
from storage.versions.fetch import fetch_file
from storage.versions.manifests import File, Kind

logger = logging.getLogger(__name__)


class _NewerError(StorageError):
    """A newer program wrote it: what it says is not lost."""


@dataclass(frozen=True, slots=True)
class Shard:
    """A finished shard, and what its writer noted beside it."""

    file: File
    notes: list[Any]


class JournaledDraft(Draft):
    """A draft that begins with the shards of the attempts before it, in `adopted`, and their `notes`.

    Args:
        store: where the version will be.
        version: which one.
        kind: its kind.
        fence: the run's lease; looked at before anything is entered.
    """

    def __init__(self, store: Store, version: str, kind: Kind, fence: Fence | None = None) -> None:
        super().__init__(store, version, kind)
        self._fence = fence
        self._log = Log(store, layout.journal(version))
        self._claim()

    def add_shard(self, path: Path, name: str, rows: int, notes: list[Any]) -> File:
        """`add`, and an entry by which the shard is found again."""
        file = super().add_shard(path, name, rows, notes)
        self._enter({"file": file.model_dump(), "notes": notes})
        return file

    def discard(self) -> None:
        """Nobody shall go on with these shards: what they hold is to be made again."""
        self._enter({"adopted": []})

    def _claim(self) -> None:
        """Take over what can be read, by an entry behind the last that says what it was."""
        tried: dict[str, Shard | None] = {}
        while True:
            self._next = self._log.length()
            standing = shards(self.store, self.version, self._next)
            for path in standing.keys() - tried.keys():
                tried[path] = standing[path] if self._is_whole(standing[path]) else None
            held = [shard for path in standing if (shard := tried[path])]
            if self._put({"adopted": [shard.file.path for shard in held]}):
                break
        self.adopted = [shard.file for shard in held]
        self.notes = [note for shard in held for note in shard.notes]
        self._files = list(self.adopted)

    def _is_whole(self, shard: Shard) -> bool:
        try:
            fetch_file(self.store, shard.file, self.scratch)
        except DamagedError as error:  # collected as abandoned, or damaged
            logger.warning("%s; its rows are made again", error)
            return False
        return True

    def _enter(self, values: dict[str, Any]) -> None:
        if not self._put(values):
            raise TakenOverError(
                f"{self.store.uri(self.version)}: another writer has taken this version over; two flow runs work on "
                "one run name. This one stops; nothing is lost"
            )

    def _put(self, values: dict[str, Any]) -> bool:
        if self._fence:
            self._fence.check()
        entered = self._log.put(self._next, {"attempt": self.nonce, **values})
        self._next += entered
        return entered


def shards(store: Store, version: str, length: int | None = None) -> dict[str, Shard]:
    """The finished shards of a version not yet committed, by path: those of its last writer and what he took over."""
    log, standing = Log(store, layout.journal(version)), dict[str, Shard]()
    for number in range(log.length() if length is None else length):
        try:
            said = _said(log.read(number), store.uri(log.key(number)))
        except (UnavailableError, _NewerError):
            raise
        except StorageError as error:  # whatever it said: without it, none of those before can be trusted
            logger.warning("%s; what was entered before it is made again", error)
            said = []
        if isinstance(said, Shard):
            standing[said.file.path] = said
        else:
            standing = {path: standing[path] for path in said if path in standing}
    return standing


def _said(entry: dict[str, Any], where: str) -> Shard | list[str]:
    """The shard that an entry tells of, or the paths of those that its writer took over."""
    adopted, notes = entry.get("adopted"), entry.get("notes")
    if isinstance(adopted, list) and all(isinstance(path, str) for path in adopted):
        return adopted
    if adopted is not None or not isinstance(notes, list):
        raise DamagedError(f"{where} tells of no shards: it is damaged")
    try:
        return Shard(File.model_validate(entry.get("file")), notes)
    except ValidationError as error:
        if unknown := newer(error):
            raise _NewerError(f"{where} is no shard that this code knows: {unknown}: upgrade") from None
        raise DamagedError(f"{where} does not hold a file ({field_errors(error)}): it is damaged") from None
