"""Whether a device computes what the CPU does in float32: losses, attentions, the output layer, ranks, checkpoints."""

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import destroy_process_group
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, Qwen2Config, Qwen3Config

from configs.score import Reward
from configs.train import Optimizer
from tasks.train.batches import Batching, cut, pieces
from tasks.train.mesh import Mesh, join_group, new_notes
from tasks.train.optimizer import make_adamw
from tasks.train.passes import float32_logits, logprob_scorer, score_action_tokens
from tasks.train.samples import Sample, build_samples
from tasks.train.sharding import shard, whole
from tasks.train.trainer import Trainer
from tests.gpu.checks import Check, Setting, attempt, limited, needs_cuda
from tests.support.train_helpers import EVERYTHING, GAE, gradients, make_trainer, random_rows

OPTIMIZER = Optimizer(lr=1e-4, eps=1e-8, max_grad_norm=1e9)
LOSSES: dict[str, dict[str, Any]] = {
    "defaults": {},
    "plain PPO, recomputed": {"objective": "recomputed"},
    "plain PPO, behaviour": {"objective": "behaviour", "eps_clip_higher": 0.4, "c_clip": 1.1},
    "weights of sequences": {"behaviour_weight": {"level": "sequence", "cap": 1.3, "floor": 0.5}},
    "weights masked": {"behaviour_weight": {"cap": 1.2, "mode": "mask"}},
    "entropy bonus": {"entropy_coefficient": 0.3},
    "KL k2 in the loss": {"kl": {"place": "loss", "estimator": "k2", "kl_ctl": 0.7}},
    "KL k3 in the loss": {"kl": {"place": "loss", "kl_ctl": 0.7}, "epochs": 2},
    "KL in the reward": {"kl": {"kl_ctl": 0.1, "adaptive": True}},
    "value head": {**GAE, "critic": {}},
    "everything, own critic": EVERYTHING,
}
UPDATES = 5
KINDS = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}
VOCABULARY = 50


