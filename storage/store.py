"""Objects under one root: a local folder, `memory://` or `s3://`, with an atomic put-if-absent."""

import hashlib
import os
import shutil
import threading
import uuid
from pathlib import Path, PurePosixPath
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

_MEMORY_LOCK = threading.Lock()


class StorageError(ValueError):
    """Something stored is missing, damaged or not what it should be; the message names the object."""


class Store:
    """Whole objects by key (`runs/demo/…`), never listings: what is committed is found by name.

    Args:
        root: local folder, `memory://name` or `s3://bucket/prefix` (credentials and endpoint come from
            the ordinary AWS chain).
    """

    def __init__(self, root: str) -> None:
        options: dict[str, Any] = {}
        if root.startswith("s3://"):
            # Listings cached for ever would hide other writers; the default retries give up early.
            options = {
                "use_listings_cache": False,
                "config_kwargs": {"retries": {"mode": "standard", "max_attempts": 8}},
            }
        self.root = root
        self.fs, base = fsspec.url_to_fs(root, **options)
        self._base = base.rstrip("/")

    @property
    def is_local(self) -> bool:
        return isinstance(self.fs, LocalFileSystem)

    def path(self, key: str) -> str:
        """Where fsspec finds `key`. Keys cannot climb out of the root."""
        parts = PurePosixPath(key).parts
        if not parts or key.startswith("/") or ".." in parts:
            raise StorageError(f"object key {key!r} is empty, absolute or climbs out of the root {self.root}")
        return f"{self._base}/{key}"

    def uri(self, key: str) -> str:
        """`key` as a URI (a plain path for local roots)."""
        return str(self.fs.unstrip_protocol(self.path(key))) if not self.is_local else self.path(key)

    def exists(self, key: str) -> bool:
        return bool(self.fs.exists(self.path(key)))

    def read(self, key: str) -> bytes:
        """The whole object. Raises FileNotFoundError."""
        data = self.fs.cat_file(self.path(key))
        assert isinstance(data, bytes)
        return data

    def put(self, key: str, source: Path) -> None:
        """Upload a file; a reader sees all of it or nothing."""
        if not self.is_local:
            self.fs.put_file(str(source), self.path(key))
            return
        target, temporary = self._local(key)
        try:
            shutil.copyfile(source, temporary)
            _sync(temporary)
            os.replace(temporary, target)
        finally:
            temporary.unlink(missing_ok=True)

    def create(self, key: str, data: bytes) -> bool:
        """Put-if-absent: True where this call's `data` is what now stands at `key`.

        `data` must be unique to the caller (hold a nonce): where the answer to a successful create was
        lost, the client's second try is told "exists", and reading back tells whose object it is.
        """
        created = self._create_local(key, data) if self.is_local else self._create_remote(key, data)
        return created or self.read(key) == data

    def _create_local(self, key: str, data: bytes) -> bool:
        # fsspec's own exclusive mode is not atomic on local files; a hard link is.
        target, temporary = self._local(key)
        try:
            temporary.write_bytes(data)
            _sync(temporary)
            os.link(temporary, target)
        except FileExistsError:
            return False
        finally:
            temporary.unlink(missing_ok=True)
        _sync(target.parent)
        return True

    def _create_remote(self, key: str, data: bytes) -> bool:
        path = self.path(key)
        try:
            if self.fs.protocol == "memory":
                with _MEMORY_LOCK:
                    self.fs.pipe_file(path, data, mode="create")
            else:
                self.fs.pipe_file(path, data, mode="create")
        except FileExistsError:
            return False
        except OSError as error:
            response = getattr(error.__cause__, "response", None) or {}
            if response.get("Error", {}).get("Code") not in ("PreconditionFailed", "412"):
                raise
            return False
        return True

    def _local(self, key: str) -> tuple[Path, Path]:
        """Target of `key` and a temporary name beside it; its folder is made."""
        target = Path(self.path(key))
        target.parent.mkdir(parents=True, exist_ok=True)
        return target, target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.tmp")


def sha256(path: Path) -> str:
    """Hex digest of a local file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
