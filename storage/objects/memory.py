"""Objects in the memory of this process (fsspec's `memory://`), lost when it ends."""

import hashlib
import threading
from collections.abc import Iterator
from pathlib import Path

from fsspec.implementations.memory import MemoryFileSystem

from storage.objects.interface import ObjectInfo, Upload

_LOCK = threading.Lock()  # shared by all instances, because fsspec's memory is


class MemoryBackend:
    """A backend that all stores of one process share."""

    def __init__(self) -> None:
        self._fs = MemoryFileSystem()

    def size(self, path: str) -> int:
        return int(self._fs.info(path)["size"])

    def read(self, path: str) -> bytes:
        data = self._fs.cat_file(path)
        assert isinstance(data, bytes)
        return data

    def write(self, path: str, data: bytes) -> None:
        with _LOCK:
            self._fs.pipe_file(path, data)

    def create(self, path: str, data: bytes) -> bool:
        with _LOCK:
            if self._fs.exists(path):
                return False
            self._fs.pipe_file(path, data)
        return True

    def upload(self, path: str, source: Path) -> None:
        self.write(path, source.read_bytes())

    def download(self, path: str, target: Path) -> str:
        data = self.read(path)
        target.write_bytes(data)
        return hashlib.sha256(data).hexdigest()

    def delete(self, path: str) -> None:
        with _LOCK:
            if self._fs.exists(path):
                self._fs.rm_file(path)

    def walk(self, prefix: str) -> Iterator[ObjectInfo]:
        with _LOCK:
            found = dict(self._fs.find(prefix, detail=True))
        for path, entry in sorted(found.items()):
            yield ObjectInfo(path, int(entry["size"]), float(entry["created"]))

    def uploads(self, prefix: str) -> list[Upload]:
        return []

    def abort_upload(self, upload: Upload) -> None:
        raise NotImplementedError(f"memory has no multipart uploads: {upload}")

    def uri(self, path: str) -> str:
        return str(self._fs.unstrip_protocol(path))
