"""The ranks of a trainer, as a flow starts them: checkpoints in parts, other meshes, errors, losses and restarts."""

import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
from collections import Counter
from contextlib import nullcontext, suppress
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist

from configs import to_yaml
from configs.train import Parallel
from storage.errors import StorageError
from storage.maintenance.verify import verify
from storage.versions import checkpoints, manifests
from storage.versions.manifests import Manifest
from tasks.train.mesh import Mesh
from tasks.train.orders import DistanceOrder
from tasks.train.ranks.agreement import agree
from tasks.train.ranks.launcher import Ranks, RanksLostError
from tasks.train.trainer import Trainer
from tasks.train.version_trainer import VersionTrainer
from tests.support.paths import ROOT
from tests.support.rank_processes import free_port, run_ranks
from tests.support.soak import scaled
from tests.support.train_helpers import save_tiny
from tests.support.training_run import TrainingRun, largest_difference

pytestmark = pytest.mark.slow


def ranks_of(run: TrainingRun, replicate: int, shard: int, *overrides: str) -> Ranks:
    mesh = [f"ppo.parallel={{replicate: {replicate}, shard: {shard}}}", "trainer.launcher=torchrun"]
    return Ranks(run.config(*mesh, *overrides), run.folder / "logs")


def two_ranks(run: TrainingRun, *overrides: str) -> Ranks:
    return ranks_of(run, 1, 2, *overrides)


def one_process(run: TrainingRun) -> VersionTrainer:
    return VersionTrainer(run.config(), Trainer.of(run.config()))


def processes_of(ranks: Ranks) -> list[psutil.Process]:
    """Return supervisor, torchrun and ranks, in this order, as far as they are alive."""
    assert ranks._host
    try:
        supervisor = psutil.Process(ranks._host._torchrun.pid)
        return [supervisor, *supervisor.children(recursive=True)]
    except psutil.Error:
        return []


MESHES = scaled([(1, 2), (1, 1), (2, 1)], [(1, 2), (1, 1), (2, 1), (2, 2), (1, 2), (1, 4), (1, 1), (4, 1)])
"""Replicate and shard of one update after the other."""


def test_another_mesh_goes_on(tmp_path: Path) -> None:
    """Two shards, then one process, then copies: as one process up to rounding, with whole checkpoints in parts."""
    model = save_tiny(tmp_path / "policy")
    (model / "generation_config.json").write_text('{"eos_token_id": [3, 4], "repetition_penalty": 1.05}')
    alone, mixed = (TrainingRun(tmp_path / name, len(MESHES), model) for name in ("alone", "mixed"))
    trainer = one_process(alone)
    for iteration, (replicate, shard) in enumerate(MESHES):
        alone.train(trainer, iteration)
        if replicate * shard == 1:
            mixed.train(one_process(mixed), iteration)
            continue
        with ranks_of(mixed, replicate, shard) as ranks:
            manifest = mixed.train(ranks, iteration)
            if iteration == len(MESHES) - 1:
                order = mixed.order(0)
                distance = DistanceOrder(mixed.policy(iteration + 1), mixed.policy(0), order.trajectories, order.scores)
                found = ranks.distance(distance)
        check_parts(manifest, replicate * shard)
        print(f"{replicate} x {shard}", largest_difference(mixed.tensors(iteration + 1), alone.tensors(iteration + 1)))
    last = len(MESHES)
    assert verify(mixed.store, [mixed.policy(last)], deep=True).findings == []
    assert largest_difference(mixed.tensors(last), alone.tensors(last)) < 1e-6
    assert generation(mixed, last) == generation(alone, last) == ([3, 4], 1.05)
    expected = one_process(mixed).distance(distance)
    assert found
    assert found == pytest.approx(expected, rel=1e-4)


def generation(run: TrainingRun, number: int) -> tuple[list[int], float]:
    """Return what a checkpoint says of generation, which no training changes."""
    opened = checkpoints.open_checkpoint(run.store, run.policy(number), run.folder / "cache")
    values = json.loads((opened.model / "generation_config.json").read_text())
    return values["eos_token_id"], values["repetition_penalty"]


def check_parts(manifest: Manifest, ranks: int) -> None:
    """Check that each rank has written its share."""
    parts = {file.name for file in manifest.files if "-of-" in file.name}
    stems = ("model/model", "state/optimizer", "state/critic", "state/reference")
    numbers = range(1, ranks + 1)
    assert parts == {f"{stem}-{number:05d}-of-{ranks:05d}.safetensors" for stem in stems for number in numbers}
    sizes = [file.bytes for file in manifest.files if "state/optimizer-" in file.name]
    assert max(sizes) < 1.2 * sum(sizes) / ranks


