"""The trainer as Ray actors on this host: checkpoints in parts, other meshes, errors, losses and restarts."""

import json
import logging
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock

import psutil
import pytest
import torch.distributed as dist

from storage.errors import StorageError
from storage.maintenance.verify import verify
from storage.versions import checkpoints
from storage.versions.manifests import Manifest
from tasks.cluster.connection import connected
from tasks.cluster.placement import Node, PlacementError, check_ranks
from tasks.train.mesh import Mesh
from tasks.train.orders import DistanceOrder, RanksLostError
from tasks.train.version_trainer import VersionTrainer
from tests.support import s3_server as s3
from tests.support.rank_processes import run_ranks
from tests.support.soak import scaled
from tests.support.train_helpers import save_tiny
from tests.support.training_run import TrainingRun, largest_difference

if TYPE_CHECKING:
    from tasks.cluster.trainer import RayTrainer

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def s3_bucket(tmp_path_factory: pytest.TempPathFactory, s3_server: str) -> Iterator[str]:
    """Start Ray once for all tests of this file, with credentials of a bucket, and yield the bucket's name."""
    run = TrainingRun(tmp_path_factory.mktemp("ray"), 0)
    with pytest.MonkeyPatch.context() as environment:
        made = s3.make_bucket(s3_server, environment)
        with connected(run.config("train.parallel={replicate: 2, shard: 2}")):
            yield made


def ranks_of(run: TrainingRun, replicate: int, shard: int, *overrides: str) -> "RayTrainer":
    from tasks.cluster.trainer import RayTrainer

    config = run.config(f"train.parallel={{replicate: {replicate}, shard: {shard}}}", "run.overlap=true", *overrides)
    return RayTrainer(config, logging.getLogger(__name__).info)


def processes_of(ranks: "RayTrainer") -> list[psutil.Process]:
    """Return the processes of the ranks that have started, in their order."""
    import ray

    return [psutil.Process(ray.get(rank.__ray_call__.remote(lambda _: os.getpid()))) for rank in ranks._ranks]


MESHES = scaled([(1, 2), (1, 1), (2, 1)], [(1, 2), (1, 1), (2, 1), (2, 2), (1, 2), (1, 4), (1, 1), (4, 1)])
"""Replicate and shard of one update after the other."""


@pytest.mark.long
def test_another_mesh_goes_on(tmp_path: Path) -> None:
    """Two shards, then one process, then copies: as one process up to rounding, with whole checkpoints in parts."""
    model = save_tiny(tmp_path / "policy")
    (model / "generation_config.json").write_text('{"eos_token_id": [3, 4], "repetition_penalty": 1.05}')
    alone, mixed = (TrainingRun(tmp_path / name, len(MESHES), model) for name in ("alone", "mixed"))
    trainer = VersionTrainer(alone.config())
    for iteration, (replicate, shard) in enumerate(MESHES):
        alone.train(trainer, iteration)
        if replicate * shard == 1:
            mixed.train(VersionTrainer(mixed.config()), iteration)
            continue
        with ranks_of(mixed, replicate, shard) as ranks:
            manifest, last = mixed.train(ranks, iteration), mixed.policy(iteration + 1)
            order = mixed.order(0)
            distance = DistanceOrder(last, mixed.policy(0), order.parts[0].trajectories, order.parts[0].scores)
            found = ranks.distance(distance)
        check_parts(manifest, replicate * shard)
        print(f"{replicate} x {shard}", largest_difference(mixed.tensors(iteration + 1), alone.tensors(iteration + 1)))
    assert verify(mixed.store, [last], deep=True).findings == []
    assert largest_difference(mixed.tensors(len(MESHES)), alone.tensors(len(MESHES))) < 1e-6
    assert generation(mixed, len(MESHES)) == generation(alone, len(MESHES)) == ([3, 4], 1.05)
    expected = VersionTrainer(mixed.config()).distance(distance)
    assert found == pytest.approx(expected, rel=1e-4)
    assert expected


