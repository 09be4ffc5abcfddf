"""The doctor finds what a place cannot do, says what it means, and leaves nothing behind."""

import json
import os
import shutil
import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError
from s3fs import S3FileSystem

from storage.errors import UnavailableError
from storage.maintenance.doctor import ProbeResult, examine
from storage.maintenance.probes import folder, races
from storage.objects.interface import ObjectInfo
from storage.objects.local import LocalBackend
from storage.objects.store import Store


def by_name(checks: list[ProbeResult]) -> dict[str, ProbeResult]:
    return {check.name: check for check in checks}


def with_backend(store: Store, backend: LocalBackend) -> Store:
    store.backend = backend
    return store


def failed(checks: list[ProbeResult]) -> set[str]:
    """Names of what is a problem; a temporary folder may well lie in memory."""
    return {check.name for check in checks if check.ok is False} - {"lasting"}


def test_a_healthy_place(any_store: Store) -> None:
    """Everything is tried, nothing is a problem, and nothing is left."""
    any_store.write("runs/of/somebody", b"else")
    checks = examine(any_store)
    assert failed(checks) == set()
    assert {check.ok for check in checks if check.name != "lasting"} == {True}
    assert {"race", "second create", "clocks", "latency"} <= by_name(checks).keys()
    assert [found.path for found in any_store.walk()] == ["runs/of/somebody"]


def test_no_folder_is_left(store: Store) -> None:
    """Not even an empty one."""
    examine(store)
    assert list(Path(store.root).iterdir()) == []


class CheckThenWrite(LocalBackend):
    """A create of the kind that works until two do it at once."""

    def create(self, path: str, data: bytes) -> bool:
        if os.path.exists(path):
            return False
        self.write(path, data)
        return True


class Overwriting(LocalBackend):
    """A server that does not know the condition and ignores it."""

    def create(self, path: str, data: bytes) -> bool:
        self.write(path, data)
        return True


class Forgetful(LocalBackend):
    """Says yes to every create, and keeps none."""

    def create(self, path: str, data: bytes) -> bool:
        self.write(path, b"somebody's")
        return not path.endswith("/race-0") or data == b"writer 3"


class Lying(LocalBackend):
    """Tells wrong sizes and wrong bytes, and keeps what is deleted."""

    def size(self, path: str) -> int:
        return super().size(path) + 1

    def read(self, path: str) -> bytes:
        return super().read(path) + b"."

    def delete(self, path: str) -> None:
        """Nothing happens."""


class Stale(LocalBackend):
    """Listings come late."""

    def walk(self, prefix: str) -> Iterator[ObjectInfo]:
        return iter(())


class Late(LocalBackend):
    """A clock of another time."""

    def walk(self, prefix: str) -> Iterator[ObjectInfo]:
        return (replace(found, modified=found.modified - 3600) for found in super().walk(prefix))


class Inventing(LocalBackend):
    """Everything exists."""

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
def test_a_place_that_breaks_its_word(store: Store, backend: LocalBackend, problems: dict[str, str]) -> None:
    """Each fault is found by its own check and by no other, with what it means."""
    checks = by_name(examine(with_backend(store, backend)))
    assert failed(list(checks.values())) == problems.keys()
    for name, found in problems.items():
        assert found in checks[name].found
        assert checks[name].consequence


def test_lies_about_single_objects(store: Store) -> None:
    """Sizes, bytes, deletions, and objects that never were."""
    assert {"read", "size", "delete"} <= failed(examine(with_backend(store, Lying())))
    assert "absence" in failed(examine(with_backend(store, Inventing())))


def refusal() -> UnavailableError:
    """As the S3 backend raises it."""
    error, cause = UnavailableError("s3://…: Access Denied. Credentials …"), PermissionError("Access Denied")
    cause.__cause__ = ClientError({"Error": {"Code": "AccessDenied"}}, "Whatever")
    error.__cause__ = cause
    return error


class Refusing(LocalBackend):
    """A user who may not do some things."""

    def __init__(self, *operations: str) -> None:
        for operation in operations:
            setattr(self, operation, self._refuse)

    def _refuse(self, *_: object) -> Any:
        raise refusal()


def test_a_refused_delete_is_told(store: Store) -> None:
    """And what is left because of it."""
    checks = by_name(examine(with_backend(store, Refusing("delete"))))
    assert checks["delete"].found == "AccessDenied Access Denied"
    assert "left behind" in checks["tidied up"].found
    assert (checks["write"].ok, checks["race"].ok) == (True, True)


def test_a_place_for_readers_only(store: Store) -> None:
    """One refusal is a problem; what could not be tried for it is no other."""
    checks = by_name(examine(with_backend(store, Refusing("write", "create"))))
    assert failed(list(checks.values())) == {"write"}
    assert checks["read"].ok is checks["race"].ok is checks["second create"].ok is None
    assert checks["absence"].ok is True


