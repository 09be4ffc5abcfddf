"""The doctor finds what a store's place cannot do, says what would go wrong, and deletes what it wrote."""

import json
import os
import shutil
import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from botocore.exceptions import ClientError
from s3fs import S3FileSystem

from storage.errors import UnavailableError
from storage.maintenance import doctor
from storage.maintenance.doctor import ProbeResult, examine
from storage.objects.interface import ObjectInfo
from storage.objects.local import LocalBackend
from storage.objects.store import Store


def by_name(checks: list[ProbeResult]) -> dict[str, ProbeResult]:
    return {check.name: check for check in checks}


def with_backend(store: Store, backend: LocalBackend) -> Store:
    store.backend = backend
    return store


def failed(checks: list[ProbeResult]) -> set[str]:
    """Return the names of failed checks without `lasting`, which fails if the temporary folder is in memory."""
    return {check.name for check in checks if check.ok is False} - {"lasting"}


def test_a_healthy_place(any_store: Store) -> None:
    """In a healthy place all probes run, none fails, and only the objects from before are left."""
    any_store.write("runs/of/somebody", b"else")
    checks = examine(any_store)
    assert failed(checks) == set()
    assert {check.ok for check in checks if check.name != "lasting"} == {True}
    assert {"race", "second create", "clocks", "latency"} <= by_name(checks).keys()
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


class Forgetful(LocalBackend):
    """A `create` that reports success, but stores other bytes."""

    def create(self, path: str, data: bytes) -> bool:
        self.write(path, b"somebody's")
        return not path.endswith("/race-0") or data == b"writer 3"


class Lying(LocalBackend):
    """A backend that returns wrong sizes and bytes, and does not delete."""

    def size(self, path: str) -> int:
        return super().size(path) + 1

    def read(self, path: str) -> bytes:
        return super().read(path) + b"."

    def delete(self, path: str) -> None:
        """Do nothing."""


class Stale(LocalBackend):
    """A backend whose listings do not show new objects."""

    def walk(self, prefix: str) -> Iterator[ObjectInfo]:
        return iter(())


class Late(LocalBackend):
    """A backend whose clock is an hour behind."""

    def walk(self, prefix: str) -> Iterator[ObjectInfo]:
        return (replace(item, modified=item.modified - 3600) for item in super().walk(prefix))


class Inventing(LocalBackend):
    """A backend that reports absent objects as existing and empty."""

    def size(self, path: str) -> int:
        return super().size(path) if os.path.exists(path) else 0

    def read(self, path: str) -> bytes:
        return super().read(path) if os.path.exists(path) else b""


@pytest.mark.parametrize(
    ("backend", "problems"),
    [
        (CheckThenWrite(), {"race": "writers created one object at once"}),
        (
            Overwriting(),
            {"second create": "the create of an existing object succeeded", "race": "and 16 of them succeeded"},
        ),
        (
            Forgetful(),
            {"second create": "the create of an existing object succeeded", "race": 'but b"somebody\'s" is stored'},
        ),
        (Stale(), {"listing": "just written is not listed"}),
        (Late(), {"clocks": "differ by 3599 s"}),
    ],
    ids=lambda value: type(value).__name__,
)
def test_each_fault_of_a_place_is_found(store: Store, backend: LocalBackend, problems: dict[str, str]) -> None:
    """Each fault fails exactly the expected checks, and each failed check names the consequence."""
    checks = by_name(examine(with_backend(store, backend)))
    assert failed(list(checks.values())) == problems.keys()
    for name, problem in problems.items():
        assert problem in checks[name].found
        assert checks[name].consequence


def test_wrong_answers_about_single_objects_are_found(store: Store) -> None:
    """Wrong sizes and bytes, ignored deletions, and objects that were never written are found."""
    assert {"read", "size", "delete"} <= failed(examine(with_backend(store, Lying())))
    assert "absence" in failed(examine(with_backend(store, Inventing())))


def refusal() -> UnavailableError:
    """Return a refusal as the S3 backend raises it."""
    error, cause = UnavailableError("s3://…: Access Denied. Credentials …"), PermissionError("Access Denied")
    cause.__cause__ = ClientError({"Error": {"Code": "AccessDenied"}}, "Whatever")
    error.__cause__ = cause
    return error


class Refusing(LocalBackend):
    """A backend that refuses some operations."""

    def __init__(self, *operations: str) -> None:
        for operation in operations:
            setattr(self, operation, self._refuse)

    def _refuse(self, *_: object) -> Any:
        raise refusal()


def test_a_refused_delete_is_reported(store: Store) -> None:
    """The doctor also names the folder that it could not delete."""
    checks = by_name(examine(with_backend(store, Refusing("delete"))))
    assert checks["delete"].found == "AccessDenied Access Denied"
    assert "left behind" in checks["tidied up"].found
    assert (checks["write"].ok, checks["race"].ok) == (True, True)


def test_a_place_for_readers_only(store: Store) -> None:
    """If writing is refused, only the check `write` fails. Checks that must write first are reported as not tried."""
    checks = by_name(examine(with_backend(store, Refusing("write", "create"))))
    assert failed(list(checks.values())) == {"write"}
    assert checks["read"].ok is checks["race"].ok is checks["second create"].ok is None
    assert checks["absence"].ok is True


