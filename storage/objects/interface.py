"""The interface between a store and what holds its objects: keys, and the protocol of a backend.

Keys are the names of objects: relative paths below the root of a store.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Annotated, Protocol

from pydantic import AfterValidator

from storage.errors import DamagedError


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """One object that `walk` lists."""

    path: str
    bytes: int
    modified: float  # seconds since the epoch, by the clock of the server or of this host


class Backend(Protocol):
    """Whole objects by path.

    A method that reads an absent object raises FileNotFoundError. Every method may be called from any thread.
    """

    def size(self, path: str) -> int: ...

    def read(self, path: str) -> bytes: ...

    def write(self, path: str, data: bytes) -> None:
        """Create or replace the object. A reader sees the old object or the new one, never a part."""

    def create(self, path: str, data: bytes) -> bool:
        """Put the object if `path` is free, atomically; return False if it is taken, even by the caller's own."""
        ...

    def upload(self, path: str, source: Path) -> None:
        """Write the object as `write` does, streamed from a file."""

    def download(self, path: str, target: Path) -> str:
        """Stream the object into a file and return the sha256 of the received bytes."""
        ...

    def delete(self, path: str) -> None:
        """Delete the object; do nothing if it does not exist."""

    def walk(self, prefix: str) -> Iterator[ObjectInfo]:
        """List every object whose path begins with `prefix`, to find objects that no manifest or log names."""
        ...

    def uri(self, path: str) -> str: ...


def check_key(key: str) -> str:
    """Return `key` if it stays inside of the root.

    Raises:
        DamagedError: `key` is empty, absolute, unprintable, holds a backslash, or climbs out of the root with `..`.
    """
    parts = PurePosixPath(key).parts
    if not parts or key.startswith("/") or ".." in parts or "\\" in key or not key.isprintable():
        raise DamagedError(f"object key {key!r} is empty, absolute, unprintable or climbs out of the root")
    return key


Key = Annotated[str, AfterValidator(check_key)]
"""A key in a record. It is checked when the record is read, because the record may come from another program."""
