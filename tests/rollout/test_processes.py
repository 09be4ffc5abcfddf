"""Several processes of one host play, each with its share of the servers; none of them matters."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from configs import Config, ConfigError, load
from flows.math_mt_ppo import math_mt_ppo
from storage import layout
from storage.logs import catalog
from storage.maintenance.verify import verify
from storage.objects.store import Store
from storage.versions import datasets, manifests
from tasks.inference import devices
from tasks.inference.api import InferenceError
from tasks.rollout.remote.handout import WorkerFailedError, WorkerLostError
from tasks.rollout.remote.losses import Losses
from tasks.rollout.remote.messages import Failure
from tasks.rollout.remote.shares import deal_shares
from tests.support.soak import SOAK, scaled
from tests.support.waiting_engine import WaitingEngine, opens
from tests.support.waiting_process import PIDS, open_waiting

TWO = ["rollout.processes=2", "inference.replicas=2", "score.workers=1"]
OVERLAP = ["run.overlap=true", "rollout.max_head_offpolicyness=2"]


def shared(*overrides: str) -> list[Config]:
    return [share.config for share in deal_shares(load("smoke", list(overrides)))]


def test_servers_episodes_and_verifiers_are_dealt_out() -> None:
    """Every server has exactly one process; a process with more servers plays more."""
    urls = [f"http://host-{number}:8000" for number in range(5)]
    parts = shared(f"inference.urls={urls}", "rollout={processes: 3, concurrency: 500}", "score.workers=5")
    assert [part.inference.urls for part in parts] == [urls[:1], urls[1:3], urls[3:]]
    assert [part.rollout.concurrency for part in parts] == [100, 200, 200]
    assert [part.score.workers for part in parts] == [1, 2, 2]
    assert [part.rollout.processes for part in parts] == [1, 1, 1]
    parts = shared("inference.replicas=4", "rollout={processes: 4, concurrency: 2}", "score.workers=1")
    assert [part.inference.replicas for part in parts] == [1, 1, 1, 1]
    assert [part.rollout.concurrency for part in parts] == [1, 1, 1, 1]
    assert [part.score.workers for part in parts] == [1, 1, 1, 1]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["inference.urls=['http://a:1']"], r"only 1 vLLM server\(s\), and each process needs its own"),
        (["cluster.address=auto"], "with cluster.address each node has one process"),
        (["storage.root=memory://x"], "in this process only: rollout.processes=2 needs a folder"),
    ],
)
def test_what_cannot_work_is_refused(more: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load("smoke", [*TWO, *more])


def test_a_place_rests_after_a_loss_and_may_break(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that was useful is replaced after a rest, others after longer and longer pauses, until none is."""
    now = [0.0]
    monkeypatch.setattr("tasks.rollout.remote.losses.time.monotonic", lambda: now[0])
    losses, pauses = Losses(rest_s=1.0), list[float]()
    assert losses.may_start("a")
    for useful in (True, False, True, False, False, False, False):
        losses.note("a", WorkerLostError("killed"), useful=useful)
        began = now[0]
        while not losses.may_start("a"):
            now[0] += 0.5
        pauses.append(now[0] - began)
        assert losses.cause is None
    assert pauses == [1, 5, 1, 5, 10, 20, 40]
    losses.note("a", WorkerLostError("killed"), useful=False)
    now[0] += 1e6
    assert not losses.may_start("a")
    assert isinstance(losses.cause, WorkerLostError)
    assert losses.all_broken
    losses.note("b", WorkerLostError("killed"), useful=True)
    assert not losses.all_broken
    losses = Losses()
    losses.note("b", WorkerFailedError(Failure.of(InferenceError("no GPU"))), useful=True)
    assert not losses.may_start("b")
    assert isinstance(losses.cause, InferenceError)


