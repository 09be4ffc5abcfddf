"""The doctor finds what a store's place cannot do, says what would go wrong, and deletes what it wrote."""

import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from storage.errors import StorageError, UnavailableError
from storage.maintenance import doctor
from storage.maintenance.doctor import examine
from storage.objects.local import LocalBackend
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


def refuse(*_: object) -> Any:
    """Refuse as the S3 backend does."""
    raise UnavailableError("s3://…: Access Denied. Credentials …") from PermissionError("Access Denied")


class Changed(LocalBackend):
    """A backend some of whose methods are others."""

    def __init__(self, **methods: Callable[..., Any]) -> None:
        vars(self).update(methods)


REAL = LocalBackend()
FAULTS = {
    "several winners": (CheckThenWrite(), "race: 16 writers created one object at once, and .* do not use this root"),
    "wrong bytes": (Changed(read=lambda path: REAL.read(path) + b"."), "write: wrote b.*So nothing can be committed"),
    "stale listings": (
        Changed(walk=lambda _: iter(())),
        "listing: an object just written is not listed. So `gc` would miss leftovers",
    ),
    "nothing is deleted": (Changed(delete=lambda _: None), "delete: a deleted object is still there"),
    # As on AWS for a user without s3:ListBucket: requests for absent objects are refused.
    "secretive": (
        Changed(size=lambda path: REAL.size(path) if os.path.exists(path) else refuse()),
        "absence: .*Access Denied.*needs s3:ListBucket",
    ),
    "walk": (Changed(walk=refuse), "listing: .*Access Denied"),
    "delete": (Changed(delete=refuse), "delete: .*Access Denied.*`gc --delete` fails"),
    "write": (Changed(write=refuse), "write: .*Access Denied"),
}


@pytest.mark.parametrize(("backend", "problem"), FAULTS.values(), ids=FAULTS)
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
