"""Hand-made rows and tiny random models for the tests of `tasks.train`."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from configs import Config, load
from configs.algorithms import read_algorithm
from configs.policy import LoRA
from configs.train import Optimizer, Train
from storage.records import Score, Trajectory, Turn, pack_experts
from storage.versions.model_files import ADAPTER_FILES
from storage.versions.weights import load_model, make_adapter, save
from tasks.train.train_state import load_train_state
from tasks.train.trainer import Trainer

VOCABULARY = 50
EXPERTS, CHOSEN = 5, 2
"""Experts in each layer of a mixture, and how many of them a token goes to."""
SMALL = LoRA(rank=3, alpha=6)
UNCLIPPED = Optimizer(lr=1e-3, max_grad_norm=1e9)
GAE: dict[str, Any] = {"advantage": {"type": "gae", "gae_lambda": 0.9, "discount": 0.95, "normalisation": "none"}}
EVERYTHING: dict[str, Any] = {
    **GAE, "critic": {"model": "own"}, "kl": {"kl_ctl": 0.1, "adaptive": True, "reference": "ema"},
    "behaviour_weight": {"level": "sequence", "cap": 1.1}, "entropy_coefficient": 0.1, "mask_truncated": True,
}  # fmt: skip


_OTHERS: dict[str, Any] = dict.fromkeys(("prompt", "problem_set", "policy", "agent", "environment", "reason"), "")
_OTHERS |= dict.fromkeys(("sampling", "agent_args", "environment_args"), "{}") | {"run": "test", "status": "completed"}
_OTHERS |= dict.fromkeys(("iteration", "sample", "seed"), 0) | dict.fromkeys(("started_at", "latency_s"), 0.0)
_OTHERS |= {"turn_discount": 1.0, "unplayed_turns": -1}
"""Columns of hand-made rows that say nothing."""


def make_trajectory(
    name: str,
    turns: Sequence[Sequence[int]],
    *,
    problem: str = "p",
    logprob: float = -1.0,
    version: int = 0,
    finish_reason: str = "stop",
    **columns: Any,
) -> Trajectory:
    """Make a row: prompt 1 2 3, then the turns with feedback 4 5 in between; `finish_reason` is the last turn's."""
    ids, mask, spans = [1, 2, 3], [False] * 3, []
    for number, turn in enumerate(turns):
        if number:
            ids, mask = [*ids, 4, 5], [*mask, False, False]
        ended = finish_reason if number == len(turns) - 1 else "stop"
        spans.append(Turn(len(ids), len(ids) + len(turn), "", "wrong", 0.0, ended, "", 0.0, 0))
        ids, mask = [*ids, *turn], [*mask, *[True] * len(turn)]
    said = {"token_ids": ids, "action_mask": mask, "turns": spans, "solutions": [], "policy_version": version}
    said["logprobs"] = [logprob if sampled else 0.0 for sampled in mask]
    said["versions"] = [version if sampled else -1 for sampled in mask]
    return Trajectory(trajectory_id=name, problem_id=problem, **(_OTHERS | said | columns))


def make_scores(name: str, *successes: float) -> list[Score]:
    return [
        Score(name, turn, "correct" if success else "wrong", success, "", "", "", success)
        for turn, success in enumerate(successes)
    ]


def random_rows(
    problems: int = 4,
    samples: int = 4,
    seed: int = 0,
    vocabulary: int = VOCABULARY,
    longest: int = 9,
    grades: int = 2,
    newest: int = 2,
) -> tuple[list[Trajectory], list[Score]]:
    """Make trajectories of one or two turns of random tokens and logprobs, with a success of 0 to `grades` - 1.

    They are of policy versions up to `newest`, 2 at most.
    """
    draw = torch.Generator().manual_seed(seed)
    rows, scores = [], []
    for number in range(problems * samples):
        name = f"t{number:03d}"
        lengths = torch.randint(1, longest, (int(torch.randint(1, 3, (), generator=draw)),), generator=draw).tolist()
        turns = [torch.randint(6, vocabulary, (length,), generator=draw).tolist() for length in lengths]
        logprob = -3.5 - float(torch.rand((), generator=draw))
        version = min(number % 3, newest)
        rows.append(make_trajectory(name, turns, problem=f"p{number // samples}", logprob=logprob, version=version))
        scores += make_scores(name, *torch.randint(0, grades, (len(turns),), generator=draw).float().tolist())
    return rows, scores


