"""Every mesh of ranks computes what one process computes, with every algorithm and every option of PPO."""

from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from configs import Config
from configs.algorithms import NAMES
from configs.train import Optimizer
from storage.records import Score, Trajectory
from storage.versions.weights import load_model
from tasks.train.mesh import ALONE, Mesh
from tasks.train.policy import load_policy, save_policy
from tasks.train.sharding import StoredTensors, whole
from tasks.train.train_state import load_train_state
from tasks.train.trainer import Trainer
from tests.support.rank_processes import run_ranks
from tests.support.soak import scaled
from tests.support.train_helpers import (
    EVERYTHING,
    GAE,
    make_config,
    random_rows,
    save_random_adapter,
    save_tiny,
    tiny_model,
    with_random_experts,
)

MIXTURE, ADAPTER = "mixture of experts", "adapter"
"""The option whose policy is one, and that with which only an adapter is trained."""
OPTIONS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "small micro-batches": {"micro_batch_tokens": 16},
    "three minibatches, two epochs": {"minibatches": 3, "epochs": 2},
    "plain PPO": {"objective": "behaviour", "eps_clip_higher": 0.4, "c_clip": 1.1},
    "weights of tokens, masked": {"behaviour_weight": {"cap": 1.2, "mode": "mask", "floor": 0.8}},
    "weights of sequences": {"behaviour_weight": {"level": "sequence", "cap": 1.1}},
    "entropy bonus": {"entropy_coefficient": 0.3},
    "early stop": {"early_stop_imp_ratio": 1.000001, "minibatches": 4},
    "mask_truncated": {"mask_truncated": True},
    "group by std": {"advantage": {"scale_by_std": True, "leave_one_out": True, "normalisation": "group"}},
    "KL in the reward": {"kl": {"kl_ctl": 0.1, "adaptive": True}, "advantage": {"scale_by_std": True, "bound": 1.5}},
    "KL in the loss, moving reference": {"kl": {"kl_ctl": 0.1, "place": "loss", "reference": "ema"}, "epochs": 2},
    "value head": {**GAE, "critic": {"model": "value-head"}},
    "own critic": {**GAE, "critic": {"model": "own"}},
    "everything": EVERYTHING,
    "gradient checkpointing": {"gradient_checkpointing": True},
    "autocast": {"autocast": "bfloat16"},
    MIXTURE: {**EVERYTHING, "routing_replay": True, "gradient_checkpointing": True},
    ADAPTER: {"kl": {"kl_ctl": 0.1, "place": "loss"}, "gradient_checkpointing": True},
    **{name: {"type": name} for name in NAMES if name not in ("ppo", "echo")},
    "echo": {"type": "echo", "observations": "all"},
}
FEW = ["early stop", "everything", "autocast", MIXTURE, ADAPTER, "dpo", "echo"]
"""Options of the short test; the long one has all."""
LOOSE = {"autocast": 2e-2}
"""Tolerances of options whose numbers have fewer bits than float32, by name; their metrics are not compared."""
UPDATES = 5
KINDS = ("weight", "critic", "reference")
MEASURED = {"time/prepare", "time/update", "tokens/trained_per_second"}
DEALT = {"tokens/padding_share"}
"""Metrics that may differ, because they tell times or how the work was dealt out."""
Plan = dict[tuple[int, int], list[str]]
"""The options to train with on each mesh (replicate, shard)."""
MAX_NORM = 0.5
OPTIMIZER = Optimizer(lr=1e-3, max_grad_norm=MAX_NORM, weight_decay=0.1, eps=1e-4)


def rows(*, routed: bool) -> tuple[list[Trajectory], list[Score]]:
    """Make rows for which every option does something: some are cut, and one has two sequences."""
    rows, scores = random_rows(problems=6)
    rows[3] = replace(rows[3], status="truncated", reason="no room", unplayed_turns=-1)
    rows[5] = replace(rows[5], sequence_starts=[0, rows[5].turns[0].end])
    return [with_random_experts(row) for row in rows] if routed else rows, scores


def save_both(folder: Path, kind: str = "qwen3", *, tied: bool = False) -> Path:
    """Save a dense policy, and below it an adapter that changes something, a teacher, and a mixture of experts."""
    save_tiny(folder / "mixture", "qwen3_moe")
    save_tiny(folder, kind, tied)
    save_random_adapter(folder, folder / ADAPTER)
    tiny_model(kind, tied, seed=7).save_pretrained(folder / "teacher")
    return folder


def config_of(name: str, replicate: int = 1, shard: int = 1) -> Config:
    shape, options = {"replicate": replicate, "shard": shard}, OPTIONS[name]
    normalised: dict[str, Any] = {} if "type" in options else {"advantage": {}}
    return make_config(optimizer=OPTIMIZER, **{"minibatches": 2, "parallel": shape, **normalised, **options})


def numbers(trainer: Trainer) -> dict[str, Tensor]:
    """Return weights and gradients of the policy, and the weights of critic and reference, whole."""
    state = trainer.state
    gradients = {name: whole(p.grad) for name, p in state.model.named_parameters() if p.grad is not None}
    norm = torch.cat([value.flatten() for value in gradients.values()]).norm()
    # Clipped, also where an early stop left the step out.
    named = {f"gradient/{name}": value / max(1.0, norm / MAX_NORM) for name, value in gradients.items()}
    for kind, part in zip(KINDS, (state.model, state.critic, state.reference), strict=True):
        named |= {f"{kind}/{name}": parameter for name, parameter in (part.named_parameters() if part else ())}
    return {name: whole(value.detach()).clone() for name, value in named.items()}


