"""Objects under one root: a local folder, `memory://` or `s3://`, with an atomic put-if-absent."""

import hashlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from configs.schema import Storage
from storage.errors import StorageError
from storage.objects.interface import Backend, ObjectInfo, Upload
from storage.objects.keys import check_key
from storage.objects.local import LocalBackend

__all__ = ["ObjectInfo", "Store", "Upload", "sha256"]


class Store:
    """Whole objects by key (`runs/demo/…`), never listings: what is committed is found by name.

    Args:
        root: local folder, `memory://name` or `s3://bucket/prefix` (credentials and endpoint come from
            the ordinary AWS chain).
        request_timeout_s: S3 only: an answer that takes longer is given up, and the request sent again.
        patience_s: S3 only: how long an operation is tried before it fails.
    """

    def __init__(self, root: str, request_timeout_s: float = 30, patience_s: float = 600) -> None:
        if not root:
            raise StorageError("root '': give a local folder, memory://name or s3://bucket/prefix")
        scheme, separator, rest = root.partition("://")
        self.root = root if separator else root.rstrip("/") or root
        self._request_timeout_s = request_timeout_s
        self.positions: dict[str, int] = {}
        """Lengths of logs as far as they are known, for `storage.logs.log`."""
        self.backend: Backend
        if not separator:
            self.backend, self._base = LocalBackend(), str(Path(root).expanduser().absolute())
        elif scheme == "memory":
            from storage.objects.memory import MemoryBackend

            self.backend, self._base = MemoryBackend(), f"/{rest.strip('/')}"
        elif scheme == "s3" and rest.strip("/"):
            from storage.objects.s3 import S3Backend

            self.backend, self._base = S3Backend(request_timeout_s, patience_s), rest.strip("/")
        else:
            raise StorageError(f"root {root!r}: give a local folder, memory://name or s3://bucket/prefix")

    @classmethod
    def of(cls, settings: Storage) -> "Store":
        """The store that a configuration names."""
        return cls(settings.root, settings.request_timeout_s, settings.patience_s)

    def with_patience(self, patience_s: float) -> "Store":
        """The same place, tried for no longer than `patience_s`."""
        return Store(self.root, self._request_timeout_s, patience_s)

    @property
    def is_local(self) -> bool:
        return isinstance(self.backend, LocalBackend)

    def path(self, key: str) -> str:
        """Where the backend finds `key`. Keys cannot climb out of the root."""
        check_key(key)
        return f"{self._base}/{key}"

    def uri(self, key: str) -> str:
        """`key` as a URI (a plain path for local roots)."""
        return self.backend.uri(self.path(key))

    def exists(self, key: str) -> bool:
        try:
            self.size(key)
        except FileNotFoundError:
            return False
        return True

    def size(self, key: str) -> int:
        """Bytes. Raises FileNotFoundError."""
        return self.backend.size(self.path(key))

    def read(self, key: str) -> bytes:
        """The whole object. Raises FileNotFoundError."""
        return self.backend.read(self.path(key))

    def write(self, key: str, data: bytes) -> None:
        """Replace a small object that only one writer owns; a reader sees the old or the new one."""
        self.backend.write(self.path(key), data)

    def put(self, key: str, source: Path) -> None:
        """Upload a file; a reader sees all of it or nothing."""
        self.backend.upload(self.path(key), source)

    def get(self, key: str, target: Path) -> str:
        """Download to a file; returns the sha256 of what came. Raises FileNotFoundError."""
        return self.backend.download(self.path(key), target)

    def delete(self, key: str) -> None:
        self.backend.delete(self.path(key))

    def create(self, key: str, data: bytes) -> bool:
        """Put-if-absent: True where this call's `data` is what now stands at `key`.

        `data` must be unique to the caller (hold a nonce): where the answer to a successful create was
        lost, the client's second try is told "exists", and reading back tells whose object it is.
        """
        return self.backend.create(self.path(key), data) or self.read(key) == data

    def walk(self, folder: str = "") -> Iterator[ObjectInfo]:
        """All objects under `folder`, their paths as keys: for those who look for what no manifest names."""
        for found in self.backend.walk(self._folder(folder)):
            yield replace(found, path=found.path.removeprefix(f"{self._base}/"))

    def uploads(self, folder: str = "") -> list[Upload]:
        """Multipart uploads under `folder` that have not been ended, their paths as keys."""
        found = self.backend.uploads(self._folder(folder))
        return [replace(upload, path=upload.path.removeprefix(f"{self._base}/")) for upload in found]

    def abort_upload(self, upload: Upload) -> None:
        self.backend.abort_upload(replace(upload, path=self.path(upload.path)))

    def _folder(self, folder: str) -> str:
        return f"{self.path(folder)}/" if folder else f"{self._base}/"


def sha256(path: Path) -> str:
    """Hex digest of a local file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