VICTIMS = ("rank 1", "rank 1 stops", "torchrun", "rank 0 stops", "rank 0", "supervisor")
PROCESSES = ("supervisor", "torchrun", "rank 0", "rank 1")
KILLS = scaled(1, 30)


def strike(processes: list[psutil.Process], victim: str, after_s: float, kills: Counter[str]) -> threading.Thread:
    """Kill or stop a process of the ranks after a while, in a thread, and count it."""
    target = dict(zip(PROCESSES, processes, strict=True))[victim.removesuffix(" stops")]
    number = signal.SIGSTOP if victim.endswith("stops") else signal.SIGKILL

    def blow() -> None:
        with suppress(psutil.NoSuchProcess):  # an earlier blow came late, and has ended it
            target.send_signal(number)
            kills[victim] += 1

    thread = threading.Timer(after_s, blow)
    thread.start()
    return thread


def test_killed_ranks_start_again(tmp_path: Path) -> None:
    """Whatever is killed or stopped at whatever moment: all ranks start again, and no bit is other than without it."""
    dice, kills = random.Random(3), Counter[str]()
    disturbed, quiet = (TrainingRun(tmp_path / name, KILLS + 1) for name in ("disturbed", "quiet"))
    with two_ranks(disturbed, f"trainer.max_restarts={KILLS}", "trainer.timeout_s=5") as ranks:
        disturbed.train(ranks, 0)
        for iteration in range(1, KILLS + 1):
            before, victim = processes_of(ranks), VICTIMS[(iteration - 1) % len(VICTIMS)]
            moment = scaled(0.0, dice.uniform(0, 0.4))
            blow = strike(before, victim, moment, kills) if len(before) == len(PROCESSES) else None
            disturbed.train(ranks, iteration)
            if blow is None:
                continue  # the last blow came after its update, and this one began with a new start
            blow.join()
        restarts, last = ranks._restarts, processes_of(ranks)
    assert psutil.wait_procs([*before, *last], timeout=20)[1] == []
    assert disturbed.committed() == [*range(KILLS + 2)]
    with two_ranks(quiet) as ranks:
        for iteration in range(KILLS + 1):
            quiet.train(ranks, iteration)
    assert largest_difference(disturbed.tensors(KILLS + 1), quiet.tensors(KILLS + 1)) == 0
    assert restarts >= scaled(1, 20)  # some moments are after the update
    print(f"{restarts} restarts after {kills.total()} kills and stops: {dict(kills)}")


def test_a_stopped_trainer_of_one_rank_starts_again(tmp_path: Path) -> None:
    """No other rank waits for it, so the flow looks after it."""
    run = TrainingRun(tmp_path, 2)
    with ranks_of(run, 1, 1, "trainer.max_restarts=1", "trainer.timeout_s=5") as ranks:
        run.train(ranks, 0)
        processes_of(ranks)[-1].suspend()
        run.train(ranks, 1)
        assert ranks._restarts == 1
    assert run.committed() == [0, 1, 2]


def check_disagreements(folder: Path) -> None:
    """Let the second rank differ from the first in one thing after the other; both must name it."""
    run = TrainingRun.reopened(folder)
    config = run.config("trainer.launcher=torchrun", "ppo.parallel.shard=2")
    second = dist.get_rank() == 1
    other = run.config("trainer.launcher=torchrun", "ppo.parallel.replicate=2")
    with pytest.raises(ValueError, match="started with another configuration.*rank 1"):
        agree(other if second else config, "cpu")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tasks.train.ranks.agreement.code_version", lambda: "other" if second else "this")
        with pytest.raises(ValueError, match=r"rank 1 has code other, rank 0 has code this"):
            agree(config, "cpu")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manifests, "committed", lambda *_: not second)
        with pytest.raises(ValueError, match=r"without the flow's store: rank 1 .* a store that every host reaches"):
            agree(config, "cpu")
    with pytest.raises(ValueError, match=r"2 ranks were started, but .* needs 4: start as many"):
        Mesh.of(Parallel(shard=4), "cpu", config.trainer)
    assert agree(config, "cpu") == config


def test_ranks_that_do_not_fit_together_are_named(tmp_path: Path) -> None:
    """Knobs, store, code and number of ranks are compared at the start, and all ranks raise the same error."""
    TrainingRun(tmp_path / "run", 0)
    run_ranks(2, check_disagreements, tmp_path / "run", log=tmp_path / "log")