def test_refused_reads_and_listings_are_reported(store: Store) -> None:
    """A refusal fails the checks of that operation. A check that needs a listing first is reported as not tried."""
    assert {"read", "second create"} <= failed(examine(with_backend(store, Refusing("read"))))
    checks = by_name(examine(with_backend(store, Refusing("walk"))))
    assert failed(list(checks.values())) == {"listing"}
    assert checks["clocks"].ok is None


class Secretive(LocalBackend):
    """A backend like AWS for a user without s3:ListBucket: it refuses requests for absent objects."""

    def size(self, path: str) -> int:
        if not os.path.exists(path):
            raise refusal()
        return super().size(path)


def test_absence_that_looks_like_a_refusal(store: Store) -> None:
    """The check names the permission that the user needs."""
    check = by_name(examine(with_backend(store, Secretive())))["absence"]
    assert check.ok is False
    assert "s3:ListBucket" in check.found


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    """If a file is in the way, the doctor returns a single check that says so."""
    (tmp_path / "file").write_text("")
    (check,) = examine(Store(str(tmp_path / "file" / "root")))
    assert (check.name, check.ok) == ("reached", False)
    assert "Not a directory" in check.found


def test_a_folder_in_memory_is_reported(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder on tmpfs does not last. The nearest mount point counts, and the last of several mounts at one point."""

    def mount(*mounts: tuple[Path, str]) -> ProbeResult:
        found = [SimpleNamespace(mountpoint=str(point), fstype=kind) for point, kind in mounts]
        monkeypatch.setattr(psutil, "disk_partitions", lambda **_: found)
        return by_name(examine(store))["lasting"]

    root = Path("/")
    check = mount((root, "ext4"), (tmp_path, "xfs"), (tmp_path, "tmpfs"), (tmp_path / "elsewhere", "nfs4"))
    assert (check.ok, check.consequence) == (False, "a reboot deletes everything")
    assert f"tmpfs, mounted at {tmp_path}" in check.found
    assert mount((tmp_path, "tmpfs"), (tmp_path, "xfs"), (root, "tmpfs")).ok is True
    assert mount().ok is None


def test_a_full_disk_and_a_file_system_without_links(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A local root needs free space and hard links; the doctor finds that they are missing."""
    usage = type("Usage", (), {"free": 2**20})
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)

    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    assert failed(examine(store)) == {"free space", "hard links", "second create"}


def test_an_endpoint_without_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """If no server listens, the doctor soon returns a single check that says so."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{closed.getsockname()[1]}")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        begin = time.monotonic()
        (check,) = examine(Store("s3://bucket/root", request_timeout_s=1, patience_s=2))
    assert (check.name, check.ok) == ("reached", False)
    assert "Could not connect to the endpoint URL" in check.found
    assert time.monotonic() - begin < 100  # a run waits 600 s


def test_a_bucket_that_does_not_exist(bucket: str) -> None:
    """If the bucket does not exist, the doctor returns a single check that says so."""
    (check,) = examine(Store(f"s3://{bucket}-wrong/root", patience_s=5))
    assert "there is no bucket" in check.found


def test_an_unknown_access_key(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the server does not know the access key, the doctor returns a single check instead of many refusals."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "nobody")
    (check,) = examine(Store(f"s3://{bucket}/root", patience_s=5))
    assert "InvalidAccessKeyId" in check.found


@pytest.fixture
def small_race(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let 2 writers race instead of 16, because 16 connections take seconds to make."""
    monkeypatch.setattr(doctor, "_WRITERS", 2)


@pytest.mark.usefixtures("small_race")
def test_settings_of_a_bucket(bucket: str) -> None:
    """A lifecycle rule fails the check only if it is enabled and deletes objects of this store."""
    rules = [
        {"ID": "ours", "Status": "Enabled", "Filter": {"Prefix": "root/runs"}, "Expiration": {"Days": 3}},
        {"ID": "theirs", "Status": "Enabled", "Filter": {"Prefix": "other"}, "Expiration": {"Days": 3}},
        {"ID": "off", "Status": "Disabled", "Filter": {"Prefix": ""}, "Expiration": {"Days": 3}},
    ]
    S3FileSystem().call_s3("put_bucket_lifecycle_configuration", Bucket=bucket, LifecycleConfiguration={"Rules": rules})
    checks = by_name(examine(Store(f"s3://{bucket}/root")))
    assert failed(list(checks.values())) == {"lifecycle"}
    assert checks["lifecycle"].found == "ours deletes objects after 3 days"
    assert checks["versioning"].found == "off"


@pytest.mark.usefixtures("small_race")
def test_a_user_without_some_permissions(bucket: str) -> None:
    """Each refusal of a real server is reported by its own check, also for multipart uploads."""
    actions = ["s3:ListBucket", "s3:DeleteObject", "s3:AbortMultipartUpload", "s3:GetLifecycleConfiguration"]
    where = [f"arn:aws:s3:::{bucket}", f"arn:aws:s3:::{bucket}/*"]
    deny = {"Effect": "Deny", "Principal": "*", "Action": actions, "Resource": where}
    policy = json.dumps({"Version": "2012-10-17", "Statement": [deny]})
    S3FileSystem().call_s3("put_bucket_policy", Bucket=bucket, Policy=policy)
    checks = by_name(examine(Store(f"s3://{bucket}/root")))
    assert failed(list(checks.values())) == {"listing", "delete", "unfinished uploads", "tidied up"}
    assert checks["lifecycle"].ok is checks["clocks"].ok is None
    assert "AccessDenied" in checks["delete"].found
