"""The doctor finds what a store's place cannot do, says what would go wrong, and deletes what it wrote."""

import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from storage.errors import UnavailableError
from storage.maintenance.doctor import ProbeResult, examine
from storage.objects.local import LocalBackend, ObjectInfo
from storage.objects.store import Store


def by_name(store: Store, backend: LocalBackend | None = None) -> dict[str, ProbeResult]:
    if backend:
        store.backend = backend
    return {check.name: check for check in examine(store)}


def failed(checks: dict[str, ProbeResult]) -> set[str]:
    assert all(check.consequence for check in checks.values() if not check.ok)
    return {check.name for check in checks.values() if check.ok is False}


def test_a_healthy_place(any_store: Store) -> None:
    """In a healthy place all probes succeed, and only the objects from before are left."""
    any_store.write("runs/of/somebody", b"else")
    checks = by_name(any_store)
    assert {check.ok for check in checks.values()} == {True}
    assert {"race", "second create", "parts"} <= checks.keys()
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


class Overwriting(LocalBackend):
    """A `create` of a server that ignores the condition and overwrites."""

    def create(self, path: str, data: bytes) -> bool:
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
    ("backend", "problems"),
    [
        (CheckThenWrite(), {"race": "writers created one object at once"}),
        (Overwriting(), {"second create": "an existing object succeeded", "race": "16 of them succeeded"}),
        (
            Lying(),
            {
                "write": "wrote b'",
                "delete": "still there",
                "second create": "but replaced",
                "race": "is stored",
                "listing": "deleted",
            },
        ),
        (Stale(), {"listing": "just written is not listed"}),
        (Secretive(), {"delete": "needs s3:ListBucket"}),
        (Refusing("walk"), dict.fromkeys(("listing", "tidied up"), "Access Denied")),
        (Refusing("delete"), dict.fromkeys(("delete", "listing", "tidied up"), "Access Denied")),
        (Refusing("write"), dict.fromkeys(("write", "delete", "listing"), "Access Denied")),
    ],
    ids=lambda value: type(value).__name__,
)
def test_each_fault_of_a_place_is_found(store: Store, backend: LocalBackend, problems: dict[str, str]) -> None:
    """Each fault fails exactly the expected checks, and each failed check names the consequence."""
    checks = by_name(store, backend)
    assert failed(checks) == problems.keys()
    for name, problem in problems.items():
        assert problem in checks[name].found


def test_a_place_that_cannot_be_reached(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A single check says why: there is no such bucket, or no server listens."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        nobody = f"http://127.0.0.1:{closed.getsockname()[1]}"
        for root, endpoint, why in (
            (f"s3://{bucket}-wrong/root", None, "there is no bucket"),
            ("s3://bucket/root", nobody, "Could not connect to the endpoint URL"),
        ):
            if endpoint:
                monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
            begin = time.monotonic()
            (check,) = examine(Store(root, request_timeout_s=1, patience_s=2))
            assert (check.name, check.ok) == ("reached", False)
            assert why in check.found
            assert time.monotonic() - begin < 100  # a run waits 600 s
