"""Attention under autocast on a CPU, of all pairs, against float32."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from configs.score import Reward
from configs.train import Train
from tasks.train.batches import arrange, batching_for, cut, find_places, pieces
from tasks.train.passes import action_logprobs
from tasks.train.policy import set_up
from tasks.train.samples import build_samples
from tests.support.train_helpers import random_rows, tiny_model


def error(one: Tensor, other: Tensor) -> float:
    return float((one - other).norm() / other.norm())


@pytest.mark.parametrize("trees", [True, False])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_it_computes_what_transformers_does(monkeypatch: pytest.MonkeyPatch, kind: str, trees: bool) -> None:
    """Logprobs and gradients are those of float32, at most as far away as with PyTorch's own attention.

    A part has few pairs here, so that there are several.
    """
    model = set_up(tiny_model(kind), Train(device="cpu"))
    samples = build_samples(*random_rows(samples=12, vocabulary=8, longest=4), Reward())
    batching = replace(batching_for(model, Train()), budget=200, trees=trees)
    weights = list(model.parameters())

    def results(autocast: bool) -> tuple[Tensor, Tensor]:
        total, found = torch.zeros(()), list[Tensor]()
        for segments in cut(samples, pieces(samples, range(len(samples))), batching):
            positions = [
                samples[piece.sample].actions[piece.actions] - piece.start
                for segment in segments
                for piece in segment.pieces
            ]
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast, cache_enabled=False):
                places = find_places(segments, positions, batching)
                _, logp, _ = action_logprobs(model, arrange(segments, batching), places, 1.0)
            found.append(logp.detach())
            total = total + (logp * torch.linspace(-1, 1, len(logp))).sum()
        return torch.cat(found), torch.cat([each.flatten() for each in torch.autograd.grad(total, weights)])

    exact = results(autocast=False)
    monkeypatch.setattr("tasks.train.attention._PAIRS", 1)
    ours = results(autocast=True)
    monkeypatch.setattr("tasks.train.attention._LONGEST", 0)
    theirs = results(autocast=True)
    for own, others, expected, most in zip(ours, theirs, exact, (0.02, 0.05), strict=True):
        assert 0 < error(own, expected) < most
        assert error(own, expected) < 1.5 * error(others, expected)
        assert not torch.equal(own, others)
