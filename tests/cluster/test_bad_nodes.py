"""Nodes that are slow, whose disk is full, or whose clock is wrong: the run is that of the good ones."""

import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from flows.math_mt_ppo import math_mt_ppo
from storage import layout
from storage.versions import datasets
from tests.support.cluster_runs import OVERLAP, Flow, check_whole, no_actor_is_left, store_of, told
from tests.support.ray_cluster import RayCluster
from tests.support.soak import SOAK
from tests.support.waiting_node import CACHE, CLOCK, SECONDS

pytestmark = pytest.mark.long

SLOW_S = 2.0
SIZES = ["rollout={problems_per_iteration: 12, group_size: 4, rows_per_shard: 4, concurrency: 8}"]


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[dict[str, str]]:
    """Yield the environment of a node with a file system of this size for its cache."""
    folder.mkdir()
    if os.geteuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder]).returncode:
        pytest.skip("needs the right to mount a file system")
    try:
        yield {CACHE: str(folder)}
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


def played(flow: Flow, folder: Path) -> tuple[int, int]:
    """Return the number of all groups of finished iterations, and of those that the slow node played."""
    rows = [
        row
        for iteration in range(flow.newest())
        for row in datasets.trajectories(flow.store, layout.trajectories("smoke", iteration), folder)
    ]
    groups = {(row.iteration, row.problem_id) for row in rows}
    return len(groups), len({(row.iteration, row.problem_id) for row in rows if row.turns[0].latency_s > SLOW_S / 2})


@pytest.mark.skipif(not SOAK, reason="two minutes; test_scheduler.py has slow and full hosts in threads")
@pytest.mark.usefixtures("environment")
@pytest.mark.parametrize("more", [OVERLAP, []], ids=" ".join)
def test_bad_nodes_cost_only_themselves(
    cluster: tuple[RayCluster, str], settings: list[str], tmp_path: Path, more: list[str]
) -> None:
    """A slow node plays few groups; those with a full disk or a wrong clock are dropped, and the log says why."""
    slow, late = {SECONDS: str(SLOW_S)}, {CLOCK: "-3600"}
    settings = [*settings, *SIZES, *more, "run.iterations=1000"]
    with (
        small_disk(tmp_path / "full", "64k") as full,
        cluster[0].with_nodes(slow, full, late),
        Flow(settings, tmp_path / "log") as flow,
    ):
        all_groups = of_slow = 0
        while not 0 < of_slow < all_groups / 5 or len(flow.lines("is lost")) < 2:
            flow.wait_for(flow.newest() + 1)
            all_groups, of_slow = played(flow, tmp_path / "cache")
        flow.interrupt()
        print(f"the slow node, one of four, played {of_slow} of {all_groups} groups")
    check_whole(flow.store, flow.newest(), episodes=48)
    assert no_actor_is_left(20)
    lost = flow.lines("is lost")
    assert sum("No space left" in line for line in lost) == 1
    assert sum("clock of this host is 60 minutes behind" in line for line in lost) == 1
    assert len(lost) == 2


@pytest.mark.skipif(not SOAK, reason="a minute; a disk that is full from the start is tested above")
def test_a_disk_that_fills(cluster: tuple[RayCluster, str], settings: list[str], tmp_path: Path) -> None:
    """The node plays until its disk is full; what it has stored counts, and others play the rest."""
    with small_disk(tmp_path / "small", "2m") as small, cluster[0].with_nodes(small), told() as lines:
        math_mt_ppo("smoke", [*settings, *SIZES, *OVERLAP, "run.iterations=12"])
    check_whole(store_of(settings), 12, episodes=48)
    (lost,) = (line for line in lines if "is lost" in line)
    assert "No space left" in lost
    assert no_actor_is_left(20)


@pytest.mark.skipif(not SOAK, reason="a minute; a clock that S3 refuses is tested above")
@pytest.mark.parametrize("seconds", [3600, -3600])
def test_a_clock_that_is_an_hour_off(
    cluster: tuple[RayCluster, str], settings: list[str], tmp_path: Path, seconds: int
) -> None:
    """In a shared folder, nothing compares clocks: all nodes play."""
    folder = [f"storage.root={tmp_path}/shared", *settings[1:]]
    with cluster[0].with_nodes({CLOCK: str(seconds)}), told() as lines:
        math_mt_ppo("smoke", [*folder, *SIZES, *OVERLAP, "run.iterations=4"])
    assert [line for line in lines if "is lost" in line] == []
    started = {
        round((row.started_at - time.time()) / 3600)
        for row in datasets.trajectories(store_of(folder), layout.trajectories("smoke", 3), tmp_path)
    }
    assert started == {0, round(seconds / 3600)}
    check_whole(store_of(folder), 4, episodes=48)
    assert no_actor_is_left(20)