def test_refused_reads_and_listings_are_told(store: Store) -> None:
    """Each with what would fail for want of it."""
    assert {"read", "second create"} <= failed(examine(with_backend(store, Refusing("read"))))
    checks = by_name(examine(with_backend(store, Refusing("walk"))))
    assert failed(list(checks.values())) == {"listing"}
    assert checks["clocks"].ok is None


class Secretive(LocalBackend):
    """AWS to a user without s3:ListBucket: absent is as good as forbidden."""

    def size(self, path: str) -> int:
        if not os.path.exists(path):
            raise refusal()
        return super().size(path)


def test_absence_that_looks_like_a_refusal(store: Store) -> None:
    """The remedy is named."""
    found = by_name(examine(with_backend(store, Secretive())))["absence"]
    assert found.ok is False
    assert "s3:ListBucket" in found.found


def test_a_folder_that_cannot_be(tmp_path: Path) -> None:
    """A file stands in the way: one check says so."""
    (tmp_path / "file").write_text("")
    (check,) = examine(Store(str(tmp_path / "file" / "root")))
    assert (check.name, check.ok) == ("reached", False)
    assert "Not a directory" in check.found


def test_a_folder_in_memory_is_told(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is gone after a reboot."""
    mounts = tmp_path / "mounts"
    monkeypatch.setattr(folder, "_MOUNTS", mounts)
    mounts.write_text(f"/dev/sda / ext4 rw 0 0\ntmpfs {tmp_path} tmpfs rw 0 0\n")
    found = by_name(examine(store))["lasting"]
    assert (found.ok, found.consequence) == (False, "a reboot deletes everything")
    assert f"tmpfs, mounted at {tmp_path}" in found.found
    mounts.unlink()
    assert by_name(examine(store))["lasting"].ok is None


def test_mounts_are_told_apart() -> None:
    """The nearest one counts, the last of several at a point, and names with spaces are escaped."""
    mounts = "rootfs / ext4 0\na /data tmpfs 0\nb /data xfs 0\nc /data/with\\040space nfs4 0\nd /database tmpfs 0"
    assert folder.mount_of(Path("/data/x"), mounts) == ("/data", "xfs")
    assert folder.mount_of(Path("/data/with space/x"), mounts) == ("/data/with space", "nfs4")
    assert folder.mount_of(Path("/elsewhere"), mounts) == ("/", "ext4")


def test_a_full_disk_and_a_file_system_without_links(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a local folder needs of its file system."""
    usage = type("Usage", (), {"free": 2**20})
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)

    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    assert failed(examine(store)) == {"free space", "hard links", "second create"}


def test_an_endpoint_that_nobody_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    """One check, soon, that says where nobody answered."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{closed.getsockname()[1]}")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        begin = time.monotonic()
        (check,) = examine(Store("s3://bucket/root", request_timeout_s=1, patience_s=2))
    assert (check.name, check.ok) == ("reached", False)
    assert "Could not connect to the endpoint URL" in check.found
    assert time.monotonic() - begin < 100  # of the 600 that a run waits


def test_a_bucket_that_is_not_there(bucket: str) -> None:
    """The same for a name that is wrong, and for a key that nobody knows."""
    (check,) = examine(Store(f"s3://{bucket}-wrong/root", patience_s=5))
    assert "there is no bucket" in check.found


def test_a_key_that_nobody_knows(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No list of refusals: nothing can be done with it."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "nobody")
    (check,) = examine(Store(f"s3://{bucket}/root", patience_s=5))
    assert "InvalidAccessKeyId" in check.found


@pytest.fixture
def small_race(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixteen connections take seconds to make."""
    monkeypatch.setattr(races, "_WRITERS", 2)


@pytest.mark.usefixtures("small_race")
def test_settings_of_a_bucket(bucket: str) -> None:
    """Rules that take away what is ours are a problem, others are not."""
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
def test_a_user_who_may_not_do_everything(bucket: str) -> None:
    """A real server's refusals are told one by one, and those of uploads too."""
    actions = ["s3:ListBucket", "s3:DeleteObject", "s3:AbortMultipartUpload", "s3:GetLifecycleConfiguration"]
    where = [f"arn:aws:s3:::{bucket}", f"arn:aws:s3:::{bucket}/*"]
    deny = {"Effect": "Deny", "Principal": "*", "Action": actions, "Resource": where}
    policy = json.dumps({"Version": "2012-10-17", "Statement": [deny]})
    S3FileSystem().call_s3("put_bucket_policy", Bucket=bucket, Policy=policy)
    checks = by_name(examine(Store(f"s3://{bucket}/root")))
    assert failed(list(checks.values())) == {"listing", "delete", "unfinished uploads", "tidied up"}
    assert checks["lifecycle"].ok is checks["clocks"].ok is None
    assert "AccessDenied" in checks["delete"].found
