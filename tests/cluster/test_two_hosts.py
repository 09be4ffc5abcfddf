"""A Ray cluster of two hosts, which the commands of the page start: what a cut cable costs, and what it never costs."""

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from storage import layout
from storage.objects.store import Store
from storage.versions import manifests
from tests.support import s3_server as s3
from tests.support.cluster_runs import check_whole, store_of
from tests.support.soak import SOAK
from tests.support.two_hosts import Hosts, need_namespaces
from tests.support.waiting_node import HOLD, SECONDS

pytestmark = [pytest.mark.long, need_namespaces]
QUICK = {"RAY_health_check_period_ms": "500", "RAY_health_check_timeout_ms": "3000"}
"""Environment of Ray's head, which otherwise needs a minute to count a silent node as dead."""
SILENCE_S = 6
ITERATIONS = 10


class TwoHosts:
    """A Ray cluster on two hosts, each with a cache of its own; both reach S3 and Prefect, whatever the cable."""

    def __init__(self, hosts: Hosts, bucket: str, folder: Path) -> None:
        self.hosts = hosts
        self.settings = [
            f"storage.root=s3://{bucket}/{folder.name}",
            f"storage.cache={hosts.own}/cache",
            *("cluster.address=auto", f"cluster.silence_s={SILENCE_S}", "score.workers=1"),
            *("run.overlap=true", "rollout.max_head_offpolicyness=2", f"run.iterations={ITERATIONS}"),
            "rollout.rows_per_shard=4",
        ]
        self.store = store_of(self.settings)
        self.ray = {
            "RAY_TMPDIR": str(hosts.own),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_AUTH_MODE": "token",
            "RAY_enable_metrics_collection": "0",
            "AUTOSCALER_METRIC_PORT": "-1",
            HOLD: str(hosts.own / "hold"),
            SECONDS: "0.2",
        }

    def start(self) -> None:
        """Start Ray on both hosts, as the page says."""
        self.hosts.type(0, "ray get-auth-token --generate")
        shutil.copytree(self.hosts.folder(0) / ".ray", self.hosts.folder(1) / ".ray")
        self.hosts.type(0, "ray start --head --port=6379", **self.ray, **QUICK)
        self.join()

    def join(self) -> None:
        self.hosts.type(1, "ray start --address=10.0.0.1:6379", **self.ray)

    def flow(self) -> "subprocess.Popen[bytes]":
        """Start the flow on the first host."""
        command = ["python", "-m", "tests.support.waiting_node", "smoke", *self.settings]
        return self.hosts.start(0, *command, RAY_TMPDIR=str(self.hosts.own), PREFECT_LOGGING_LEVEL="INFO")

    def hold(self) -> Path:
        """Hold back the uploads of the other host; return a file with the keys of those that have begun."""
        hold = self.hosts.folder(1) / "hold"
        hold.touch()
        return hold

    def wait(self, version: str) -> None:
        deadline = time.monotonic() + 300
        while not manifests.committed(self.store, version):
            assert time.monotonic() < deadline, self.hosts.log(0)
            time.sleep(0.1)


@pytest.fixture
def two(
    s3_server: s3.Endpoint, bucket: str, environment: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[TwoHosts]:
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    ports = [urlsplit(url).port for url in (s3_server.url, os.environ["PREFECT_API_URL"])]
    with Hosts(tmp_path) as hosts, hosts.reaching(*filter(None, ports)):
        made = TwoHosts(hosts, bucket, tmp_path)
        made.start()
        yield made


def named(store: Store) -> str:
    """Return the text of all manifests and journals."""
    found = [
        item.path for item in store.walk("runs") if "/journal/" in item.path or item.path.endswith("manifest.json")
    ]
    return "\n".join(store.read(path).decode() for path in found)


@pytest.mark.skipif(not SOAK, reason="two minutes; tests/rollout/test_scheduler.py has silent workers in threads")
@pytest.mark.parametrize("comes_back", [True, False], ids=lambda comes: "a while" if comes else "for good")
def test_a_host_that_is_cut_off_commits_nothing(two: TwoHosts, comes_back: bool) -> None:
    """The run goes on without it, and with it again; what it uploads meanwhile is in no journal and no manifest."""
    flow = two.flow()
    two.wait(layout.trajectories("smoke", 1))
    hold = two.hold()
    while not hold.read_text():
        time.sleep(0.02)
    two.hosts.cable("down")
    cut = time.monotonic()
    two.hosts.wait_for("is lost: no answer")
    print(f"noticed {time.monotonic() - cut:.1f} s after the cut")
    late = hold.read_text().split()
    hold.unlink()
    for key in late:
        while not two.store.exists(key):
            assert time.monotonic() < cut + 300
            time.sleep(0.05)
    if comes_back:
        two.hosts.cable("up")
        two.hosts.wait_for("workers start on 1 node(s)")
    assert flow.wait(300) == 0, two.hosts.log(0)[-4000:]
    print(f"the run ended {time.monotonic() - cut:.1f} s after the cut")
    check_whole(two.store, ITERATIONS)
    assert late
    assert [key for key in late if key in named(two.store)] == []