def test_gpus_are_dealt_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """No GPU belongs to two processes; the trainer keeps the first as long as there are enough."""
    monkeypatch.setattr(devices, "cpu_build", lambda: False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6")
    config = load("smoke", ["inference={replicas: 3, extra_args: [-tp, '2']}", "rollout.processes=2"])
    assert [share.devices for share in deal_shares(config)] == [[["1", "2"]], [["3", "4"], ["5", "6"]]]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    with pytest.raises(InferenceError, match="need 6, but this machine has 3"):
        deal_shares(config)


@pytest.fixture
def settings(prefect_api: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Return overrides for a run with two processes, with engines that only wait; all of them must end."""
    monkeypatch.setattr("tasks.rollout.remote.host_processes.open_engine", open_waiting)
    monkeypatch.setattr("tasks.rollout.remote.host_processes._REST_S", 0.0)
    yield [f"storage.root={tmp_path}/var", f"storage.cache={tmp_path}/cache", *TWO]
    assert not any(psutil.pid_exists(int(pid)) for pid in started(tmp_path))


def started(folder: Path) -> list[str]:
    """Return the ids of all processes that have opened their engine."""
    return sorted(path.name for path in (folder / "cache" / PIDS).glob("*"))


def kinds(store: Store) -> dict[str, str]:
    return {entry.version: entry.kind for entry in catalog.read_all(store) if entry.kind != "alias"}


def check_whole(store: Store, iterations: int) -> None:
    """Check that nothing is lost, doubled or damaged."""
    assert verify(store, list(kinds(store)), deep=True).findings == []
    for iteration in range(iterations):
        rows = datasets.trajectories(store, layout.trajectories("smoke", iteration), Path("/nowhere"))
        ids = [row.trajectory_id for row in rows]
        assert len(set(ids)) == len(ids) == 16


@pytest.mark.parametrize("more", scaled([OVERLAP], [OVERLAP, []]), ids=" ".join)
def test_versions_are_those_of_one_process(
    settings: list[str], more: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same command makes the same versions; the same two processes play all iterations and evaluations."""
    size = ["rollout.rows_per_shard=4", "rollout.concurrency=8", *more]
    math_mt_ppo("smoke", [*settings, *size])
    store = Store(f"{tmp_path}/var")
    check_whole(store, 2)
    assert len(started(tmp_path)) == 2
    files = manifests.read(store, layout.trajectories("smoke", 0)).files
    assert len({file.name.split("-")[1] for file in files}) >= 2  # writers
    monkeypatch.setattr("tasks.run.resources.open_engine", opens(WaitingEngine(0.01)))
    alone = [f"storage.root={tmp_path}/alone", f"storage.cache={tmp_path}/cache-alone", "score.workers=1"]
    math_mt_ppo("smoke", [*alone, *size])
    assert kinds(store) == kinds(Store(f"{tmp_path}/alone"))


@pytest.mark.skipif(not SOAK, reason="two vLLM servers start, over a minute: make soak")
@pytest.mark.usefixtures("prefect_api")
def test_each_process_has_its_own_server(tmp_path: Path) -> None:
    """Two real servers play: the canary proves each of them at every swap, and both have played."""
    math_mt_ppo("smoke", [f"storage.root={tmp_path}/var", f"storage.cache={tmp_path}/cache", *TWO])
    store = Store(f"{tmp_path}/var")
    check_whole(store, 2)
    files = manifests.read(store, layout.trajectories("smoke", 1)).files
    assert len({file.name.split("-")[1] for file in files}) == 2  # writers
    logs = sorted((tmp_path / "cache" / "logs").rglob("vllm-*.log"))
    assert [log.parent.name for log in logs] == ["process-0", "process-1"]


def test_a_killed_process_costs_only_its_groups(settings: list[str], tmp_path: Path) -> None:
    """One is killed while it plays: another one takes its place, and every data set is whole."""
    store = Store(f"{tmp_path}/var")

    def kill() -> None:
        while not manifests.committed(store, layout.trajectories("smoke", 0)):
            time.sleep(0.02)
        os.kill(int(started(tmp_path)[0]), signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    math_mt_ppo("smoke", [*settings, *OVERLAP, "run.iterations=8"])
    killer.join()
    check_whole(store, 8)
    assert len(started(tmp_path)) == 3


def test_an_error_of_an_agent_ends_the_flow_with_it(settings: list[str]) -> None:
    agent = "agent={type: 'tests.support.waiting_node:StopsTheLoop'}"
    with pytest.raises(RuntimeError, match="an agent stopped the event loop") as caught:
        math_mt_ppo("smoke", [*settings, agent])
    assert "in another process" in caught.value.__notes__[0]


@pytest.mark.skipif(not SOAK, reason="two minutes")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
@pytest.mark.usefixtures("environment")
def test_a_flow_that_ends_leaves_nothing_and_is_continued(
    settings: list[str], tmp_path: Path, number: signal.Signals
) -> None:
    """The processes of a killed or interrupted flow end with it; the same command continues the run."""
    store, more = Store(f"{tmp_path}/var"), [*settings, *OVERLAP, "run.iterations=6"]
    with (tmp_path / "flow.log").open("wb") as log:
        command = [sys.executable, "-m", "tests.support.waiting_process", "smoke", *more]
        flow = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        while not manifests.committed(store, layout.trajectories("smoke", 1)):
            assert flow.poll() is None, (tmp_path / "flow.log").read_text()[-3000:]
            time.sleep(0.05)
        family = psutil.Process(flow.pid).children(recursive=True)
        flow.send_signal(number)
        flow.wait(20)
    finally:
        flow.kill()
        flow.wait()
    assert {str(process.pid) for process in family} >= set(started(tmp_path))
    assert psutil.wait_procs(family, timeout=10)[1] == []
    math_mt_ppo("smoke", more)
    check_whole(store, 6)
