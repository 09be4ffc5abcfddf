"""Whether a device computes what the CPU does in float32: losses, attentions, the output layer, ranks, checkpoints."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import destroy_process_group
from torch.distributed.device_mesh import init_device_mesh
from transformers import PreTrainedModel

from configs.score import Reward
from configs.train import Optimizer
from tasks.train.batches import Batching, cut, pieces
from tasks.train.mesh import Mesh, join_group, new_notes
from tasks.train.optimizer import make_adamw
from tasks.train.passes import float32_logits, logprob_scorer, score_action_tokens
from tasks.train.samples import Sample, build_samples
from tasks.train.sharding import shard, whole
from tasks.train.trainer import Trainer
from tests.gpu.conftest import DEVICE, GPU, LIMIT_S, Measured, within
from tests.support.train_helpers import GAE, gradients, make_trainer, random_rows, tiny_model
from tests.train.test_mesh import MIXTURE, OPTIONS

pytestmark = [pytest.mark.long, pytest.mark.timeout(LIMIT_S)]
OPTIMIZER = Optimizer(lr=1e-4, eps=1e-8, max_grad_norm=1e9)
LOSSES = sorted(OPTIONS.keys() - {"autocast", "gradient checkpointing", MIXTURE, "adapter", "opd"})
UPDATES = 5 if GPU else 2
WIDTH = 128 if GPU else 64


def model(kind: str, layers: int, width: int, seed: int = 0) -> PreTrainedModel:
    """Make a random model with heads of size 64, or 32 if it is narrow; half as many for keys and values."""
    heads = max(2, width // 64)
    sizes: dict[str, Any] = {"hidden_size": width, "intermediate_size": 2 * width, "head_dim": width // heads}
    sizes |= {"num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": heads // 2}
    return tiny_model(kind, seed=seed, **sizes, max_position_embeddings=512, initializer_range=0.1)


@dataclass(frozen=True, slots=True)
class Trained:
    """The logprobs before the updates, the gradient of the first one, the weights after all, and the way to them."""

    logprobs: Tensor
    gradient: Tensor
    weights: Tensor
    moved: float


def flat(tensors: Any) -> Tensor:
    return torch.cat([whole(each.detach()).float().cpu().flatten() for each in tensors])


def joined(of_samples: dict[int, Any]) -> Tensor:
    return torch.cat([torch.from_numpy(each) for each in of_samples.values()])


def rows() -> tuple[Any, Any]:
    return random_rows(problems=8 if GPU else 2, longest=100 if GPU else 12)


def trained(trainer: Trainer, updates: int = UPDATES) -> Trained:
    """Train on random rows, and note what happens on the way."""
    given, state = rows(), trainer.state
    before, samples = flat(state.model.parameters()), build_samples(*given, Reward())
    with state.precision():
        logprobs = joined(score_action_tokens(state.scorer(), samples, range(len(samples)), state.batching))
    trainer.update(*given, version=2)
    gradient = flat(gradients(trainer).values())
    for _ in range(updates - 1):
        trainer.update(*given, version=2)
    weights = flat(state.model.parameters())
    return Trained(logprobs, gradient, weights, float((weights - before).norm()))


def difference(ours: Trained, theirs: Trained) -> dict[str, float]:
    """Return the mean difference of logprobs in nats; that of gradients and weights as a share of gradient and way."""
    return {
        "logprobs": float((ours.logprobs - theirs.logprobs).abs().mean()),
        "gradients": float((ours.gradient - theirs.gradient).norm() / theirs.gradient.norm()),
        "weights": float((ours.weights - theirs.weights).norm() / theirs.moved),
    }


EXACT = {"logprobs": 1e-4, "gradients": 1e-3, "weights": 1e-2}
ROUNDED = {"logprobs": 0.1, "gradients": 0.2, "weights": 0.3}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a policy and another one, its version 0."""
    folder = tmp_path_factory.mktemp("policies")
    for seed, name in enumerate(("policy", "first")):
        model("qwen2", 2, WIDTH, seed).save_pretrained(folder / name)
    return folder


def run(folder: Path, device: str, options: dict[str, Any], **more: Any) -> Trained:
    return trained(
        make_trainer(folder / "policy", OPTIMIZER, version_0=folder / "first", device=device, **options, **more)
    )


@pytest.mark.parametrize("name", LOSSES)
def test_losses_in_float32_are_those_of_the_cpu(folder: Path, name: str, measured: Measured) -> None:
    cut = {"micro_batch_tokens": 300 if GPU else 60}
    found = difference(run(folder, DEVICE, cut | OPTIONS[name]), run(folder, "cpu", OPTIONS[name]))
    measured(found)
    assert within(found, EXACT)


def test_bfloat16_is_near_float32(folder: Path, measured: Measured) -> None:
    half = {"autocast": "bfloat16", "gradient_checkpointing": True}
    found = difference(run(folder, DEVICE, half), run(folder, "cpu", {}))
    measured(found)
    assert within(found, ROUNDED)


