"""The kernels for a GPU, where they run on the CPU: packed rows, copies of weights and norms compute the same."""

import copy
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

from configs.score import Reward
from configs.train import Optimizer, Train
from tasks.train.batches import Batching, Segment, arrange, cut, find_places, pieces
from tasks.train.kernels import PACKED, CopiedLinear, accelerate, float32_logits, suits, use_copies
from tasks.train.optimizer import make_adamw
from tasks.train.samples import build_samples
from tests.support.train_helpers import (
    EVERYTHING,
    GAE,
    assert_near,
    gradients,
    make_trainer,
    random_rows,
    save_tiny,
    tiny_model,
)

CPU = torch.device("cpu")
HALF = Train(autocast="bfloat16", gradient_checkpointing=True)


def test_a_packed_row_by_hand() -> None:
    """Sequences follow each other with positions of their own; the padding is a sequence, too."""
    segments = [Segment([], np.array(tokens), [np.arange(len(tokens))]) for tokens in ([5, 6, 7], [5, 8])]
    batching = Batching(100, CPU, packed=True)
    rows, places = arrange(segments, batching), find_places(segments, [np.array([2, 3]), np.array([1])], batching)
    assert rows.ends is not None
    assert rows.positions is not None
    assert rows.tokens.shape == (1, 128)
    assert rows.tokens[0, :6].tolist() == [5, 6, 7, 5, 8, 0]
    assert rows.positions[0, :7].tolist() == [0, 1, 2, 0, 1, 0, 1]
    assert (rows.ends.tolist(), rows.ends.dtype, rows.longest) == ([0, 3, 5, 128], torch.int32, 123)
    assert (places.rows.tolist(), places.columns.tolist(), places.before.tolist()) == ([0, 0, 0], [2, 2, 4], [1, 2, 3])


@settings(max_examples=25)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=12), st.integers(1, 150))
def test_packed_passes_hold_everything_once_within_the_budget(lengths: list[int], budget: int) -> None:
    """Passes are as full as they can be in the order of lengths; a longer sequence is a pass alone."""
    template = build_samples(*random_rows(), Reward())[0]
    samples = [replace(template, token_ids=np.ones(length, np.int64), actions=np.empty(0, int)) for length in lengths]
    passes = cut(samples, pieces(samples, range(len(samples))), Batching(budget, CPU, packed=True))
    held = [[len(segment.tokens) for segment in segments] for segments in passes]
    assert [length for of_pass in held for length in of_pass] == sorted(lengths, reverse=True)
    assert all(sum(of_pass) <= budget or len(of_pass) == 1 for of_pass in held)
    assert all(sum(now) + following[0] > budget for now, following in pairwise(held))


def packing(model: PreTrainedModel) -> PreTrainedModel:
    model.set_attn_implementation(PACKED)
    return model


