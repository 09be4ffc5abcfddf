"""The doctor finds what a store's place cannot do, says what would go wrong, and deletes what it wrote."""

import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from storage.errors import StorageError, UnavailableError
from storage.maintenance import doctor
from storage.maintenance.doctor import examine
from storage.objects.local import LocalBackend, ObjectInfo
from storage.objects.store import Store


def test_a_healthy_place(any_store: Store) -> None:
    """In a healthy place all probes succeed, and only the objects from before are left."""
    any_store.write("runs/of/somebody", b"else")
    assert dict(examine(any_store)).keys() == doctor._PROBES.keys()
    assert [item.path for item in any_store.walk()] == ["runs/of/somebody"]
    if any_store.is_local:
        assert [path.name for path in Path(any_store.root).iterdir()] == ["runs"]


class CheckThenWrite(LocalBackend):
    """A `create` that is not atomic: it has several winners if several writers race."""

    def create(self, path: str, data: bytes) -> bool:
        if os.path.exists(path):
            return False
        self.write(path, data)
        return True


class Lying(LocalBackend):
    """A backend that returns wrong bytes, and does not delete."""

    def read(self, path: str) -> bytes:
        return super().read(path) + b"."

    def delete(self, path: str) -> None:
        """Do nothing."""


class Stale(LocalBackend):
    """A backend whose listings do not show new objects."""

    def walk(self, prefix: str) -> Iterator[ObjectInfo]:
        return iter(())


class Secretive(LocalBackend):
    """A backend like AWS for a user without s3:ListBucket: it refuses requests for absent objects."""

    def size(self, path: str) -> int:
        if not os.path.exists(path):
            refuse()
        return super().size(path)


def refuse(*_: object) -> Any:
    """Refuse as the S3 backend does."""
    raise UnavailableError("s3://…: Access Denied. Credentials …") from PermissionError("Access Denied")


class Refusing(LocalBackend):
    """A backend that refuses some operations."""

    def __init__(self, *operations: str) -> None:
        for operation in operations:
            setattr(self, operation, refuse)


@pytest.mark.parametrize(
    ("backend", "problem"),
    [
        (CheckThenWrite(), "race: 16 writers created one object at once, and .* do not use this root"),
        (Lying(), "write: wrote b.*So nothing can be committed"),
        (Stale(), "listing: an object just written is not listed. So `gc` would miss leftovers"),
        (Secretive(), "absence: .*Access Denied.*needs s3:ListBucket"),
        (Refusing("walk"), "listing: .*Access Denied"),
        (Refusing("delete"), "delete: .*Access Denied.*`gc --delete` fails"),
        (Refusing("write"), "write: .*Access Denied"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_each_fault_of_a_place_is_found(store: Store, backend: LocalBackend, problem: str) -> None:
    """The first check that fails says what it found, and what would go wrong in the pipeline."""
    store.backend = backend
    with pytest.raises(StorageError, match=problem):
        list(examine(store))


def test_a_place_that_cannot_be_reached(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says why: there is no such bucket, or no server listens."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        nobody = f"http://127.0.0.1:{closed.getsockname()[1]}"
        for endpoint, why in (
            (os.environ["AWS_ENDPOINT_URL"], "there is no bucket"),
            (nobody, "Could not connect to the endpoint URL"),
        ):
            monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
            begin = time.monotonic()
            with pytest.raises(StorageError, match=f"^write: .*{why}.* So nothing can be committed"):
                list(examine(Store(f"s3://{bucket}-wrong/root", request_timeout_s=1, patience_s=2)))
            assert time.monotonic() - begin < 100  # a run waits 600 s