@pytest.mark.parametrize(("attention", "trees"), [("sdpa", False), ("eager", False), ("sdpa", True)])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_rows_and_trees_in_bfloat16(kind: str, attention: str, trees: bool, measured: Measured) -> None:
    """Logprobs are those of padded rows in float32; each sample is twice in its group, so that trees pay."""
    given, scores = rows()
    given += [replace(row, trajectory_id=f"{row.trajectory_id}+") for row in given]
    scores += [replace(score, trajectory_id=f"{score.trajectory_id}+") for score in scores]
    samples, batching = build_samples(given, scores, Reward()), Batching(4096, torch.device(DEVICE), trees=trees)
    made = model(kind, 2, 4 * WIDTH if GPU else WIDTH)
    made.to(DEVICE)  # type: ignore[arg-type]  # wrapped by a decorator without types
    exact = logprobs_of(made, samples, "sdpa", replace(batching, trees=False), autocast=False)
    if trees:
        assert any(each[0].is_tree for each in cut(samples, pieces(samples, range(len(samples))), batching))
    error = {"logprobs": float((logprobs_of(made, samples, attention, batching) - exact).abs().mean())}
    measured(error)
    assert within(error, {"logprobs": 0.05})


def logprobs_of(
    made: PreTrainedModel, samples: list[Sample], name: str, batching: Batching, autocast: bool = True
) -> Tensor:
    made.set_attn_implementation(name)
    with torch.autocast(batching.device.type, torch.bfloat16, enabled=autocast, cache_enabled=False):
        return joined(score_action_tokens(logprob_scorer(made, 1.0), samples, range(len(samples)), batching))


def test_the_output_layer_rounds_little(measured: Measured) -> None:
    """Error of logits of size 10: in float32, and from rounded factors."""
    tokens, width, vocabulary = (4096, 1536, 151936) if GPU else (64, 32, 100)
    generator = torch.Generator(DEVICE).manual_seed(0)
    states = torch.randn(tokens, width, device=DEVICE, generator=generator)
    weight = torch.randn(vocabulary, width, device=DEVICE, generator=generator) * 10 / width**0.5
    numbers, exact = dict[str, float](), states[:64].double() @ weight.double().t()
    for name, logits in (("float32", states @ weight.t()), ("rounded", float32_logits(states, weight))):
        numbers[f"error of {name}"] = float((logits[:64].double() - exact).abs().mean())
    measured(numbers)
    assert within(numbers, {"error of rounded": 0.02})


def test_a_checkpoint_is_read_as_it_was_written(tmp_path: Path, measured: Measured) -> None:
    """The next update is the same as that of the trainer that wrote it, up to rounding."""
    half: dict[str, Any] = {"device": DEVICE, "autocast": "bfloat16", "critic": {"model": "own"}, **GAE}
    folder, (given, scores) = tmp_path / "policy", rows()
    model("qwen3", 2, 64).save_pretrained(folder)
    one = make_trainer(folder, OPTIMIZER, **half)
    one.update(given, scores, version=2)
    one.save(tmp_path / "model", tmp_path / "state")
    other = make_trainer(tmp_path / "model", OPTIMIZER, tmp_path / "state", version_0=folder, **half)
    assert all(torch.equal(a, b) for a, b in zip(_held(one), _held(other), strict=True))
    before = flat(one.state.model.parameters())
    for trainer in (one, other):
        trainer.update(given, scores, version=3)
    after, again = (flat(trainer.state.model.parameters()) for trainer in (one, other))
    apart = {"weights": float((again - after).norm() / (after - before).norm())}
    measured(apart)
    assert within(apart, {"weights": 0.05})


def _held(trainer: Trainer) -> list[Tensor]:
    held = trainer.state
    assert held.critic
    parameters = [*held.model.parameters(), *held.critic.parameters()]
    return [*parameters, *(held.adamw.state[p]["exp_avg"] for p in held.model.parameters())]


def test_one_rank_computes_what_no_rank_does(folder: Path, measured: Measured) -> None:
    """Train in a group of one rank (NCCL on a GPU), whose weights FSDP divides among this rank alone."""
    join_group(0, 1, DEVICE, new_notes(), "127.0.0.1", 60)
    try:
        policy = folder / "policy"
        trainers = [make_trainer(policy, OPTIMIZER, device=DEVICE, autocast="bfloat16") for _ in range(2)]
        mesh = Mesh(devices=init_device_mesh(DEVICE, (1,)))
        remade = trainers[1].state
        shard(remade.model, mesh)
        remade.mesh, remade.adamw = mesh, make_adamw({"policy": remade.model.parameters()}, OPTIMIZER)
        alone, sharded = (trained(trainer, 2) for trainer in trainers)
    finally:
        destroy_process_group()
    found = difference(sharded, alone)
    measured(found)
    assert within(found, ROUNDED)
