"""Objects as files of a local folder."""

import contextlib
import hashlib
import os
import shutil
import stat
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from storage.errors import StorageError


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """One object that `walk` lists."""

    path: str
    bytes: int
    modified: float  # seconds since the epoch, by the clock of the server or of this host


class LocalBackend:
    """Objects as files of a folder. A call returns only when its object is on the disk.

    A backend has these methods, which may be called from any thread; one that reads an absent object raises
    FileNotFoundError.

    A file is written under a temporary name (`.NAME.*.tmp`) and then appears whole, by rename or by hard link.
    """

    def size(self, path: str) -> int:
        return _file(path).stat().st_size

    def read(self, path: str) -> bytes:
        return _file(path).read_bytes()

    def write(self, path: str, data: bytes) -> None:
        """Create or replace the object. A reader sees the old object or the new one, never a part."""
        _appear(path, data, os.replace)

    def create(self, path: str, data: bytes) -> bool:
        """Put the object if `path` is free, atomically; return False if it is taken, even by the caller's own."""
        try:  # a hard link is atomic; fsspec's exclusive mode on local files is not
            _appear(path, data, os.link)
        except FileExistsError:
            return False
        return True

    def upload(self, path: str, source: Path) -> None:
        """Write the object as `write` does, streamed from a file."""
        _appear(path, source, os.replace)

    def download(self, path: str, target: Path) -> str:
        """Stream the object into a file and return the sha256 of the received bytes."""
        shutil.copyfile(_file(path), target)
        with target.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    def delete(self, path: str) -> None:
        """Delete the object; do nothing if it does not exist."""
        Path(path).unlink(missing_ok=True)

    def walk(self, prefix: str) -> Iterator[ObjectInfo]:
        """List every object whose path begins with `prefix`, to find objects that no manifest or log names."""
        for folder, _, names in os.walk(prefix):
            for name in sorted(names):
                path = os.path.join(folder, name)
                with contextlib.suppress(FileNotFoundError):  # deleted since the folder was listed
                    status = os.stat(path, follow_symlinks=False)
                    if stat.S_ISREG(status.st_mode) or stat.S_ISLNK(status.st_mode):  # others are no objects
                        yield ObjectInfo(path, status.st_size, status.st_mtime)

    def uri(self, path: str) -> str:
        return path


def _appear(path: str, content: bytes | Path, publish: Callable[[Path, Path], object]) -> None:
    """Write bytes, or the content of a file, to a temporary file, and `publish` it at `path`."""
    target = Path(path)
    _make_folder(target.parent)
    temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        if isinstance(content, Path):
            shutil.copyfile(content, temporary)
        else:
            temporary.write_bytes(content)
        _sync(temporary)
        publish(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)
    _sync(target.parent)


def _file(path: str) -> Path:
    """Return `path` if it is a regular file. Only such files are objects; reading a pipe or device may never end.

    Raises:
        FileNotFoundError: there is no such file.
    """
    if not (file := Path(path)).is_file():
        raise FileNotFoundError(f"there is no file {path}")
    return file


def _make_folder(folder: Path) -> None:
    """Make a folder and its parents, and sync the parent of each new folder, so that its entry is on the disk.

    Raises:
        StorageError: a file is in the way, or the parent folder allows no new folder.
    """
    if folder.is_dir():
        return
    _make_folder(folder.parent)
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise StorageError(
            f"the folder {folder} cannot be made ({error.strerror}): check the store's root and its permissions"
        ) from error
    _sync(folder.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
