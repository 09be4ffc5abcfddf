"""Each version is committed exactly once, even over a network that loses, delays or spoils two of five requests."""

import os
import socket
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from botocore.exceptions import ClientError

from storage.errors import UnavailableError
from storage.logs import catalog
from storage.maintenance.verify import verify
from storage.objects.s3 import PART_BYTES, is_transient
from storage.objects.store import Store
from storage.records import SCORE_SCHEMA, Score
from storage.versions import datasets
from storage.versions.drafts import Draft, Provenance
from tests.support.fault_proxy import ALL, FaultProxy
from tests.support.soak import scaled

pytestmark = pytest.mark.long

SHARE = 0.4
TIMEOUT_S = 1.0
"""Request timeout. A server on a busy machine needs less; a longer one would slow down each request that hangs."""
VERSIONS, RIVALS = 3, 2


def commit(store: Store, number: int, writer: int) -> bool:
    """Write and commit a version; return whether this writer's attempt was the one committed."""
    rows = [Score(f"{number}/{writer}/{turn}", turn, "correct", 1.0, "", "", "", 1.0) for turn in range(3)]
    with Draft(store, f"runs/r/scores/{number:06d}/a", "scores") as draft:
        datasets.write_rows(draft, SCORE_SCHEMA, rows, 2)
        return draft.commit(Provenance(config={}), []).nonce == draft.nonce


def commit_all(bucket: str) -> Counter[int]:
    """Commit each version with `RIVALS` writers at once; return by version how many of them believe that they won."""
    jobs = [(number, writer) for number in range(VERSIONS) for writer in range(RIVALS)]
    with ThreadPoolExecutor(8) as writers:
        won = writers.map(lambda job: commit(Store(f"s3://{bucket}/root", request_timeout_s=TIMEOUT_S), *job), jobs)
        return Counter(number for (number, _), wins in zip(jobs, won, strict=True) if wins)


def assert_each_once(store: Store, wins: Counter[int], tmp_path: Path) -> None:
    """Check that each version has one winner and its rows only, is in the catalog, and passes a deep `verify`."""
    assert wins == Counter(dict.fromkeys(range(VERSIONS), 1))
    versions = [f"runs/r/scores/{number:06d}/a" for number in range(VERSIONS)]
    assert verify(store, versions, deep=True).findings == []
    assert {entry.version for entry in catalog.read_all(store)} == set(versions)
    for version in versions:
        rows = [row["trajectory_id"].rsplit("/", 1)[0] for row in datasets.rows(store, version, tmp_path)]
        assert len(rows) == 3
        assert len(set(rows)) == 1


@pytest.mark.parametrize("faults", scaled([["lost"], [*ALL]], [*([fault] for fault in ALL), [*ALL]]), ids="+".join)
def test_each_version_is_committed_once(
    bucket: str, monkeypatch: pytest.MonkeyPatch, faults: list[str], tmp_path: Path
) -> None:
    """One of the rival writers wins and knows it, even if the answer to its winning request was lost."""
    direct = os.environ["AWS_ENDPOINT_URL"]
    with FaultProxy(direct, SHARE, seed=1, hang_s=2 * TIMEOUT_S, faults=faults) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        wins = commit_all(bucket)
        print(dict(proxy.counts))
        assert all(proxy.counts[fault] for fault in faults)
    monkeypatch.setenv("AWS_ENDPOINT_URL", direct)
    assert_each_once(Store(f"s3://{bucket}/root"), wins, tmp_path)


def test_a_large_object_arrives_whole(bucket: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It is sent and fetched in parts, and any part may be lost on the way."""
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_bytes(os.urandom(3 * PART_BYTES + 1))
    with FaultProxy(os.environ["AWS_ENDPOINT_URL"], SHARE, seed=2, hang_s=4.0) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        store = Store(f"s3://{bucket}/root", request_timeout_s=2)
        store.put("large", source)
        store.get("large", target)
    assert target.read_bytes() == source.read_bytes()


@pytest.mark.parametrize(
    ("code", "status", "is_retried"),
    [
        ("ConditionalRequestConflict", 409, True),
        ("InternalError", 500, True),
        ("NotImplemented", 501, False),
        ("RequestTimeout", 400, True),
        ("AccessDenied", 403, False),
    ],
)
def test_which_errors_are_retried(code: str, status: int, is_retried: bool) -> None:
    """Requests are retried if the server or the network failed.

    A conditional write is also retried if it met another one (AWS answers 409 then).
    """
    cause = ClientError({"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}, "PutObject")
    assert is_transient(cause) == is_retried


def test_a_silent_server_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Writes and reads end if a server never answers; the error names the object, and says what is safe."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_DEFAULT_REGION"):
            monkeypatch.setenv(name, "us-east-1")
        store = Store("s3://bucket", request_timeout_s=0.5, patience_s=1)
        for call in (lambda: store.create("a", b"data"), lambda: store.read("a"), lambda: store.size("a")):
            started = time.monotonic()
            with pytest.raises(UnavailableError, match=r"s3://bucket/a: no success within 1 s.*are safe"):
                call()
            assert time.monotonic() - started < 60  # the defaults of botocore: 60 s, five times
