"""Gradients of an update equal those of naive float64 formulas, whatever the batching."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from configs.algorithms import PPO
from tasks.train.batches import batching_for
from tasks.train.trainer import Trainer
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


def naive_loss(model: PreTrainedModel, temperature: float = 1.0, **knobs: Any) -> Tensor:
    """Compute the policy's whole loss again: float64, full logits, one trajectory and one token at a time."""
    algorithm = PPO.model_validate({"advantage": {"normalisation": "none"}, **knobs})
    rows, scores = random_rows()
    success = {(score.trajectory_id, score.turn): score.success for score in scores}
    returns = {
        (row.trajectory_id, k): sum(2 * success[row.trajectory_id, j] - 1 for j in range(k, len(row.turns)))
        for row in rows
        for k in range(len(row.turns))
    }
    reference, cap = tiny_model(seed=7).double(), algorithm.behaviour_weight
    terms = []
    for row in rows:
        logprobs = (model(torch.tensor([row.token_ids])).logits[0] / temperature).log_softmax(-1)
        of_reference = (reference(torch.tensor([row.token_ids])).logits[0] / temperature).log_softmax(-1).detach()
        actions = [(t, k) for k, turn in enumerate(row.turns) for t in range(turn.start, turn.end)]
        gaps = {t: logprobs[t - 1, row.token_ids[t]].item() - row.logprobs[t] for t, _ in actions}
        for t, k in actions:
            group = [r for r in rows if r.problem_id == row.problem_id]
            reached = [r for r in group if len(r.turns) > k]
            compared = reached if len(reached) > 3 else group
            peers = [returns[r.trajectory_id, min(k, len(r.turns) - 1)] for r in compared]
            advantage = returns[row.trajectory_id, k] - sum(peers) / len(peers)
            logp = logprobs[t - 1, row.token_ids[t]]
            proximal = logp.detach() if algorithm.objective != "behaviour" else torch.tensor(row.logprobs[t]).double()
            weight = math.exp(gaps[t] if cap.level == "token" else sum(gaps.values()) / len(gaps))
            if cap.cap and weight > cap.cap:
                weight = cap.cap if cap.mode == "truncate" else 0.0
            if cap.floor and weight < cap.floor:
                weight = 0.0
            ratio = torch.exp(logp - proximal)
            clipped = ratio.clamp(1 - algorithm.eps_clip, 1 + (algorithm.eps_clip_higher or algorithm.eps_clip))
            objective = torch.min(ratio * advantage, clipped * advantage)
            if algorithm.c_clip and advantage < 0:
                objective = torch.max(objective, torch.tensor(algorithm.c_clip * advantage))
            term = -(weight if algorithm.objective == "decoupled" else 1.0) * objective
            term = term + algorithm.entropy_coefficient * (logprobs[t - 1].exp() * logprobs[t - 1]).sum()
            if algorithm.kl.in_loss:
                d = logp - of_reference[t - 1, row.token_ids[t]]
                term = (
                    term
                    + algorithm.kl.kl_ctl
                    * {"k1": d, "k2": d * d / 2, "k3": torch.exp(-d) - 1 + d}[algorithm.kl.chosen_estimator]
                )
            terms.append(term)
    return torch.stack(terms).mean()


