"""How ranks find each other, and what is decided at their start and after their end: without a trainer."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, HashStore, TCPStore
from torch.distributed import DistStoreError
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from configs import load
from tasks.train.ranks.__main__ import Restarts
from tasks.train.ranks.group import gpu_of, interface_to, meet
from tasks.train.ranks.host import first_to_end
from tests.support.paths import ROOT


def test_each_rank_takes_a_gpu_of_its_host() -> None:
    """The first ones, one each; too few are an error. (No GPU is touched here.)"""
    assert [gpu_of(place, 8) for place in range(4)] == [0, 1, 2, 3]
    with pytest.raises(ValueError, match=r"has 2 visible GPUs, too few .*number 2 has none.*fewer ranks"):
        gpu_of(2, 2)


def test_a_name_that_does_not_resolve_yet_is_no_error_of_the_configuration() -> None:
    """The flow's host may get its name only when it starts, as in Kubernetes; until then, other hosts wait."""
    with pytest.raises(
        dist.DistError, match=r"MASTER_ADDR=no-such-host.invalid does not resolve on .* trainer.address"
    ):
        interface_to("no-such-host.invalid", hosts=2)


def test_a_name_that_leads_to_loopback_is_refused_for_several_hosts() -> None:
    """Many systems give the host's own name a loopback address, at which no other host can reach its ranks."""
    assert interface_to("localhost", hosts=1) == interface_to("127.0.0.1", hosts=2) == "lo"
    with pytest.raises(ValueError, match=r"MASTER_ADDR=localhost is the loopback address .* Give the IP address"):
        interface_to("localhost", hosts=2)


def test_all_hear_of_a_rank_without_a_gpu() -> None:
    """All ranks raise the same error; if some never come, the others still say why they cannot start."""
    store = HashStore()
    store.set_timeout(timedelta(seconds=20))
    with ThreadPoolExecutor(2) as pool:
        ranks = [pool.submit(meet, store, rank, 2, problem) for rank, problem in enumerate(("no GPU", ""))]
    assert [f"{rank.exception()}" for rank in ranks] == ["rank 0 cannot start: no GPU"] * 2
    store = HashStore()
    store.set_timeout(timedelta(seconds=0.1))
    with pytest.raises(ValueError, match="rank 0 cannot start: no GPU"):
        meet(store, 0, 2, "no GPU")


@pytest.mark.parametrize("kind", ["file", "TCP"])
def test_a_rank_can_take_the_place_of_a_lost_one_until_all_have_come(tmp_path: Path, kind: str) -> None:
    """After that, a rank that comes belongs to the next start, and must not wait for ranks that no longer work."""
    server = TCPStore("127.0.0.1", 0, is_master=True) if kind == "TCP" else None

    def come(rank: int, timeout_s: float) -> None:
        store = TCPStore("127.0.0.1", server.port) if server else FileStore(f"{tmp_path}/meeting", 99)
        store.set_timeout(timedelta(seconds=timeout_s))
        meet(store, rank, 3)

    for _ in range(2):
        with pytest.raises(DistStoreError, match=r"not all ranks have come: missing are 0, 2"):
            come(1, 0.2)
    with ThreadPoolExecutor(3) as pool:
        assert len([*pool.map(come, range(3), [20] * 3)]) == 3
    with pytest.raises(DistStoreError, match="ranks of the last start have not ended yet"):
        come(1, 20)


def test_waiting_for_the_flow_uses_up_no_restart() -> None:
    """Unless it takes too long: at the start, and after a loss, which the flow may notice later."""
    knobs = load("smoke", ["trainer.max_restarts=2", "trainer.timeout_s=60", "trainer.startup_timeout_s=30"]).trainer
    restarts = Restarts(knobs, since=0)
    assert restarts.allow(False, 20)
    assert restarts.used == 0
    assert restarts.allow(True, 100)
    assert restarts.allow(False, 189)
    assert restarts.used == 1
    assert restarts.allow(False, 191)
    assert restarts.used == 2
    assert not restarts.allow(True, 192)


def test_a_start_that_hangs_ends() -> None:
    """Groups of NCCL connect without a time limit, perhaps with Python's lock held; the log says where they hung."""
    hanging = "import ctypes\nfrom tasks.train.ranks.rank import _ending_after\n"
    hanging += "with _ending_after(0.5, 'connecting'):\n    ctypes.PyDLL(None).sleep(60)"  # keeps Python's lock
    ended = subprocess.run([sys.executable, "-c", hanging], cwd=ROOT, capture_output=True, timeout=30, check=False)
    assert ended.returncode == 1
    assert b"Timeout (0:00:00.500000)!" in ended.stderr


def test_a_killed_rank_is_lost_before_those_that_notice_it() -> None:
    """torchrun may see both ends at once; then it calls the wrong one the root cause."""
    codes = {0: 1, 1: -9, 2: 1}
    failures = {rank: ProcessFailure(rank, 100 + rank, code, "<N/A>") for rank, code in codes.items()}
    report = f"{ChildFailedError('tasks.train.ranks.rank', failures)}"
    assert report.index("rank      : 1") < report.index("Root Cause") < report.index("rank      : 0")
    assert first_to_end(report) == (1, -9)
    assert first_to_end("no report") is None
