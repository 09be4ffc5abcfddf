"""A trainer of several ranks: its overhead, its speed and its memory, with a model of 30 million parameters.

Everything runs on the same cores, one after the other, so ratios are those of this machine.
"""

import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from tests.benchmarks.fixtures import Lab
from tests.benchmarks.result import Row, peak_memory_mb, spread

if TYPE_CHECKING:
    from tasks.cluster.trainer import RayTrainer
    from tasks.train.orders import OrderedTrainer
    from tests.support.training_run import TrainingRun

WARM_UP, ROUNDS = 1, 8
MESHES = {
    "own process": ["train.threads=2", "run.overlap=true"],
    "two copies": ["train.parallel.replicate=2", "train.threads=1"],
    "two shards": ["train.parallel.shard=2", "train.threads=1"],
}
SHARDS = (1, 2, 4)
OPTIONS = ["rollout.max_head_offpolicyness=99", "optimizer.lr=1e-5", "optimizer.eps=1e-8", "train.minibatches=1"]
DATA = {"problems": 16, "samples": 8, "vocabulary": 8192, "longest": 40}


def measure(lab: Lab) -> list[Row]:
    """Train the same iterations in one process and on each mesh, in turns."""
    model = _model(lab.scratch / "30m")
    return [*_speed_rows(lab.scratch / "speed", model), *_memory_rows(lab.scratch / "memory", model)]


def _model(folder: Path) -> Path:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, "vocab_size": 8192}
    config = Qwen3Config(**sizes, num_attention_heads=8, num_key_value_heads=4, head_dim=64, tie_word_embeddings=False)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


def _speed_rows(folder: Path, model: Path) -> list[Row]:
    from tasks.cluster.connection import connected
    from tasks.train.version_trainer import VersionTrainer
    from tests.support.training_run import TrainingRun

    names = ["one process", *MESHES]
    runs = {name: TrainingRun(folder / name, WARM_UP + ROUNDS, model, OPTIONS, data=DATA) for name in names}
    config = runs["one process"].config("train.threads=2")
    seconds: dict[str, list[float]] = {name: [] for name in names}  # of preparation and training
    with ExitStack() as stack:
        stack.enter_context(connected(runs["one process"].config("train.parallel={replicate: 2, shard: 3}")))
        trainers: dict[str, OrderedTrainer] = {"one process": VersionTrainer(config)}
        trainers |= {name: stack.enter_context(_ranks(runs[name], *settings)) for name, settings in MESHES.items()}
        for iteration in range(WARM_UP + ROUNDS):
            for name, trainer in trainers.items():
                metrics = runs[name].train(trainer, iteration).metrics
                seconds[name].append(metrics["time/update"] + metrics["time/prepare"])
    return [
        _row(seconds, "own process", "one process", "training: one rank in Ray / in the flow's process"),
        _row(seconds, "one process", "two copies", "training: one process with two threads / two copies with one"),
        _row(seconds, "one process", "two shards", "training: one process with two threads / two shards with one"),
    ]


def _row(seconds: dict[str, list[float]], dividend: str, divisor: str, benchmark: str) -> Row:
    ours, theirs = (seconds[name][WARM_UP:] for name in (dividend, divisor))
    ratios = [one / other for one, other in zip(ours, theirs, strict=True)]
    detail = f"training {median(ours):.2f} s / {median(theirs):.2f} s; {len(ratios)} pairs"
    return Row(benchmark, spread(ratios, "{:.3f}".format), detail)


def _memory_rows(folder: Path, model: Path) -> Iterator[Row]:
    import ray

    from tasks.cluster.connection import connected
    from tests.support.training_run import TrainingRun

    for shard in SHARDS:
        run = TrainingRun(folder / str(shard), 2, model, OPTIONS, data=DATA)
        settings = [f"train.parallel.shard={shard}", "train.threads=1", "run.overlap=true"]
        with connected(run.config(*settings)), _ranks(run, *settings) as ranks:
            for iteration in range(2):
                run.train(ranks, iteration)
            peaks = [peak_memory_mb(ray.get(rank.__ray_call__.remote(lambda _: os.getpid()))) for rank in ranks._ranks]
        yield Row(f"peak memory of a rank, {shard} shards", f"{max(peaks):.0f} MB", detail="libraries included")


def _ranks(run: "TrainingRun", *settings: str) -> "RayTrainer":
    from tasks.cluster.trainer import RayTrainer

    return RayTrainer(run.config(*settings), print)
