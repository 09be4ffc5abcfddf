"""One simulated cluster for all tests of this folder."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import s3_server as s3
from tests.support.ray_cluster import RayCluster


@pytest.fixture(scope="session")
def cluster(s3_server: str) -> Iterator[tuple[RayCluster, str]]:
    """Yield a cluster of three nodes, and the name of a bucket for which they have credentials."""
    with pytest.MonkeyPatch.context() as environment:
        bucket = s3.make_bucket(s3_server, environment)
        with RayCluster() as made:
            yield made, bucket


@pytest.fixture
def waiting(prefect_api: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let workers of this process's flows have engines that only wait."""
    from tests.support.waiting_node import WaitingNode

    monkeypatch.setattr("tasks.cluster.workers.NodeWorker", WaitingNode)


@pytest.fixture
def settings(cluster: tuple[RayCluster, str], waiting: None, tmp_path: Path) -> list[str]:
    """Return overrides for a run on the cluster, in S3, with engines that only wait."""
    address, bucket = cluster[0].address, cluster[1]
    store = [f"storage.root=s3://{bucket}/{tmp_path.name}", f"storage.cache={tmp_path}/cache"]
    return [*store, f"cluster.address={address}", "cluster.silence_s=10", "score.workers=1"]


@pytest.fixture
def local_settings(waiting: None, tmp_path: Path) -> list[str]:
    """Return overrides for a run with two workers on this host, in a folder, with engines that only wait."""
    store = [f"storage.root={tmp_path}/var", f"storage.cache={tmp_path}/cache"]
    return [*store, "cluster.workers_per_node=2", "cluster.silence_s=10", "score.workers=1"]
