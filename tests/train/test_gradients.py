"""Gradients of an update equal those of naive float64 formulas, whatever the batching."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tasks.train.batches import batching_for
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


@pytest.mark.parametrize("kind", ["value-head", "own"])
def test_gradient_with_a_critic_is_that_of_the_written_formula(tmp_path: Path, kind: str) -> None:
    """Values, GAE, value loss and its share in the trunk's gradient equal autograd in float64."""
    trainer = make_trainer(save_tiny(tmp_path), micro_batch_tokens=50, critic={"model": kind}, **GAE)
    critic = trainer.state.critic
    assert critic is not None
    with torch.no_grad():
        critic.head.weight.copy_(torch.linspace(-0.1, 0.1, 32))
    head = torch.linspace(-0.1, 0.1, 32, dtype=torch.float32).double().requires_grad_()
    trainer.update(*random_rows(), version=2)

    rows, scores = random_rows()
    policy, other = tiny_model().double(), tiny_model().double()
    success = {(score.trajectory_id, score.turn): score.success for score in scores}
    of_policy, values, returns = list[Tensor](), list[Tensor](), list[float]()
    for row in rows:
        ids = torch.tensor([row.token_ids])
        logprobs = policy(ids).logits[0].log_softmax(-1)
        hidden = (policy if kind == "value-head" else other).base_model(ids).last_hidden_state[0]
        actions = [(t, k) for k, turn in enumerate(row.turns) for t in range(turn.start, turn.end)]
        of_row = [hidden[t - 1] @ head for t, _ in actions]
        carried, after = 0.0, 0.0
        for (t, k), value in reversed(list(zip(actions, of_row, strict=True))):
            last = t == row.turns[k].end - 1
            reward = 2 * success[row.trajectory_id, k] - 1 if last else 0.0
            discount = 1.0 if last else 0.95
            carried = reward + discount * after - value.item() + discount * 0.9 * carried
            after = value.item()
            logp = logprobs[t - 1, row.token_ids[t]]
            weight = min(5.0, math.exp(logp.item() - row.logprobs[t]))
            of_policy.append(-weight * torch.exp(logp - logp.detach()) * carried)
            values.append(value)
            returns.append(carried + after)
    found = torch.tensor(returns, dtype=torch.float64)
    of_value = (torch.stack(values) - (found - found.mean()) / found.std(correction=0)) ** 2 / 2
    coefficient = 0.1 if kind == "value-head" else 1.0
    (torch.stack(of_policy).mean() + coefficient * of_value.mean()).backward()
    assert_near(gradients(trainer), {n: p.grad for n, p in policy.named_parameters() if p.grad is not None}, 1e-5)
    assert head.grad is not None
    assert critic.head.weight.grad is not None
    torch.testing.assert_close(critic.head.weight.grad[0].double(), head.grad, atol=1e-5, rtol=1e-4)
    if critic.own is not None:
        of_critic = {n: p.grad for n, p in critic.own.base_model.named_parameters() if p.grad is not None}
        assert_near(of_critic, {n: p.grad for n, p in other.base_model.named_parameters() if p.grad is not None}, 1e-5)


with_options = pytest.mark.parametrize(
    "options", [{}, EVERYTHING, {**GAE, "critic": {}, "kl": {"kl_ctl": 0.1, "place": "loss"}}], ids=lambda o: len(o)
)


@pytest.mark.parametrize(("tokens", "chunk"), [(1, 4096), (60, 4096), (60, 5)])
@with_options
def test_gradient_does_not_depend_on_the_batching(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokens: int, chunk: int, options: dict[str, Any]
) -> None:
    """Padding, accumulation and chunks do not change what is learned."""
    folder = save_tiny(tmp_path)
    whole, parts = make_trainer(folder, **options), make_trainer(folder, **options, micro_batch_tokens=tokens)
    rows, scores = random_rows()
    whole.update(rows, scores, version=2)
    monkeypatch.setattr("tasks.train.passes.CHUNK_TOKENS", chunk)
    parts.update(rows[::-1], scores[::-1], version=2)
    assert_near(gradients(parts), gradients(whole), 1e-6)


@with_options
def test_trees_give_the_same_gradient(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]) -> None:
    """Sequences in one tree do not see each other: gradients and metrics are those of padded rows.

    Of two possible tokens, the samples of a problem have many beginnings in common.
    """
    folder = save_tiny(tmp_path)
    rows, scores = random_rows(samples=12, vocabulary=8, longest=4)
    rows[3] = replace(rows[3], status="truncated", reason="no room", unplayed_turns=-1)
    rows[5] = replace(rows[5], sequence_starts=[0, rows[5].turns[0].end])
    found = []
    for trees in (False, True):
        monkeypatch.setattr(
            "tasks.train.train_state.batching_for", lambda *of, trees=trees: replace(batching_for(*of), trees=trees)
        )
        trainer = make_trainer(folder, micro_batch_tokens=160, **options)
        metrics = trainer.update(rows, scores, version=2)
        found.append((gradients(trainer), metrics))
    (of_rows, in_rows), (of_trees, in_trees) = found
    assert_near(of_trees, of_rows, 1e-5)
    assert in_rows.pop("tokens/shared_share") == 0 < 0.3 < in_trees.pop("tokens/shared_share")
    assert in_rows.pop("tokens/padding_share") > in_trees.pop("tokens/padding_share") >= 0
    for name in in_trees.keys() - {"time/prepare", "time/update", "tokens/trained_per_second", "histograms"}:
        assert in_trees[name] == pytest.approx(in_rows[name], rel=1e-3, abs=1e-5), name