def train(name: str, folder: Path, mesh: Mesh, config: Config) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Take UPDATES updates; return the numbers after the first and the last, and the metrics of the last."""
    policy, adapter = folder / "mixture" if name == MIXTURE else folder, folder / ADAPTER if name == ADAPTER else None
    teacher = (folder / "teacher", None) if name == "opd" else None
    trainer = Trainer(load_train_state(config, policy, adapter=adapter, teacher=teacher, mesh=mesh))
    metrics, found = dict[str, float](), dict[str, Tensor]()
    for version in range(UPDATES):
        metrics = trainer.update(*rows(routed=name == MIXTURE), version=2 + version)
        if version in (0, UPDATES - 1):
            found |= {f"{version}/{key}": value for key, value in numbers(trainer).items()}
    return found, metrics


def train_on_ranks(folder: Path, out: Path, plan: Plan) -> None:
    """Train with the options of each mesh; the first rank writes what it found."""
    for (replicate, shard), names in plan.items():
        for name in names:
            config = config_of(name, replicate, shard)
            mesh = Mesh.of(config.train.parallel, "cpu", 60, ["a"] * config.train.parallel.ranks)
            found = train(name, folder, mesh, config)
            if name == MIXTURE:
                policy = load_policy(folder / "mixture", config.train, mesh)
                save_policy(policy, out / f"{replicate}x{shard} files", mesh)
            if dist.get_rank() == 0:
                torch.save(found, out / f"{replicate}x{shard} {name}.pt")


def difference(found: dict[str, Tensor], expected: dict[str, Tensor], *kinds: str) -> float:
    """Return the largest difference of the numbers of some kinds (`0/gradient`)."""
    return max((found[n] - value).abs().max().item() for n, value in expected.items() if n.startswith(kinds))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_both(tmp_path_factory.mktemp("policy"))


def compare(folder: Path, out: Path, ranks: int, plan: Plan) -> None:
    """Compare each mesh with one process: numbers and metrics."""
    run_ranks(ranks, train_on_ranks, folder, out, plan, log=out / "log")
    alone = {name: train(name, folder, ALONE, config_of(name)) for name in {*chain.from_iterable(plan.values())}}
    for (replicate, shard), names in plan.items():
        for name in names:
            found, metrics = torch.load(out / f"{replicate}x{shard} {name}.pt")
            expected, expected_metrics = alone[name]
            assert found.keys() == expected.keys()
            gradients = difference(found, expected, "0/gradient")
            weights = difference(found, expected, *(f"{UPDATES - 1}/{kind}" for kind in KINDS))
            print(f"{name:35} {replicate} x {shard}  gradients {gradients:.1e}  weights {weights:.1e}")
            assert max(value.abs().max() for key, value in expected.items() if key.startswith("0/gradient")) > 0.01
            if name in LOOSE:
                assert max(gradients, weights) < LOOSE[name]
                continue
            assert gradients <= 1e-6
            assert weights <= 1e-5
            for key in expected_metrics.keys() - MEASURED - DEALT - {"histograms"}:
                assert metrics[key] == pytest.approx(expected_metrics[key], rel=1e-3, abs=1e-5), key


@pytest.mark.slow
@given(st.lists(st.integers(0, 100)), st.lists(st.integers(1, 4), min_size=1, max_size=3))
def test_the_ranks_of_each_node_share_its_work(sizes: list[int], nodes: list[int]) -> None:
    """On every node each piece of work is one rank's, and no rank has much more than another."""
    for node, count in enumerate(nodes):
        own = tuple(range(sum(nodes[:node]), sum(nodes[:node]) + count))
        shares = [Mesh(rank, sum(nodes), own).assigned(sizes) for rank in own]
        assert sorted(place for share in shares for place in share) == [*range(len(sizes))]
        totals = [sum(sizes[place] for place in share) for share in shares]
        assert max(totals) - min(totals) <= max(sizes, default=0)


@pytest.mark.parametrize("names", [FEW, pytest.param([*OPTIONS], marks=pytest.mark.long)], ids=["few", "all"])
def test_options_on_two_ranks(names: list[str], folder: Path, tmp_path: Path) -> None:
    """Gradients of the first update to 1e-6, weights after five to 1e-5, also those of critic and reference."""
    compare(folder, tmp_path, 2, {(1, 2): names, (2, 1): scaled(["everything"], names)})
    assert_same_files(folder / "mixture", tmp_path / "1x2 files")


def assert_same_files(before: Path, after: Path) -> None:
    """Two ranks have read a mixture, and have written each expert under the name that it had; transformers agrees."""
    one, other = StoredTensors(before, "model"), StoredTensors(after, "model")
    assert "model.layers.1.mlp.experts.3.up_proj.weight" in one.names
    assert one.names == other.names
    assert all(torch.equal(one.read(name), other.read(name)) for name in one.names)
    read, expected = load_model(after).state_dict(), load_model(before).state_dict()
    assert read.keys() == expected.keys()
    assert all(torch.equal(value, read[name]) for name, value in expected.items())


@pytest.mark.long
@pytest.mark.slow
def test_four_ranks(tmp_path: Path) -> None:
    """Four ranks, of which some have no work in a pass, and a model with tied embeddings: sharded, copied, and both."""
    folder, names = save_both(tmp_path / "policy", "qwen2", tied=True), scaled(["everything"], [*OPTIONS])
    compare(folder, tmp_path, 4, {(2, 2): names, (1, 4): scaled([], names), (4, 1): scaled([], names)})
