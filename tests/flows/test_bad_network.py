"""The main job over a network that loses, delays and spoils two of five requests to the store."""

import os
from pathlib import Path

import pytest

from flows.math_mt_ppo import math_mt_ppo
from storage import layout
from storage.maintenance.verify import verify
from storage.objects.store import Store
from storage.versions import aliases
from storage.versions.manifests import read
from tests.storage.test_bad_network import SHARE, TIMEOUT_S
from tests.support.fault_proxy import FaultProxy


@pytest.mark.long
def test_the_main_job_over_a_bad_network(
    bucket: str, overrides: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The whole pipeline runs on S3 while two of five requests are spoilt, and its lineage passes a deep `verify`."""
    direct = os.environ["AWS_ENDPOINT_URL"]
    settings = [f"storage.root=s3://{bucket}/x", "run.iterations=1"]
    monkeypatch.setattr("storage.objects.store.REQUEST_TIMEOUT_S", TIMEOUT_S)
    with FaultProxy(direct, SHARE, seed=4, hang_s=2 * TIMEOUT_S) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        assert math_mt_ppo("smoke", [*overrides, *settings]) == f"s3://{bucket}/x/runs/smoke/report"
        print(dict(proxy.counts))
    monkeypatch.setenv("AWS_ENDPOINT_URL", direct)
    store = Store(f"s3://{bucket}/x")
    report = verify(store, [layout.checkpoint("smoke", 1)], deep=True)
    assert report.findings == []
    assert read(store, layout.trajectories("smoke", 0)).rows == 16
    assert aliases.resolve_version(store, "smoke/latest") == layout.checkpoint("smoke", 1)