def check_caches(folder: Path, root: str) -> None:
    """Train with two ranks as if each had a host, with caches that may keep nothing but what is in use."""
    run, rank = TrainingRun.reopened(folder, root), dist.get_rank()
    cache = folder / f"cache-{rank}"
    hosts = ["trainer.hosts=2", "trainer.address=10.0.0.1:29500", "trainer.launcher=torchrun"]
    config = run.config(*hosts, "ppo.parallel.replicate=2", f"storage.cache={cache}", "storage.cache_gib=1e-9")
    mesh = Mesh.of(config.ppo.parallel, "cpu", config.trainer)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("storage.versions.fetch.RECENT_S", -60.0)
        VersionTrainer(config, Trainer.of(config, mesh), mesh).update(run.order(0), print, "nonce")
    assert [*(cache / run.policy(0)).rglob("*.safetensors")]
    assert [*(cache / run.policy(1)).rglob("*.safetensors")]
    data_is_left = bool([*(cache / run.order(0).trajectories).rglob("*.parquet")])
    assert data_is_left == (rank == 0)


def test_caches_of_other_hosts_are_trimmed(tmp_path: Path, bucket: str) -> None:
    """The flow trims that of its own host, the first rank of each other host trims that one's."""
    run = TrainingRun(tmp_path / "run", 1, root=f"s3://{bucket}/store")
    run_ranks(2, check_caches, run.folder, run.root, log=tmp_path / "log")


def test_an_address_that_cannot_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A taken port, a name that does not resolve and another host's address end the flow, with the reason."""
    monkeypatch.setattr("tasks.train.ranks.host._PORT_S", 0.5)
    run = TrainingRun(tmp_path, 1)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for address, reason in (
            (f"127.0.0.1:{port}", "Address already in use.*a port that is free"),
            (f"127.0.0.2:{port}", "Address already in use"),  # the first rank listens everywhere
            ("no-such-host.invalid:29500", "does not resolve here"),
            ("192.0.2.1:29500", "must be an address of this host"),
        ):
            with two_ranks(run, f"trainer.address={address}") as ranks, pytest.raises(ValueError, match=reason):
                run.train(ranks, 0)


@pytest.mark.parametrize("fails", [False, True])
def test_a_rank_needs_four_variables_to_find_the_others(tmp_path: Path, fails: bool) -> None:
    """Without torchrun: as Slurm or Ray would start it on another host, which is this one here.

    Its exit status says whether the flow has ended well, so whatever has started it knows whether to start it again.
    """
    run, port = TrainingRun(tmp_path, 1), free_port()
    settings = ["trainer.launcher=torchrun", "trainer.hosts=2", f"trainer.address=127.0.0.1:{port}"]
    config = run.config(*settings, "ppo.parallel.shard=2", "trainer.startup_timeout_s=100")
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    place = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port}"}
    program = ["-m", "tasks.train.ranks.rank", f"{tmp_path}/config.yaml", "--rank-logs", f"{tmp_path}/other"]
    second = subprocess.Popen([sys.executable, *program], env=os.environ | place, cwd=ROOT)
    ends = pytest.raises(InterruptedError) if fails else nullcontext()
    try:
        with ends, Ranks(config, tmp_path / "logs") as ranks:
            run.train(ranks, 0)
            if fails:
                raise InterruptedError
        assert second.wait(30) == int(fails)
    finally:
        second.kill()
        second.wait()
    assert run.committed() == [0, 1]


def test_an_error_of_a_rank_reaches_the_flow(tmp_path: Path) -> None:
    """The flow raises the first rank's error with its type, names the rank and the logs; the ranks have ended.

    The file is damaged that only one of them verifies.
    """
    run = TrainingRun(tmp_path, 1)
    damaged = next(Path(run.store.path(run.policy(0))).rglob("model.safetensors"))
    damaged.write_bytes(b"nothing")
    with two_ranks(run) as ranks:
        with pytest.raises(StorageError, match=r"rank \d failed: .* its manifest says") as caught:
            run.train(ranks, 0)
        assert str(run.folder / "logs/attempt-1") in caught.value.__notes__[0]
        assert ranks._host is None
    logs = {path.name for path in (run.folder / "logs/attempt-1").iterdir()}
    assert logs >= {"rank-00000.log", "rank-00001.log", "torchrun.log"}


def test_a_lost_rank_is_named(tmp_path: Path, bucket: str) -> None:
    """Without restarts the flow ends: it says which rank ended first, and how. What was committed, on S3, is whole.

    No other host could have reached a process of the trainer.
    """
    run = TrainingRun(tmp_path, 2, root=f"s3://{bucket}/store")
    with two_ranks(run) as ranks:
        run.train(ranks, 0)
        *others, second = processes_of(ranks)
        connections = [each for process in (*others, second) for each in process.net_connections()]
        assert {each.laddr.ip for each in connections if each.status == psutil.CONN_LISTEN} == {"127.0.0.1"}
        second.kill()
        with pytest.raises(RanksLostError, match=r"first to end was rank 1, with exit code -9.*last checkpoint"):
            run.train(ranks, 1)
    assert run.committed() == [0, 1]
    assert verify(run.store, [run.policy(1)], deep=True).findings == []