@pytest.mark.parametrize(
    "options",
    [
        {},
        EVERYTHING,
        {**GAE, "critic": {}, "kl": {"kl_ctl": 0.1, "place": "loss"}},
        *({"type": name} for name in ("grpo", "gspo", "rft", "dpo")),
        {"type": "echo", "observations": "all"},
    ],
    ids=str,
)
def test_packed_rows_give_the_same_gradient(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    """Gradients and metrics are those of padded rows, with rewritten history and values after a cut episode."""
    rows, scores = random_rows(samples=6)
    rows[3] = replace(rows[3], status="truncated", reason="no room", unplayed_turns=-1)
    rows[5] = replace(rows[5], sequence_starts=[0, rows[5].turns[0].end])
    shared = {"micro_batch_tokens": 100, **options}
    padded = make_trainer(save_tiny(tmp_path), **shared)
    expected = padded.update(rows, scores, version=2)
    monkeypatch.setattr("tasks.train.policy.suits", lambda device, train: True)
    monkeypatch.setattr("tasks.train.policy.accelerate", lambda model, train: packing(model))
    packed = make_trainer(tmp_path, **shared)
    found = packed.update(rows, scores, version=2)
    assert_near(gradients(packed), gradients(padded), 1e-5)
    others = ("seconds", "tokens/per_second", "tokens/padding_share", "tokens/shared_share", "histograms")
    for name, value in expected.items():
        if not name.startswith(others):
            assert found[name] == pytest.approx(value, rel=1e-3, abs=1e-5), name


def test_everything_together_is_as_far_from_float32_as_autocast_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two updates with two steps each, checkpointing, packed rows, fused norms and copies: the copies follow."""
    rows, scores, folder = *random_rows(), save_tiny(tmp_path)
    options: dict[str, Any] = {"minibatches": 2, "micro_batch_tokens": 100}
    moved = {}
    for name in ("exact", "autocast", "kernels"):
        if name != "exact":
            options |= {"autocast": "bfloat16", "gradient_checkpointing": True}
        if name == "kernels":
            monkeypatch.setattr("tasks.train.policy.suits", lambda device, train: True)
        trainer = make_trainer(folder, **options)
        model: Any = trainer._train_state.model
        before = torch.cat([p.detach().flatten().clone() for p in model.parameters()])
        for _ in range(2):
            trainer.update(rows, scores, version=2)
        moved[name] = torch.cat([p.detach().flatten() for p in model.parameters()]) - before
    assert isinstance(model.base_model.layers[0].mlp.up_proj, CopiedLinear)
    errors = {name: float((moved[name] - moved["exact"]).norm() / moved["exact"].norm()) for name in moved}
    assert errors["kernels"] < 1.5 * errors["autocast"] < 0.5


def test_copies_give_the_bits_of_autocast() -> None:
    """Outputs and gradients that several passes added up are the same, also after a step; the names are the same."""
    plain = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.SiLU(), torch.nn.Linear(32, 16, bias=False))
    copied = copy.deepcopy(plain)
    use_copies(copied)
    generator, results = torch.Generator().manual_seed(0), []
    inputs = [torch.randn(8, 16, generator=generator) for _ in range(3)]
    for model in (plain, copied):
        adamw, seen = make_adamw([(0.1, model.parameters())], Optimizer()), list[torch.Tensor]()
        for _ in range(2):
            adamw.zero_grad(set_to_none=True)
            for x in inputs:
                with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
                    output = model(x)
                output.float().pow(2).sum().backward()
                seen.append(output.detach())
            seen += [p.grad.clone() for p in model.parameters() if p.grad is not None]
            adamw.step()
        results.append([*seen, *model.state_dict().values(), model(inputs[0])])
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*results, strict=True))
    assert len(results[0]) == 2 * 6 + 3 + 1
    assert copied.state_dict().keys() == plain.state_dict().keys()


def test_logits_of_rounded_factors_have_the_gradients_of_a_linear_layer() -> None:
    """Each factor has at most the error of bfloat16; with AMX it has one, and on a CPU that does not multiply in
    bfloat16 none. The setting of the process stays.
    """
    generator = torch.Generator().manual_seed(0)
    states, weight = (torch.randn(size, 64, generator=generator, requires_grad=True) for size in (50, 90))
    upstream, before = torch.randn(50, 90, generator=generator), torch.get_float32_matmul_precision()
    logits = float32_logits(states, weight)
    ours = [logits, *torch.autograd.grad(logits, (states, weight), upstream)]
    linear = torch.nn.functional.linear(states, weight)
    theirs = [linear, *torch.autograd.grad(linear, (states, weight), upstream)]
    sizes = states.abs() @ weight.abs().t(), upstream.abs() @ weight.abs(), upstream.abs().t() @ states.abs()
    for found, expected, size in zip(ours, theirs, sizes, strict=True):
        assert found.dtype == torch.float32
        assert bool(((found - expected).abs() <= size * 2**-7).all())
        if "amx_bf16" in Path("/proc/cpuinfo").read_text():
            assert bool(((found - expected).abs() > size * 2**-16).any())
    assert torch.get_float32_matmul_precision() == before == "highest"


def test_a_canary_and_other_devices_are_left_alone() -> None:
    """Outside of autocast an accelerated model computes in float32, up to the order of sums."""
    ids, model = torch.arange(12)[None], tiny_model()
    expected = model(ids).logits
    accelerate(model, HALF)
    torch.testing.assert_close(model(ids).logits, expected, atol=1e-5, rtol=0)
    assert not suits(CPU, HALF)
