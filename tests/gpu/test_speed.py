"""The training pass of large models, which are random, on a GPU: tokens/s, MFU and peak memory."""

import math
from dataclasses import dataclass
from statistics import median
from typing import Any

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from configs import load
from configs.train import Optimizer
from tasks.train.mesh import ALONE
from tasks.train.optimizer import make_adamw
from tasks.train.policy import set_up
from tasks.train.train_state import TrainState
from tasks.train.trainer import Trainer
from tasks.warm_start.policy_sizes import policy_values
from tests.gpu.conftest import DEVICE, GPU, LIMIT_S, Measured
from tests.support.train_helpers import make_config, random_rows

WARM_UP, ROUNDS = 1, 2
OPTIMIZER = Optimizer(lr=1e-6, eps=1e-8)
TOKENS = 8192
"""In a pass: as many as fit without checkpointing."""
PEAK_TFLOPS = {"H200": 989.0, "H100 PCIe": 756.0, "H100 NVL": 835.0, "H100": 989.0, "A100": 312.0, "L40S": 362.0}
"""Peak of dense bfloat16 products by a part of the device's name, the first that fits. Source: NVIDIA's data sheets."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The shape of a Qwen2 model, and of the trajectories that it is trained on."""

    model: Qwen2Config
    trajectories: int = 64  # in groups of 4
    longest: int = 1024  # tokens of a turn; a trajectory has one or two

    @property
    def matrix_parameters(self) -> int:
        """Parameters of matrices in a pass over a token: without embeddings, which are read but not multiplied."""
        sizes: Any = self.model
        width, heads, pairs = sizes.hidden_size, sizes.num_attention_heads, sizes.num_key_value_heads
        attention = 2 * width * (width // heads) * (heads + pairs)
        of_layer = attention + 3 * width * sizes.intermediate_size
        return int(sizes.num_hidden_layers * of_layer + width * sizes.vocab_size)


SHAPES = {
    name: Shape(Qwen2Config(**policy_values(load("smoke", [f"policy.path=Qwen/{name}-Instruct"]))))
    for name in ("Qwen2.5-1.5B", "Qwen2.5-7B")
}
SIZES: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 50}
TINY = Shape(Qwen2Config(**SIZES, num_attention_heads=4, num_key_value_heads=2), trajectories=8, longest=9)


@pytest.mark.long
@pytest.mark.timeout(LIMIT_S)
@pytest.mark.parametrize("checkpointing", [True, False], ids=["checkpointing", "no checkpointing"])
@pytest.mark.parametrize("shape", SHAPES)
def test_training_pass(shape: str, checkpointing: bool, measured: Measured) -> None:
    """Time updates with bfloat16 autocast."""
    half = {"autocast": "bfloat16", "micro_batch_tokens": TOKENS, "gradient_checkpointing": checkpointing}
    chosen = SHAPES[shape] if GPU else TINY
    if GPU:
        torch.cuda.reset_peak_memory_stats()
    try:
        runs = timed_updates(chosen, make_random_trainer(chosen, **half))
    except torch.OutOfMemoryError as error:
        pytest.skip(f"does not fit: {error}")
    numbers = {"tokens/s": median(run.tokens / run.seconds for run in runs)}
    numbers["tokens/s of the whole update"] = median(run.tokens / run.whole for run in runs)
    if GPU:
        tflops = next((peak for part, peak in PEAK_TFLOPS.items() if part in torch.cuda.get_device_name()), math.nan)
        numbers["MFU"] = median(run.flops / run.seconds / (tflops * 1e12) for run in runs)
        numbers["peak GiB"] = torch.cuda.max_memory_allocated() / 2**30
    measured(numbers)


@dataclass(frozen=True, slots=True)
class Run:
    """One update: its tokens, the FLOPs of its training pass, and its seconds."""

    tokens: float
    flops: float
    seconds: float  # the training pass
    whole: float  # with the preparation


def timed_updates(shape: Shape, trainer: Trainer) -> list[Run]:
    """Update a trainer on random trajectories of this shape, after a round of warm-up."""
    rows, scores = random_rows(shape.trajectories // 4, vocabulary=shape.model.vocab_size, longest=shape.longest)
    lengths, runs = [len(row.token_ids) for row in rows], []
    for _ in range(WARM_UP + ROUNDS):
        metrics = trainer.update(rows, scores, version=2)
        seconds = metrics["time/update"]
        runs.append(
            Run(metrics["tokens/trained"], training_flops(shape, lengths), seconds, seconds + metrics["time/prepare"])
        )
    return runs[WARM_UP:]


def training_flops(shape: Shape, lengths: list[int]) -> float:
    """Compute the FLOPs of forward and backward pass over sequences of these lengths.

    6 for each parameter of a matrix and token, and for causal attention 12 * layers * hidden * T * T / 2. The head is
    counted for all tokens, and what gradient checkpointing computes again does not count, as in the literature.
    Source: PaLM (arXiv 2204.02311, appendix B), with half of its attention, since a causal one needs no more.
    """
    attention = 12 * shape.model.num_hidden_layers * shape.model.hidden_size
    return sum(6.0 * shape.matrix_parameters * length + attention * length * length / 2 for length in lengths)


def make_random_trainer(shape: Shape, **train: Any) -> Trainer:
    """Make a trainer of a random model."""
    run = make_config(optimizer=OPTIMIZER, advantage={}, **train, device=DEVICE)
    with torch.random.fork_rng(), torch.device(DEVICE):
        torch.manual_seed(0)
        model = set_up(Qwen2ForCausalLM(shape.model), run.train)
    state = TrainState(  # without files: 7 billion parameters are 30 GB
        config=run,
        mesh=ALONE,
        model=model,
        critic=None,
        reference=None,
        adamw=make_adamw({"policy": model.parameters()}, OPTIMIZER),
        generator=torch.Generator().manual_seed(0),
        kl_ctl=0.0,
    )
    return Trainer(state)


def test_flops_by_hand() -> None:
    """A token costs 6 FLOPs for each parameter of a matrix; attention 12 * layers * hidden * T² / 2."""
    parameters = 2 * (2 * 32 * 8 * (4 + 2) + 3 * 32 * 64) + 32 * 50
    assert TINY.matrix_parameters == parameters == 20032
    assert training_flops(TINY, [10]) == 6 * 20032 * 10 + 12 * 2 * 32 * 10 * 10 / 2
    assert training_flops(TINY, [10, 10]) == 2 * training_flops(TINY, [10])