def generation(run: TrainingRun, number: int) -> tuple[list[int], float]:
    """Return what a checkpoint says of generation, which no training changes."""
    opened = checkpoints.open_checkpoint(run.store, run.policy(number), run.folder / "cache")
    values = json.loads((opened.model / "generation_config.json").read_text())
    return values["eos_token_id"], values["repetition_penalty"]


def check_parts(manifest: Manifest, ranks: int) -> None:
    """Check that each rank has written its share."""
    parts = [file.name for file in manifest.files if "-of-" in file.name]
    stems, places = ("model/model", "state/critic", "state/optimizer", "state/reference"), range(1, ranks + 1)
    assert sorted(parts) == [f"{stem}-{each:05d}-of-{ranks:05d}.safetensors" for stem in stems for each in places]
    sizes = [file.bytes for file in manifest.files if "state/optimizer-" in file.name]
    assert max(sizes) < 1.2 * sum(sizes) / ranks


OF_TIME = ("time/", "tokens/trained_per")


def test_one_rank_makes_the_bits_of_this_process(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The trainer of a stream is one actor: files and metrics are the same; progress and alarms arrive once."""
    model, logged, found = save_tiny(tmp_path / "policy"), dict[str, list[str]](), {}
    runs = {name: TrainingRun(tmp_path / name, 2, model, data={"grades": 1}) for name in ("here", "apart")}
    with ranks_of(runs["apart"], 1, 1) as apart:
        here = VersionTrainer(runs["here"].config())
        for name, trainer in (("here", here), ("apart", apart)):
            caplog.clear()
            made = [runs[name].train(trainer, iteration, logged.setdefault(name, [])) for iteration in range(2)]
            assert caplog.text.count("ALARM: not one of 16 trajectories has a right turn") == 2
            files = {file.name: file.sha256 for manifest in made for file in manifest.files}
            metrics = [{k: v for k, v in each.metrics.items() if not k.startswith(OF_TIME)} for each in made]
            found[name] = files, metrics
    assert found["here"] == found["apart"]
    steps = {name: [re.sub(" in .* s$", "", line) for line in lines] for name, lines in logged.items()}
    assert steps["apart"][1:] == steps["here"] != []
    assert re.match(r"1 rank\(s\) on 1 node\(s\) are ready", steps["apart"][0])


@pytest.mark.long
@pytest.mark.parametrize("blow", scaled([signal.SIGKILL], [signal.SIGKILL, signal.SIGSTOP]))
def test_a_lost_rank_ends_the_flow_and_the_next_one_makes_the_same_bits(
    tmp_path: Path, s3_bucket: str, blow: signal.Signals
) -> None:
    """A rank is killed or stopped: the error says what to do, no process stays, and no bit is other than without it.

    No other host could have reached a process of the trainer. What was committed, on S3, is whole.
    """
    disturbed, quiet = (TrainingRun(tmp_path / n, 2, root=f"s3://{s3_bucket}/{tmp_path.name}-{n}") for n in ("a", "b"))
    with ranks_of(quiet, 1, 2) as ranks:
        for iteration in range(2):
            quiet.train(ranks, iteration)
        connections = [each for process in processes_of(ranks) for each in process.net_connections()]
        listening = {each.laddr.ip.removeprefix("::ffff:") for each in connections if each.status == psutil.CONN_LISTEN}
        assert listening == {"127.0.0.1"}
    with ranks_of(disturbed, 1, 2, "train.timeout_s=5") as ranks:
        disturbed.train(ranks, 0)
        processes = processes_of(ranks)
        processes[1].send_signal(blow)
        with pytest.raises(RanksLostError, match="the last checkpoint"):
            disturbed.train(ranks, 1)
    assert psutil.wait_procs(processes, timeout=20)[1] == []
    with ranks_of(disturbed, 1, 2) as ranks:
        disturbed.train(ranks, 1)
    assert disturbed.committed() == [0, 1, 2]
    assert verify(quiet.store, [quiet.policy(2)], deep=True).findings == []
    assert largest_difference(disturbed.tensors(2), quiet.tensors(2)) == 0


def test_an_error_of_a_rank_reaches_the_flow(tmp_path: Path) -> None:
    """The flow raises the error of the rank that failed by itself, with its type, and keeps the logs of all.

    The file is damaged that only one of them verifies; the other one waits for it.
    """
    run = TrainingRun(tmp_path, 1)
    damaged = next(Path(run.store.path(run.policy(0))).rglob("model.safetensors"))
    damaged.write_bytes(b"nothing")
    with pytest.raises(StorageError, match=r"rank \d failed: .* its manifest says") as caught, ranks_of(run, 1, 2) as r:
        run.train(r, 0)
    assert re.search(r"trainer/rank-0000\d.log", "".join(caught.value.__notes__))
    kept = {item.path.rpartition("/")[2] for item in run.store.walk("runs/smoke/logs")}
    assert kept >= {"cause.txt", "rank-00000.log", "rank-00001.log"}


def test_the_first_cause_is_the_error_of_a_rank_and_not_that_others_lose_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error that others only noticed does not count."""
    import ray
    from ray.exceptions import ActorDiedError, RayTaskError

    from tasks.cluster import trainer

    errors = RanksLostError("rank 0 lost another one"), ValueError("no such option")
    lost, own = (RayTaskError("update", "the traceback", error) for error in errors)
    monkeypatch.setattr(ray, "wait", Mock())
    made = trainer.RayTrainer.__new__(trainer.RayTrainer)
    made._ranks = [object()] * 2
    cases: list[tuple[list[Any], type[Exception], str]] = [
        ([lost, own], ValueError, "rank 1 failed: no such option"),
        ([lost, ActorDiedError()], RanksLostError, "rank 1 has ended"),
        ([lost, lost], RanksLostError, "rank 0 lost another one"),
    ]
    for answers, kind, text in cases:
        monkeypatch.setattr(ray, "get", Mock(side_effect=answers))
        cause = made._first_cause(answers)
        assert isinstance(cause, kind)
        assert str(cause).startswith(text)


def test_what_cannot_work_is_refused(tmp_path: Path) -> None:
    """Ranks whose libraries differ, and ranks for which there is no room."""
    from tasks.cluster.trainer import _refuse_different

    with pytest.raises(ValueError, match="rank 1 has torch 2.1, rank 0 has 2.0: install the same everywhere"):
        _refuse_different([{"torch": "2.0"}, {"torch": "2.1"}])
    nodes = [Node("a", "first", cpus=3.0, gpus=2.0), Node("b", "second", cpus=8.0, gpus=1.0)]
    check_ranks(nodes, 3, 1.0, 1.0)
    with pytest.raises(PlacementError, match=r"1 GPU\(s\) for each of 4 rank\(s\), but .* second with 8 cores"):
        check_ranks(nodes, 4, 1.0, 1.0)


def check_caches(folder: Path, root: str) -> None:
    """Train with two ranks as if each had a node, with caches that may keep nothing but what is in use."""
    run, rank = TrainingRun.reopened(folder, root=root), dist.get_rank()
    cache = folder / f"cache-{rank}"
    config = run.config("train.parallel.replicate=2", f"storage.cache={cache}", "storage.cache_gib=1e-9")
    mesh = Mesh.of(config.train.parallel, "cpu", 60, ["a", "b"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("storage.versions.fetch.RECENT_S", -60.0)
        trainer = VersionTrainer(config, mesh, hands_over=False)
        trainer.update(run.order(0), print, "nonce")
        trainer.write()
    assert [*(cache / run.policy(0)).rglob("*.safetensors")]
    assert [*(cache / run.policy(1)).rglob("*.safetensors")]
    assert not [*(cache / run.order(0).parts[0].trajectories).rglob("*.parquet")]


@pytest.mark.long
def test_each_node_fetches_and_trims_its_cache(tmp_path: Path, s3_bucket: str) -> None:
    run = TrainingRun(tmp_path / "run", 1, root=f"s3://{s3_bucket}/{tmp_path.name}")
    run_ranks(2, check_caches, run.folder, run.root, log=tmp_path / "log")