def model(kind: str, layers: int, width: int, seed: int = 0) -> PreTrainedModel:
    """Make a random model with heads of size 64, or 32 if it is narrow; half as many for keys and values."""
    heads = max(2, width // 64)
    torch.manual_seed(seed)
    sizes = {"hidden_size": width, "intermediate_size": 2 * width, "head_dim": width // heads, "vocab_size": VOCABULARY}
    counts = {"num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": heads // 2}
    made = AutoModelForCausalLM.from_config(KINDS[kind](**sizes, **counts, initializer_range=0.1))
    assert isinstance(made, PreTrainedModel)
    return made


@dataclass(frozen=True, slots=True)
class Trained:
    """The logprobs before the updates, the gradient of the first one, the weights after all, and the way to them."""

    logprobs: Tensor
    gradient: Tensor
    weights: Tensor
    moved: float


def flat(tensors: Any) -> Tensor:
    return torch.cat([whole(each.detach()).float().cpu().flatten() for each in tensors])


def rows_of(setting: Setting) -> tuple[Any, Any]:
    few = {"problems": 2, "longest": 12} if setting.rehearsal else {"problems": 8, "longest": 100}
    return random_rows(vocabulary=VOCABULARY, **few)


def trained(trainer: Trainer, setting: Setting, updates: int) -> Trained:
    """Train on random rows, and note what happens on the way."""
    rows, scores = rows_of(setting)
    state = trainer._train_state
    before, samples = flat(state.model.parameters()), build_samples(rows, scores, Reward())
    with state.precision():
        of_samples = score_action_tokens(state.scorer(), samples, range(len(samples)), state.batching)
    trainer.update(rows, scores, version=2)
    gradient = flat(gradients(trainer).values())
    for _ in range(updates - 1):
        trainer.update(rows, scores, version=2)
    weights = flat(state.model.parameters())
    logprobs = torch.cat([torch.from_numpy(each) for each in of_samples.values()])
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


def losses(setting: Setting) -> Iterator[Check]:
    """Compare five updates with every loss in float32; then the defaults in bfloat16."""
    updates = 2 if setting.rehearsal else UPDATES
    folders = [setting.folder / name for name in ("policy", "first")]
    for seed, folder in enumerate(folders):
        model("qwen2", 2, 64 if setting.rehearsal else 128, seed).save_pretrained(folder)

    def run(device: str, **options: Any) -> Trained:
        trainer = make_trainer(folders[0], OPTIMIZER, version_0=folders[1], device=device, **options)
        return trained(trainer, setting, updates)

    exact = cache(lambda loss: run("cpu", **LOSSES[loss]))

    def compared(name: str, loss: str, limits: dict[str, float], **options: Any) -> Check:
        found = difference(run(setting.device, **LOSSES[loss], **options), exact(loss))
        return limited(name, found, limits, "relative to the CPU in float32")

    for loss in LOSSES:
        name, budget = f"float32, {loss}", 60 if setting.rehearsal else 300
        yield attempt(name, partial(compared, name, loss, EXACT, micro_batch_tokens=budget))
    half: dict[str, Any] = {"autocast": "bfloat16", "gradient_checkpointing": True}
    yield attempt("bfloat16", partial(compared, "bfloat16", "defaults", ROUNDED, **half))


def attention(setting: Setting) -> Iterator[Check]:
    """Compare padded and tree rows with two kinds of attention, and the output layer's products."""
    device = torch.device(setting.device)
    samples = doubled(setting)
    cases = [(name, "padded", Batching(4096, device)) for name in ("sdpa", "eager")]
    cases += [("sdpa", "tree", Batching(4096, device, trees=True))]
    trees = [each for each in cut(samples, pieces(samples, range(len(samples))), cases[-1][2]) if each[0].is_tree]
    yield Check("the samples have trees", "pass" if trees else "fail", {"passes of trees": float(len(trees))})
    for kind in KINDS:
        made = model(kind, 2, 64 if setting.rehearsal else 512)
        made.to(device)  # type: ignore[arg-type]  # wrapped by a decorator without types
        exact = logprobs_of(made, samples, "sdpa", cases[0][2], autocast=False)
        for case in cases:
            name = f"bfloat16, {kind}, {case[1]} rows, {case[0]}"
            yield attempt(name, partial(_attended, name, made, samples, case, exact))
    yield output_layer(setting)


def doubled(setting: Setting) -> list[Sample]:
    """Return random samples, each of them twice in its group, so that trees pay."""
    rows, scores = rows_of(setting)
    rows += [replace(row, trajectory_id=f"{row.trajectory_id}+") for row in rows]
    scores += [replace(score, trajectory_id=f"{score.trajectory_id}+") for score in scores]
    return build_samples(rows, scores, Reward())


def _attended(
    title: str, made: PreTrainedModel, samples: list[Sample], case: tuple[str, str, Batching], exact: Tensor
) -> Check:
    found = logprobs_of(made, samples, case[0], case[2])
    error = {"logprobs": float((found - exact).abs().mean())}
    return limited(title, error, {"logprobs": 0.05}, "from padded rows in float32")


def logprobs_of(
    made: PreTrainedModel, samples: list[Sample], name: str, batching: Batching, autocast: bool = True
) -> Tensor:
    made.set_attn_implementation(name)
    with torch.autocast(batching.device.type, torch.bfloat16, enabled=autocast, cache_enabled=False):
        of_samples = score_action_tokens(logprob_scorer(made, 1.0), samples, range(len(samples)), batching)
    return torch.cat([torch.from_numpy(each) for each in of_samples.values()])


def output_layer(setting: Setting) -> Check:
    """Compare float32 products with those on tensor cores: error of logits of size 10, and seconds."""
    tokens, width, vocabulary = (64, 32, 100) if setting.rehearsal else (4096, 1536, 151936)
    generator = torch.Generator(setting.device).manual_seed(0)
    states = torch.randn(tokens, width, device=setting.device, generator=generator)
    weight = torch.randn(vocabulary, width, device=setting.device, generator=generator) * 10 / width**0.5
    numbers = {}
    exact = states[:64].double() @ weight.double().t()
    for name, product in (("float32", lambda: states @ weight.t()), ("TF32", lambda: float32_logits(states, weight))):
        numbers[f"error of {name}"] = float((product()[:64].double() - exact).abs().mean())
        numbers[f"seconds of {name}"] = min(_seconds(product, setting) for _ in range(3))
    return limited("output layer", numbers, {"error of TF32": 0.02}, "logits with a standard deviation of 10")


def _seconds(compute: Any, setting: Setting) -> float:
    start = time.perf_counter()
    compute()
    if not setting.rehearsal:
        torch.cuda.synchronize()
    return time.perf_counter() - start


def state(setting: Setting) -> Iterator[Check]:
    """Write a checkpoint and read it; then train with one rank of NCCL, whose weights FSDP divides."""
    half = {"device": setting.device, "autocast": "bfloat16", "critic": {"model": "own"}, **GAE}
    folder, rows = setting.folder / "policy", rows_of(setting)
    model("qwen3", 2, 64).save_pretrained(folder)
    one, other = (make_trainer(folder, OPTIMIZER, **half) for _ in range(2))
    one.update(*rows, version=2)
    one.save(setting.folder / "model", setting.folder / "state")
    other.load(setting.folder / "model", setting.folder / "state", version_0=folder)
    same = all(torch.equal(a, b) for a, b in zip(_held(one), _held(other), strict=True))
    yield Check("checkpoint read as written", "pass" if same else "fail", {"tensors": float(len(_held(one)))})
    before = flat(one._train_state.model.parameters())
    for trainer in (one, other):
        trainer.update(*rows, version=3)
    way = (flat(one._train_state.model.parameters()) - before).norm()
    apart = (flat(other._train_state.model.parameters()) - flat(one._train_state.model.parameters())).norm()
    yield limited("next update after reading", {"weights": float(apart / way)}, {"weights": 0.05})
    yield from ranks(setting, folder)


def _held(trainer: Trainer) -> list[Tensor]:
    held = trainer._train_state
    assert held.critic
    parameters = [*held.model.parameters(), *held.critic.parameters()]
    return [*parameters, *(held.adamw.state[p]["exp_avg"] for p in held.model.parameters())]


def ranks(setting: Setting, folder: Path) -> Iterator[Check]:
    """Train in a group of one rank, and with weights that FSDP divides among this rank alone."""
    join_group(0, 1, setting.device, new_notes(), "127.0.0.1", 60)
    try:
        trainers = [make_trainer(folder, OPTIMIZER, device=setting.device, autocast="bfloat16") for _ in range(2)]
        mesh = Mesh(devices=init_device_mesh(setting.device, (1,)))
        shard(trainers[1]._train_state.model, mesh)
        remade = trainers[1]._train_state
        remade.mesh, remade.adamw = mesh, make_adamw({"policy": remade.model.parameters()}, OPTIMIZER)
        alone, sharded = (trained(trainer, setting, 2) for trainer in trainers)
    finally:
        destroy_process_group()
    backend = "gloo: NCCL needs CUDA" if setting.rehearsal else "NCCL"
    yield limited("one rank, FSDP", difference(sharded, alone), ROUNDED, f"relative to no rank; {backend}")
    if setting.rehearsal:
        yield needs_cuda("NCCL")