def tiny_model(kind: str = "qwen3", tied: bool = False, seed: int = 0, **others: Any) -> PreTrainedModel:
    """Make a model of two layers of width 32, unless `others` has other sizes, with weights for different logits."""
    sizes: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "head_dim": 8}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"max_position_embeddings": 128, "initializer_range": 0.2, "tie_word_embeddings": tied}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        kinds = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config, "qwen3_moe": Qwen3MoeConfig}
        if kind == "qwen3_moe":
            sizes |= {"moe_intermediate_size": 16, "num_experts": EXPERTS, "num_experts_per_tok": CHOSEN}
        model = AutoModelForCausalLM.from_config(kinds[kind](**sizes | others))
    assert isinstance(model, PreTrainedModel)
    model.eval()
    return model


def save_tiny(folder: Path, kind: str = "qwen3", tied: bool = False) -> Path:
    tiny_model(kind, tied).save_pretrained(folder)
    return folder


def with_random_experts(row: Trajectory, seed: int = 0) -> Trajectory:
    """Add the experts of a `tiny_model` of two layers that an engine might have chosen: others than the trainer's."""
    scores = np.random.default_rng(seed).random((len(row.token_ids), 2, EXPERTS))
    return replace(row, experts=pack_experts(scores.argsort(-1)[..., :CHOSEN].astype(np.int16)))


def save_random_adapter(model: Path, folder: Path, lora: LoRA = SMALL, noise: float = 0.2, seed: int = 2) -> Path:
    """Write an adapter of the model in a folder; with `noise` its B is not 0, so that it changes the policy."""
    make_adapter(load_model(model), lora, 1, folder)
    generator, tensors = torch.Generator().manual_seed(seed), load_file(folder / ADAPTER_FILES[1])
    tensors = {name: value + noise * torch.randn(value.shape, generator=generator) for name, value in tensors.items()}
    save(tensors, lora, folder)
    return folder


def make_trainer(
    folder: Path,
    optimizer: Optimizer = UNCLIPPED,
    state: Path | None = None,
    version_0: Path | None = None,
    adapter: Path | None = None,
    teacher: Path | None = None,
    **options: Any,
) -> Trainer:
    config, taught_by = make_config(optimizer=optimizer, **options), (teacher, None) if teacher else None
    return Trainer(load_train_state(config, folder, state, version_0, adapter, taught_by))


def make_config(temperature: float = 1.0, **options: Any) -> Config:
    """Make a configuration from sections, and from options of an algorithm and of updates.

    Without a type the algorithm is PPO without normalisation. No section is checked against the others.
    """
    sections = {name: options.pop(name) for name in options.keys() & Config.model_fields.keys()}
    of_train = {name: options.pop(name) for name in options.keys() & Train.model_fields.keys()}
    if "type" not in options:
        options = {"advantage": {"normalisation": "none"}, **options}
    train = Train.model_validate({"device": "cpu", "threads": 1, "minibatches": 1, **of_train})
    base, algorithm = _base(), read_algorithm(options)
    sampling = base.sampling.model_copy(update={"temperature": temperature})
    return base.model_copy(update={"algorithm": algorithm, "train": train, "sampling": sampling, **sections})


@cache
def _base() -> Config:
    knobs = ["run.seed=1", "run.iterations=1", "sampling.max_new_tokens=16", "rollout.max_head_offpolicyness=99"]
    return load("smoke", [*knobs, "reward={}", "score={}"])


def weights(trainer: Trainer) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in trainer.state.model.state_dict().items()}


def is_unchanged(trainer: Trainer, before: dict[str, Tensor]) -> bool:
    """Return whether the policy has the weights of before, bit for bit."""
    now = weights(trainer)
    return all(torch.equal(value, now[name]) for name, value in before.items())


def gradients(trainer: Trainer) -> dict[str, Tensor]:
    """Return the gradients of the last optimizer step; `UNCLIPPED` does not clip them."""
    return {name: p.grad for name, p in trainer.state.model.named_parameters() if p.grad is not None}


def assert_near(ours: dict[str, Tensor], theirs: dict[str, Tensor], tolerance: float) -> None:
    """Check that the tensors are equal up to `tolerance` times the largest entry."""
    assert ours.keys() == theirs.keys()
    scale = max(value.abs().max().item() for value in theirs.values())
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name].double(), value.double(), atol=tolerance * scale, rtol=0)
