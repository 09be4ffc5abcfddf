"""Mixtures of experts are trained with the experts that the engine chose, and their routers still learn."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from configs.score import Reward
from configs.train import Train
from storage.records import Score, Trajectory, pack_experts
from tasks.train.batches import Batching
from tasks.train.experts import give_experts, read_rows, replay_routing
from tasks.train.passes import logprob_scorer, score_action_tokens
from tasks.train.policy import StoredTokens, recompute, set_up
from tasks.train.samples import Sample, build_samples
from tasks.train.sharding import StoredTensors
from tests.support.train_helpers import make_trainer, random_rows, save_tiny, tiny_model, with_random_experts

ON_CPU = Batching(4096, torch.device("cpu"))


def replaying(model: PreTrainedModel) -> PreTrainedModel:
    replay_routing(model)
    return model


def choices(model: Any, tokens: Tensor) -> Tensor:
    """Return the experts [T, layers, chosen] to which a model sends tokens [T]."""
    seen, routers = list[Tensor](), [layer.mlp.gate for layer in model.base_model.layers]
    hooks = [router.register_forward_hook(lambda *given: seen.append(given[2][2])) for router in routers]
    model.base_model(tokens[None])
    for hook in hooks:
        hook.remove()
    return torch.stack(seen, 1)


def samples_of(rows: list[Trajectory], scores: list[Score]) -> list[Sample]:
    return build_samples(rows, scores, Reward(), replay=True)


def logprobs(model: PreTrainedModel, samples: list[Sample]) -> Tensor:
    scored = score_action_tokens(logprob_scorer(model, 1.0), samples, range(len(samples)), ON_CPU)
    return torch.from_numpy(np.concatenate([*scored.values()]))


def test_tokens_go_to_the_given_experts_and_routers_choose_where_none_are_known() -> None:
    model, tokens = replaying(tiny_model("qwen3_moe")), torch.arange(6, 12)
    own = choices(model, tokens)
    given = (own + 1) % 5
    given[2] = -1
    give_experts(model, given[None])
    replayed = choices(model, tokens)
    assert torch.equal(replayed[[0, 1, 3, 4, 5]], given[[0, 1, 3, 4, 5]])
    assert (replayed[2] >= 0).all()
    give_experts(model, None)
    assert torch.equal(choices(model, tokens), own)


def test_the_drift_is_rounding_alone_when_routing_is_forced_alike() -> None:
    """A trainer whose routers are a little off sends some tokens to other experts, unless it is given the engine's.

    With equal weights nothing is left: the logprobs have the same bits.
    """
    rows, scores = random_rows(problems=6, longest=30)
    models: Any = (set_up(tiny_model("qwen3_moe"), Train(device="cpu", threads=1)) for _ in range(3))
    engine, trainer, equal = models
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for layer in trainer.base_model.layers:
            layer.mlp.gate.weight += 3e-3 * torch.randn(layer.mlp.gate.weight.shape, generator=draw)
        routed = [
            replace(row, experts=pack_experts(choices(engine, torch.tensor(row.token_ids)).numpy().astype(np.int16)))
            for row in rows
        ]
    samples = samples_of(routed, scores)
    sampled = logprobs(engine, samples)
    without = (logprobs(trainer, samples) - sampled).abs()
    assert without.max() > 0.3
    assert (logprobs(replaying(trainer), samples) - sampled).abs().max() < 0.06
    assert torch.equal(logprobs(replaying(equal), samples), sampled)


def test_an_audit_recomputes_with_the_experts_of_the_engine(tmp_path: Path) -> None:
    rows, scores = random_rows(problems=2)
    routed = [with_random_experts(row, seed) for seed, row in enumerate(rows)]
    stored = [StoredTokens(r.trajectory_id, r.token_ids, r.action_mask, [0], r.experts) for r in routed]
    recomputed = recompute(save_tiny(tmp_path, "qwen3_moe"), stored, 1.0)
    expected = logprobs(replaying(tiny_model("qwen3_moe")), samples_of(routed, scores))
    torch.testing.assert_close(
        torch.from_numpy(np.concatenate([each for each in recomputed if each is not None])), expected, rtol=0, atol=1e-5
    )
    assert recompute(tmp_path, [], 1.0) == []


def test_an_update_trains_experts_and_routers(tmp_path: Path) -> None:
    rows, scores = random_rows()
    routed = [with_random_experts(row, seed) for seed, row in enumerate(rows)]
    trainer = make_trainer(save_tiny(tmp_path, "qwen3_moe"), routing_replay=True)
    trainer.update(routed, scores, version=2)
    gradients = {name: p.grad for name, p in trainer.state.model.named_parameters()}
    for part in ("gate.weight", "experts.gate_up_proj", "experts.down_proj"):
        gradient = gradients[f"model.layers.0.mlp.{part}"]
        assert gradient is not None
        assert gradient.abs().max() > 1e-5
    for experts, message in (
        (rows[0].experts, r"have no experts of the engine, which train\.routing_replay=true needs: t000"),
        (routed[0].experts, r"t\d+ has experts of \d+ tokens, but \d+ tokens"),
        (b"x", "t000: experts are not a file in NumPy's format"),
    ):
        with pytest.raises(ValueError, match=message):
            trainer.update([replace(row, experts=experts) for row in rows], scores, version=2)


def test_ranks_read_whole_experts_and_some_none(tmp_path: Path) -> None:
    """Five experts are dealt out to four ranks as 2, 2, 1 and 0."""
    model = tiny_model("qwen3_moe")
    stored = StoredTensors(save_tiny(tmp_path, "qwen3_moe"), "model")
    for name, whole in model.named_parameters():
        for start, end in ((0, 2), (2, 4), (4, 5), (5, 5)):
            read = read_rows(model, stored, name, whole.shape, start, end)
            assert read.shape == whole[start:end].shape
            assert torch.equal(read, whole[start:end])


def test_what_cannot_be_replayed_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="needs a mixture of experts .*, but the policy's model_type is 'qwen3'"):
        make_trainer(save_tiny(tmp_path), routing_replay=True)
    noisy = tiny_model("qwen3_moe")
    noisy.config.router_jitter_noise = 0.1
    set_up(noisy, Train(device="cpu", threads=1))
    with pytest.raises(ValueError, match=r"router_jitter_noise=0\.1"):
        set_up(noisy, Train(device="cpu", threads=1, gradient_checkpointing=True))
