"""The training pass of large models on a GPU: tokens/s, MFU and peak memory. The models are random; nothing is loaded.

On a machine without a GPU it says so. `python -m tests.benchmarks gpu` ends with status 0 there, too.
"""

import gc
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any

from configs.score import Reward
from configs.train import PPO, Optimizer
from tests.benchmarks.fixtures import Lab
from tests.benchmarks.result import Row, spread
from tests.support.train_helpers import random_rows

if TYPE_CHECKING:
    from tasks.train.trainer import Trainer

GOAL = 0.4
WARM_UP, ROUNDS = 1, 3
OPTIMIZER = Optimizer(lr=1e-6, eps=1e-8)
PEAK_TFLOPS = {"H200": 989.0, "H100 PCIe": 756.0, "H100 NVL": 835.0, "H100": 989.0, "A100": 312.0, "L40S": 362.0}
"""Peak of dense bfloat16 products by a part of the device's name, the first that fits. Source: NVIDIA's data sheets."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The shape of a Qwen2 model, and of the trajectories that it is trained on."""

    name: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    vocabulary: int
    tied: bool
    trajectories: int = 64  # in groups of 4
    longest: int = 1024  # tokens of a turn; a trajectory has one or two
    ppo: dict[str, Any] = field(default_factory=lambda: {"autocast": "bfloat16", "gradient_checkpointing": True})

    @property
    def matrix_parameters(self) -> int:
        """Parameters of matrices in a pass over a token: without embeddings, which are read but not multiplied."""
        head = self.hidden // self.heads
        attention = 2 * self.hidden * head * (self.heads + self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.intermediate) + self.hidden * self.vocabulary


SHAPES = (
    Shape("Qwen2.5-1.5B", 28, 1536, 8960, 12, 2, 151936, tied=True),
    Shape("Qwen2.5-7B", 28, 3584, 18944, 28, 4, 152064, tied=False),
)
"""The numbers in the config.json of these models."""


def measure(_: Lab) -> list[Row]:
    """Time updates of each of `SHAPES`, or say that there is no GPU."""
    import torch

    if not torch.cuda.is_available():
        return [Row("gpu", "no GPU on this machine: nothing was measured")]
    return [_row(shape) for shape in SHAPES]


def _row(shape: Shape) -> Row:
    import torch

    name, total = torch.cuda.get_device_name(), torch.cuda.get_device_properties(0).total_memory
    torch.cuda.reset_peak_memory_stats()
    try:
        runs = measure_shape(shape)
    except torch.cuda.OutOfMemoryError:
        return Row(f"training pass, {shape.name}", "does not fit", detail=f"{name}, {total / 2**30:.0f} GiB")
    gc.collect()
    peak, tflops = torch.cuda.max_memory_allocated(), peak_tflops(name)
    torch.cuda.empty_cache()
    shares = [mfu(run.flops, run.seconds, tflops) for run in runs] if tflops else []
    return Row(
        benchmark=f"training pass, {shape.name}",
        measured=f"MFU {spread(shares, '{:.2f}'.format)}" if shares else "MFU unknown: no peak for this device",
        goal=f"{GOAL} or more",
        met=median(shares) >= GOAL if shares else None,
        detail=f"{name}: {median(run.tokens / run.seconds for run in runs):.0f} tokens/s in the update pass, "
        f"{median(run.tokens / run.whole for run in runs):.0f} in the whole update, {peak / 2**30:.1f} GiB at most",
    )


@dataclass(frozen=True, slots=True)
class Run:
    """One update: its tokens, the FLOPs of its training pass, and its seconds."""

    tokens: float
    flops: float
    seconds: float  # the training pass
    whole: float  # with the preparation


def measure_shape(shape: Shape, device: str = "cuda") -> list[Run]:
    """Update a random model of this shape on random trajectories."""
    rows, scores = random_rows(problems=shape.trajectories // 4, vocabulary=shape.vocabulary, longest=shape.longest)
    lengths, trainer = [len(row.token_ids) for row in rows], _trainer(shape, device)
    runs = []
    for _ in range(WARM_UP + ROUNDS):
        metrics = trainer.update(rows, scores, version=2)
        seconds = metrics["seconds/update"]
        runs.append(
            Run(metrics["tokens/all"], training_flops(shape, lengths), seconds, seconds + metrics["seconds/prepare"])
        )
    return runs[WARM_UP:]


def training_flops(shape: Shape, lengths: list[int]) -> float:
    """Compute the FLOPs of forward and backward pass over sequences of these lengths.

    6 for each parameter of a matrix and token, and for causal attention 12 * layers * hidden * T * T / 2. The head is
    counted for all tokens, and what gradient checkpointing computes again does not count, as in the literature.
    Source: PaLM (arXiv 2204.02311, appendix B), with half of its attention, since a causal one needs no more.
    """
    attention = 12 * shape.layers * shape.hidden
    return sum(6.0 * shape.matrix_parameters * length + attention * length * length / 2 for length in lengths)


def mfu(flops: float, seconds: float, tflops: float) -> float:
    """Compute the model FLOPs utilisation: FLOPs per second as a share of the device's peak."""
    return flops / seconds / (tflops * 1e12)


def peak_tflops(device: str) -> float | None:
    """Return the device's peak in `PEAK_TFLOPS`, or None for an unknown device."""
    return next((tflops for part, tflops in PEAK_TFLOPS.items() if part in device), None)


def _trainer(shape: Shape, device: str) -> "Trainer":
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from tasks.train.mesh import ALONE
    from tasks.train.policy import set_up
    from tasks.train.train_state import TrainState, make_adamw
    from tasks.train.trainer import Trainer

    config = Qwen2Config(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        tie_word_embeddings=shape.tied,
    )
    knobs = PPO.model_validate({"device": device, "ppo_n_minibatches": 1, **shape.ppo})
    trainer = Trainer(knobs, OPTIMIZER, Reward())
    with torch.random.fork_rng(), torch.device(device):
        torch.manual_seed(0)
        model = set_up(Qwen2ForCausalLM(config), knobs)
    trainer._loaded = TrainState(  # without files: 7 billion parameters are 30 GB
        ppo=knobs,
        model=model,
        critic=None,
        reference=None,
        adamw=make_adamw([(OPTIMIZER.lr, model.parameters())], OPTIMIZER),
        mesh=ALONE,
        generator=torch.Generator().manual_seed(0),
        steps=0,
        kl_ctl=0.0,
    )
    return trainer
