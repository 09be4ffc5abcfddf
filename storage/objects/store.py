"""A store: objects under one root (a local folder or `s3://`), with an atomic put-if-absent."""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from storage import errors, layout
from storage.objects.local import LocalBackend, ObjectInfo

if TYPE_CHECKING:
    from storage.objects.s3 import S3Backend

A = TypeVar("A")
B = TypeVar("B")

REQUEST_TIMEOUT_S = 30.0
"""A request to S3 without an answer for so many seconds is sent again."""
PATIENCE_S = 600.0
"""An operation on S3 is retried for so many seconds before it fails."""


class Store:
    """Whole objects by key (`runs/demo/…`). Committed versions are found by name, never by listing.

    Args:
        root: local folder or `s3://bucket/prefix` (credentials and endpoint come from the ordinary AWS chain).
        request_timeout_s: S3 only: a request without an answer for so many seconds is sent again.
        patience_s: S3 only: how many seconds an operation is retried before it fails.
    """

    def __init__(self, root: str, request_timeout_s: float = REQUEST_TIMEOUT_S, patience_s: float = PATIENCE_S) -> None:
        scheme, separator, rest = root.partition("://")
        self.root = root if separator else root.rstrip("/") or root
        self.positions: dict[str, int] = {}
        """Known lengths of logs by their prefix, for `storage.logs.log`."""
        self.entries: dict[int, Any] = {}
        """Known entries of the catalog by their number, for `storage.logs.catalog`."""
        self.named: dict[str, set[str]] = {}
        """The versions that known configurations name, by the version with the configuration, for gc."""
        self.backend: LocalBackend | S3Backend
        if root and not separator:
            self.backend, self._base = LocalBackend(), str(Path(root).expanduser().absolute())
        elif scheme == "s3" and rest.strip("/"):
            from storage.objects import s3

            self.backend, self._base = s3.S3Backend(request_timeout_s, patience_s), rest.strip("/")
        else:
            raise errors.StorageError(f"root {root!r}: give a local folder or s3://bucket/prefix")

    def below(self, folder: str) -> "Store":
        """Return a store in a folder of this one, with the same backend."""
        inner = copy(self)
        inner.root, inner._base = self.uri(folder), self.path(folder)
        inner.positions, inner.entries, inner.named = {}, {}, {}
        return inner

    @property
    def is_local(self) -> bool:
        return isinstance(self.backend, LocalBackend)

    def path(self, key: str) -> str:
        """Return the path of `key` in the backend. Keys cannot climb out of the root."""
        layout.check_key(key)
        return f"{self._base}/{key}"

    def uri(self, key: str) -> str:
        """Return `key` as a URI (a plain path for local roots)."""
        return self.backend.uri(self.path(key))

    def exists(self, key: str) -> bool:
        return self.find_size(key) is not None

    def find_size(self, key: str) -> int | None:
        """Return the size in bytes; None if there is no such object."""
        try:
            return self.size(key)
        except FileNotFoundError:
            return None

    def size(self, key: str) -> int:
        """Return the size in bytes. Raises FileNotFoundError."""
        return self.backend.size(self.path(key))

    def read(self, key: str) -> bytes:
        """Return the whole object. Raises FileNotFoundError."""
        return self.backend.read(self.path(key))

    def write(self, key: str, data: bytes) -> None:
        """Create or replace a small object that only one writer owns; a reader sees the old or the new one."""
        self.backend.write(self.path(key), data)

    def put(self, key: str, source: Path) -> None:
        """Upload a file; a reader sees all of it or nothing."""
        self.backend.upload(self.path(key), source)

    def get(self, key: str, target: Path) -> str:
        """Download to a file and return the sha256 of the received bytes. Raises FileNotFoundError."""
        return self.backend.download(self.path(key), target)

    def delete(self, key: str) -> None:
        self.backend.delete(self.path(key))

    def create(self, key: str, data: bytes) -> bool:
        """Put the object if `key` is free (put-if-absent); return whether the object at `key` is now this `data`.

        `data` must be unique to the caller, so it holds a nonce. If the answer to a successful create is lost, the
        client tries again and gets "exists". Reading the object back then shows whether it is the caller's own.
        """
        return self.backend.create(self.path(key), data) or self.read(key) == data

    def walk(self, folder: str = "") -> Iterator[ObjectInfo]:
        """List all objects under `folder`, with keys as paths, to find objects that no manifest or log names."""
        for item in self.backend.walk(f"{self.path(folder)}/" if folder else f"{self._base}/"):
            yield replace(item, path=item.path.removeprefix(f"{self._base}/"))


def in_parallel(function: Callable[[A], B], items: Iterable[A], threads: int = 16) -> list[B]:
    """Return the results of `function`, which mostly waits for the store, in the order of `items`."""
    listed = list(items)
    if len(listed) < 2:
        return [function(item) for item in listed]
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(function, listed))


def sha256(path: Path) -> str:
    """Return the hex sha256 of a local file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
