"""One simulated cluster for all tests of this folder."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import s3_server as s3
from tests.support.ray_cluster import RayCluster


@pytest.fixture(scope="session")
def cluster(s3_server: s3.Endpoint) -> Iterator[tuple[RayCluster, str]]:
    """Yield a cluster of three nodes, and the name of a bucket for which they have credentials."""
    with pytest.MonkeyPatch.context() as environment:
        bucket = s3.make_bucket(s3_server, environment)
        with RayCluster() as made:
            yield made, bucket


@pytest.fixture
def settings(
    cluster: tuple[RayCluster, str], prefect_api: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> list[str]:
    """Return overrides for a run on the cluster, in S3, with engines that only wait."""
    from tests.support.waiting_node import WaitingNode

    monkeypatch.setattr("tasks.cluster.node_workers.NodeWorker", WaitingNode)
    address, bucket = cluster[0].address, cluster[1]
    store = [f"storage.root=s3://{bucket}/{tmp_path.name}", f"storage.cache={tmp_path}/cache"]
    return [*store, f"cluster.address={address}", "cluster.silence_s=10", "score.workers=1"]
