"""The protocol of a backend: what a store needs of the place that holds its objects."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """One object that `walk` lists."""

    path: str
    bytes: int
    modified: float  # seconds since the epoch, by the clock of the place


@dataclass(frozen=True, slots=True)
class Upload:
    """A multipart upload that was neither completed nor aborted."""

    path: str
    id: str
    begun: float  # seconds since the epoch


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

    def uploads(self, prefix: str) -> list[Upload]:
        """Return unfinished multipart uploads; an empty list if the place has no multipart uploads."""
        ...

    def abort_upload(self, upload: Upload) -> None: ...

    def uri(self, path: str) -> str: ...
