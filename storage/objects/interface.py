"""What a store needs of the place where its objects lie."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """An object met by `walk`."""

    path: str
    bytes: int
    modified: float  # seconds since the epoch, by the clock of the place


@dataclass(frozen=True, slots=True)
class Upload:
    """A multipart upload that has not been ended."""

    path: str
    id: str
    begun: float  # seconds since the epoch


class Backend(Protocol):
    """Whole objects by path. Absence is FileNotFoundError; every method may be called from any thread."""

    def size(self, path: str) -> int: ...

    def read(self, path: str) -> bytes: ...

    def write(self, path: str, data: bytes) -> None:
        """Replace the object; a reader sees the old one or the new one."""

    def create(self, path: str, data: bytes) -> bool:
        """Put-if-absent, atomic: False where an object stands at `path`, also this caller's own."""
        ...

    def upload(self, path: str, source: Path) -> None:
        """Like `write`, streamed from a file."""

    def download(self, path: str, target: Path) -> str:
        """Stream into a file; returns the sha256 of what came."""
        ...

    def delete(self, path: str) -> None:
        """Harmless where nothing is."""

    def walk(self, prefix: str) -> Iterator[ObjectInfo]:
        """Every object whose path begins with `prefix`; only for those who look for what nobody names."""
        ...

    def uploads(self, prefix: str) -> list[Upload]:
        """Multipart uploads under way or left behind; none where there is no such thing."""
        ...

    def abort_upload(self, upload: Upload) -> None: ...

    def uri(self, path: str) -> str: ...