def naive_gradients(**knobs: Any) -> dict[str, Tensor]:
    model = tiny_model().double()
    naive_loss(model, **knobs).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    "knobs",
    [
        {},
        {"temperature": 0.8, "behaviour_weight": {"cap": 1.2}},
        {"behaviour_weight": {"cap": 1.2, "mode": "mask"}},
        {"behaviour_weight": {"cap": 1.2, "mode": "mask", "floor": 0.8}},
        {"behaviour_weight": {"level": "sequence"}},
        {"behaviour_weight": {"level": "sequence", "cap": 1.3, "floor": 0.9}},
        {"behaviour_weight": {"level": "sequence", "cap": 1.1, "mode": "mask"}},
        {"objective": "behaviour"},
        {"objective": "recomputed"},
        {"objective": "behaviour", "temperature": 1.3, "eps_clip_higher": 0.4, "c_clip": 1.1},
        {"entropy_coefficient": 0.3},
        {"kl": {"place": "loss", "estimator": "k1", "kl_ctl": 0.7}},
        {"kl": {"place": "loss", "estimator": "k2", "kl_ctl": 0.7}},
        {"kl": {"place": "loss", "estimator": "k3", "kl_ctl": 0.7}, "entropy_coefficient": 0.1},
    ],
    ids=str,
)
def test_gradient_is_that_of_the_written_formula(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, knobs: dict[str, Any]
) -> None:
    """Each option's gradient, with baselines and the mean over all action tokens, equals autograd in float64."""
    monkeypatch.setattr("tasks.train.passes.CHUNK_TOKENS", 7)
    first = tmp_path / "first"
    tiny_model(seed=7).save_pretrained(first)
    trainer = make_trainer(save_tiny(tmp_path / "now"), version_0=first, micro_batch_tokens=50, **knobs)
    metrics = trainer.update(*random_rows(), version=2)
    assert_near(gradients(trainer), naive_gradients(**knobs), 1e-5)
    if knobs.get("objective") != "behaviour":
        assert metrics["policy/ratio"] == 1.0
    else:
        assert metrics["policy/clip_fraction"] > 0.1
    if knobs.get("c_clip"):
        assert metrics["policy/dual_clip_fraction"] > 0.1


@pytest.mark.parametrize("kind", ["value-head", "own"])
def test_gradient_with_a_critic_is_that_of_the_written_formula(tmp_path: Path, kind: str) -> None:
    """Values, GAE, value loss and its share in the trunk's gradient equal autograd in float64."""
    trainer = make_trainer(save_tiny(tmp_path), micro_batch_tokens=50, critic={"model": kind}, **GAE)
    critic = trainer._train_state.critic
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


@pytest.mark.parametrize(("tokens", "chunk"), [(1, 4096), (60, 4096), (60, 5)])
@pytest.mark.parametrize(
    "options", [{}, EVERYTHING, {**GAE, "critic": {}, "kl": {"kl_ctl": 0.1, "place": "loss"}}], ids=lambda o: len(o)
)
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


@pytest.mark.parametrize(
    "options", [{}, EVERYTHING, {**GAE, "critic": {}, "kl": {"kl_ctl": 0.1, "place": "loss"}}], ids=lambda o: len(o)
)
def test_trees_give_the_same_gradient(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]) -> None:
    """Sequences in one tree do not see each other: gradients and metrics are those of padded rows.

    Of two possible tokens, the samples of a problem have many beginnings in common.
    """
    folder = save_tiny(tmp_path)
    rows, scores = random_rows(samples=12, vocabulary=8, longest=4)
    rows[3] = replace(rows[3], status="truncated", reason="no room", unplayed_turns=-1)
    rows[5] = replace(rows[5], sequence_starts=[0, rows[5].turns[0].end])
    trainers: dict[bool, Trainer] = {}
    metrics: dict[bool, dict[str, Any]] = {}
    for trees in (False, True):
        monkeypatch.setattr(
            "tasks.train.train_state.batching_for", lambda *of, trees=trees: replace(batching_for(*of), trees=trees)
        )
        trainers[trees] = make_trainer(folder, micro_batch_tokens=160, **options)
        metrics[trees] = trainers[trees].update(rows, scores, version=2)
    assert_near(gradients(trainers[True]), gradients(trainers[False]), 1e-5)
    assert metrics[False].pop("tokens/shared_share") == 0 < 0.3 < metrics[True].pop("tokens/shared_share")
    assert metrics[False].pop("tokens/padding_share") > metrics[True].pop("tokens/padding_share") >= 0
    for name in ("time/prepare", "time/update", "tokens/trained_per_second", "histograms"):
        metrics[True].pop(name)
    for name, value in metrics[True].items():
        assert value == pytest.approx(metrics[False][name], rel=1e-3, abs=1e-5), name
