"""Objects as files of a local folder, on the disk before a call returns."""

import contextlib
import errno
import hashlib
import os
import shutil
import stat
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

from storage.errors import DamagedError, StorageError
from storage.objects.interface import ObjectInfo, Upload


class LocalBackend:
    """Files appear whole, by rename or by hard link, under a temporary name before (`.NAME.*.tmp`)."""

    def size(self, path: str) -> int:
        return _file(path).stat().st_size

    def read(self, path: str) -> bytes:
        return _file(path).read_bytes()

    def write(self, path: str, data: bytes) -> None:
        self._appear(path, lambda temporary: _write(temporary, data), os.replace)

    def create(self, path: str, data: bytes) -> bool:
        try:  # fsspec's own exclusive mode is not atomic on local files; a hard link is
            self._appear(path, lambda temporary: _write(temporary, data), os.link)
        except FileExistsError:
            return False
        return True

    def upload(self, path: str, source: Path) -> None:
        self._appear(path, lambda temporary: shutil.copyfile(source, temporary), os.replace)

    def download(self, path: str, target: Path) -> str:
        shutil.copyfile(_file(path), target)
        with target.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    def delete(self, path: str) -> None:
        Path(path).unlink(missing_ok=True)

    def walk(self, prefix: str) -> Iterator[ObjectInfo]:
        _check_no_file_above(prefix)
        for folder, _, names in os.walk(prefix):
            for name in sorted(names):
                path = os.path.join(folder, name)
                with contextlib.suppress(FileNotFoundError):  # gone since the folder was read
                    status = os.stat(path, follow_symlinks=False)
                    yield ObjectInfo(path, status.st_size, status.st_mtime)

    def uploads(self, prefix: str) -> list[Upload]:
        return []

    def abort_upload(self, upload: Upload) -> None:
        raise NotImplementedError(f"no multipart uploads here: {upload}")

    def uri(self, path: str) -> str:
        return path

    def _appear(self, path: str, write: Callable[[Path], object], place: Callable[[Path, Path], object]) -> None:
        target = Path(path)
        _make_folder(target.parent)
        temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.tmp")
        try:
            write(temporary)
            _sync(temporary)
            place(temporary, target)
        finally:
            temporary.unlink(missing_ok=True)
        _sync(target.parent)


def _file(path: str) -> Path:
    """`path`, if it is a regular file: others are no objects, and a pipe or device would be read for ever.

    Raises what `os.stat` does; a name that is too long, or goes on behind that of a file, is that of no file.
    """
    try:
        mode = os.stat(path).st_mode
    except OSError as error:
        if error.errno in (errno.ENAMETOOLONG, errno.ENOTDIR):
            raise FileNotFoundError(f"{path}: {error.strerror}") from None
        raise
    if stat.S_ISDIR(mode):
        raise FileNotFoundError(f"{path} is a folder")
    if not stat.S_ISREG(mode):
        raise OSError(f"{path} is a pipe, a socket or a device, and not an object")
    return Path(path)


def _check_no_file_above(folder: str) -> None:
    """Raise DamagedError where a file stands in place of a folder of the path: `os.walk` would find nothing there."""
    try:
        os.stat(folder)
    except NotADirectoryError as error:
        raise DamagedError(f"{folder}: {error.strerror}: a file is in the way, check the store's root") from error
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENAMETOOLONG):
            raise


def _write(path: Path, data: bytes) -> None:
    path.write_bytes(data)


def _make_folder(folder: Path) -> None:
    """Make a folder and its parents, and write the entry of each in the folder above to the disk.

    Raises:
        StorageError: a file is in the way, or the folder above takes none.
    """
    if folder.is_dir():
        return
    _make_folder(folder.parent)
    try:
        folder.mkdir(exist_ok=True)
    except (FileExistsError, FileNotFoundError, NotADirectoryError, PermissionError) as error:
        raise StorageError(
            f"the folder {folder} cannot be made ({error.strerror}): check the store's root, and who may write there"
        ) from error
    _sync(folder.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
