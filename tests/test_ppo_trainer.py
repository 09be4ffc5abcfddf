"""The trainer: the written formula, bit for bit the same again, and no step on broken numbers."""

import json
import math
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from configs.schema import PPO, Advantage, Optimizer, Reward
from tasks.ppo.advantages import register_advantage
from tasks.ppo.advantages.group import group
from tasks.ppo.batches import draw_minibatches, make_minibatch
from tasks.ppo.critic import ValueNorm
from tasks.ppo.prepare import Preparation
from tasks.ppo.samples import build_samples
from tasks.ppo.trainer import Trainer
from tests.ppo_helpers import make_scores, make_trajectory, random_rows, save_tiny, tiny_model

UNCLIPPED = Optimizer(lr=1e-3, max_grad_norm=1e9)


def make_trainer(
    folder: Path,
    optimizer: Optimizer = UNCLIPPED,
    temperature: float = 1.0,
    first: Path | None = None,
    **ppo: Any,
) -> Trainer:
    knobs = PPO.model_validate(
        {"device": "cpu", "threads": 1, "ppo_n_minibatches": 1, "advantage": {"normalisation": "none"}, **ppo}
    )
    trainer = Trainer(knobs, optimizer, Reward(), temperature)
    trainer.load(folder, None, seed=1, first=first)
    return trainer


def weights(trainer: Trainer) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in trainer._learner.model.state_dict().items()}


def gradients(trainer: Trainer) -> dict[str, Tensor]:
    """What the last optimizer step saw; the bound of `UNCLIPPED` leaves it as it was."""
    return {name: p.grad for name, p in trainer._learner.model.named_parameters() if p.grad is not None}


def naive_loss(model: PreTrainedModel, temperature: float = 1.0, **knobs: Any) -> Tensor:
    """The policy's whole loss once more: float64, full logits, one trajectory and one token at a time."""
    ppo = PPO.model_validate({"advantage": {"normalisation": "none"}, **knobs})
    rows, scores = random_rows()
    success = {(score.trajectory_id, score.turn): score.success for score in scores}
    returns = {
        (row.trajectory_id, k): sum(2 * success[row.trajectory_id, j] - 1 for j in range(k, len(row.turns)))
        for row in rows
        for k in range(len(row.turns))
    }
    reference, cap = tiny_model(seed=7).double(), ppo.behaviour_weight
    terms = []
    for row in rows:
        logprobs = (model(torch.tensor([row.token_ids])).logits[0] / temperature).log_softmax(-1)
        of_reference = (reference(torch.tensor([row.token_ids])).logits[0] / temperature).log_softmax(-1).detach()
        actions = [(t, k) for k, turn in enumerate(row.turns) for t in range(turn.start, turn.end)]
        gaps = {t: logprobs[t - 1, row.token_ids[t]].item() - row.logprobs[t] for t, _ in actions}
        for t, k in actions:
            peers = [returns[r.trajectory_id, k] for r in rows if r.problem_id == row.problem_id and len(r.turns) > k]
            advantage = returns[row.trajectory_id, k] - sum(peers) / len(peers)
            logp = logprobs[t - 1, row.token_ids[t]]
            proximal = logp.detach() if ppo.use_decoupled_loss else torch.tensor(row.logprobs[t]).double()
            weight = math.exp(gaps[t] if cap.level == "token" else sum(gaps.values()) / len(gaps))
            if cap.cap and weight > cap.cap:
                weight = cap.cap if cap.mode == "truncate" else 0.0
            ratio = torch.exp(logp - proximal)
            clipped = ratio.clamp(1 - ppo.eps_clip, 1 + (ppo.eps_clip_higher or ppo.eps_clip))
            objective = torch.min(ratio * advantage, clipped * advantage)
            if ppo.c_clip and advantage < 0:
                objective = torch.max(objective, torch.tensor(ppo.c_clip * advantage))
            term = -(weight if ppo.use_decoupled_loss else 1.0) * objective
            term = term + ppo.entropy_coefficient * (logprobs[t - 1].exp() * logprobs[t - 1]).sum()
            if ppo.kl.in_loss:
                d = logp - of_reference[t - 1, row.token_ids[t]]
                term = (
                    term
                    + ppo.kl.kl_ctl * {"k1": d, "k2": d * d / 2, "k3": torch.exp(-d) - 1 + d}[ppo.kl.chosen_estimator]
                )
            terms.append(term)
    return torch.stack(terms).mean()


def naive_gradients(**knobs: Any) -> dict[str, Tensor]:
    model = tiny_model().double()
    naive_loss(model, **knobs).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_near(ours: dict[str, Tensor], theirs: dict[str, Tensor], tolerance: float) -> None:
    """Equal up to `tolerance` of the largest entry."""
    assert ours.keys() == theirs.keys()
    scale = max(value.abs().max().item() for value in theirs.values())
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name].double(), value.double(), atol=tolerance * scale, rtol=0)


@pytest.mark.parametrize(
    "knobs",
    [
        {},
        {"temperature": 0.8, "behaviour_weight": {"cap": 1.2}},
        {"behaviour_weight": {"cap": 1.2, "mode": "mask"}},
        {"behaviour_weight": {"level": "sequence"}},
        {"behaviour_weight": {"level": "sequence", "cap": 1.1, "mode": "mask"}},
        {"use_decoupled_loss": False},
        {"use_decoupled_loss": False, "temperature": 1.3, "eps_clip_higher": 0.4, "c_clip": 1.1},
        {"entropy_coefficient": 0.3},
        {"kl": {"place": "loss", "estimator": "k1", "kl_ctl": 0.7}},
        {"kl": {"place": "loss", "estimator": "k2", "kl_ctl": 0.7}},
        {"kl": {"place": "loss", "estimator": "k3", "kl_ctl": 0.7}, "entropy_coefficient": 0.1},
    ],
    ids=str,
)
def test_gradient_is_that_of_the_written_formula(tmp_path: Path, knobs: dict[str, Any]) -> None:
    """Each option, with baselines and the mean over all action tokens, against autograd in float64."""
    first = tmp_path / "first"
    tiny_model(seed=7).save_pretrained(first)
    trainer = make_trainer(
        save_tiny(tmp_path / "now"), first=first, micro_batch_tokens=50, logprob_chunk_tokens=7, **knobs
    )
    metrics = trainer.update(*random_rows(), version=2)
    assert_near(gradients(trainer), naive_gradients(**knobs), 1e-5)
    if knobs.get("use_decoupled_loss", True):
        assert metrics["policy/ratio"] == 1.0
    else:
        assert metrics["policy/clip_fraction"] > 0.1
    if knobs.get("c_clip"):
        assert metrics["policy/dual_clip_fraction"] > 0.1


GAE: dict[str, Any] = {"advantage": {"type": "gae", "gae_lambda": 0.9, "discount": 0.95, "normalisation": "none"}}


@pytest.mark.parametrize("kind", ["value-head", "own"])
def test_gradient_with_a_critic_is_that_of_the_written_formula(tmp_path: Path, kind: str) -> None:
    """Values of action tokens, GAE, value loss and what of it reaches the trunk, against autograd in float64."""
    trainer = make_trainer(
        save_tiny(tmp_path), micro_batch_tokens=50, critic={"model": kind, "value_norm": "none"}, **GAE
    )
    critic = trainer._learner.critic
    assert critic is not None
    with torch.no_grad():
        critic.head.weight.copy_(torch.linspace(-0.1, 0.1, 32))
    head = torch.linspace(-0.1, 0.1, 32, dtype=torch.float32).double().requires_grad_()
    trainer.update(*random_rows(), version=2)

    rows, scores = random_rows()
    policy, other = tiny_model().double(), tiny_model().double()
    success = {(score.trajectory_id, score.turn): score.success for score in scores}
    of_policy, of_value = [], []
    for row in rows:
        ids = torch.tensor([row.token_ids])
        logprobs = policy(ids).logits[0].log_softmax(-1)
        hidden = (policy if kind == "value-head" else other).base_model(ids).last_hidden_state[0]
        actions = [(t, k) for k, turn in enumerate(row.turns) for t in range(turn.start, turn.end)]
        values = torch.stack([hidden[t - 1] @ head for t, _ in actions])
        carried, after = 0.0, 0.0
        for (t, k), value in reversed(list(zip(actions, values, strict=True))):
            last = t == row.turns[k].end - 1
            reward = 2 * success[row.trajectory_id, k] - 1 if last else 0.0
            discount = 1.0 if last else 0.95
            carried = reward + discount * after - value.item() + discount * 0.9 * carried
            after = value.item()
            logp = logprobs[t - 1, row.token_ids[t]]
            weight = math.exp(logp.item() - row.logprobs[t])
            of_policy.append(-weight * torch.exp(logp - logp.detach()) * carried)
            of_value.append((value - (carried + after)) ** 2 / 2)
    coefficient = 0.1 if kind == "value-head" else 1.0
    (torch.stack(of_policy).mean() + coefficient * torch.stack(of_value).mean()).backward()
    assert_near(gradients(trainer), {n: p.grad for n, p in policy.named_parameters() if p.grad is not None}, 1e-5)
    assert head.grad is not None
    assert critic.head.weight.grad is not None
    torch.testing.assert_close(critic.head.weight.grad[0].double(), head.grad, atol=1e-5, rtol=1e-4)
    if critic.own is not None:
        mine = {n: p.grad for n, p in critic.own.base_model.named_parameters() if p.grad is not None}
        assert_near(mine, {n: p.grad for n, p in other.base_model.named_parameters() if p.grad is not None}, 1e-5)


EVERYTHING: dict[str, Any] = {
    **GAE,
    "critic": {"model": "own"},
    "kl": {"kl_ctl": 0.1, "adaptive": True, "reference": "ema", "ema_decay": 0.5},
    "behaviour_weight": {"level": "sequence", "cap": 1.1},
    "entropy_coefficient": 0.1,
    "mask_truncated": True,
}


@pytest.mark.parametrize("knobs", [{"micro_batch_tokens": 1}, {"micro_batch_tokens": 60}, {"logprob_chunk_tokens": 5}])
@pytest.mark.parametrize(
    "options", [{}, EVERYTHING, {**GAE, "critic": {}, "kl": {"kl_ctl": 0.1, "place": "loss"}}], ids=lambda o: len(o)
)
def test_gradient_does_not_depend_on_the_batching(
    tmp_path: Path, knobs: dict[str, Any], options: dict[str, Any]
) -> None:
    """How much fits into memory must not change what is learned: padding, accumulation and chunks are neutral."""
    folder = save_tiny(tmp_path)
    whole, parts = make_trainer(folder, **options), make_trainer(folder, **options, **knobs)
    rows, scores = random_rows()
    whole.update(rows, scores, version=2)
    parts.update(rows[::-1], scores[::-1], version=2)
    assert_near(gradients(parts), gradients(whole), 1e-6)


def test_order_of_rows_changes_no_bit(tmp_path: Path) -> None:
    """Shards are written as episodes end; training sorts them."""
    folder = save_tiny(tmp_path)
    first, second = make_trainer(folder, ppo_n_minibatches=2), make_trainer(folder, ppo_n_minibatches=2)
    rows, scores = random_rows()
    first.update(rows, scores, version=2)
    second.update(rows[::-1], scores[::-1], version=2)
    assert all(torch.equal(value, weights(second)[name]) for name, value in weights(first).items())


@pytest.mark.parametrize("options", [{}, {**EVERYTHING, "epochs": 2}, {**GAE, "critic": {}}], ids=lambda o: len(o))
def test_another_process_continues_bit_for_bit(tmp_path: Path, options: dict[str, Any]) -> None:
    """The promise: from stored state and data the same weights, moments and draws as without the interruption."""
    folder, knobs = save_tiny(tmp_path / "start"), {"ppo_n_minibatches": 2, "micro_batch_tokens": 60, **options}
    trainer = make_trainer(folder, **knobs)
    for number in (1, 2):
        trainer.update(*random_rows(seed=number), version=number)
        trainer.save(tmp_path / f"model{number}", tmp_path / f"state{number}")
    script = f"""
from pathlib import Path
from tests.ppo_helpers import random_rows
from tests.test_ppo_trainer import make_trainer
here = Path({str(tmp_path)!r})
trainer = make_trainer(here / "start", **{knobs!r})
trainer.update(*random_rows(seed=1), version=1)
trainer.save(here / "again1", here / "again_state1")
trainer.load(here / "model1", here / "state1", seed=99, first=here / "start")
trainer.update(*random_rows(seed=2), version=2)
trainer.save(here / "again2", here / "again_state2")
"""
    subprocess.run([sys.executable, "-c", script], check=True, cwd=Path(__file__).parents[1])
    for number in (1, 2):
        for mine, other in (("model", "again"), ("state", "again_state")):
            ours, theirs = tmp_path / f"{mine}{number}", tmp_path / f"{other}{number}"
            names = sorted(path.name for path in ours.iterdir())
            assert names == sorted(path.name for path in theirs.iterdir())
            assert [name for name in names if (ours / name).read_bytes() != (theirs / name).read_bytes()] == []
    files = {path.name for path in (tmp_path / "state2").iterdir()}
    assert ("critic.safetensors" in files, "reference.safetensors" in files) == ("critic" in options, "kl" in options)


def test_the_proximal_pass_of_the_first_minibatch_changes_nothing(tmp_path: Path) -> None:
    """It is skipped: with one minibatch there is none at all, with two half of one, and w and ratio are the same."""
    folder, lines = save_tiny(tmp_path), list[str]()
    rows, scores = random_rows()
    once = make_trainer(folder)
    once.update(rows, scores, version=2, progress=lines.append)
    assert lines[0].startswith("minibatch 1 of 1")
    all_of_them = make_trainer(folder, epochs=2)  # an epoch more needs the stored ones
    metrics = all_of_them.update(rows, scores, version=2, progress=lines.append)
    assert lines[1].startswith("proximal logprobs of 16 trajectories")
    assert metrics["policy/ratio"] != 1.0

    reference = make_trainer(folder)  # the same update, its proximal logprobs computed before
    learner, samples = reference._learner, build_samples(rows, scores, Reward())
    indices = draw_minibatches(samples, 1, learner.generator)[0]
    prepared = Preparation(learner, PPO(advantage=Advantage(normalisation="none"), epochs=2), 1.0, nullcontext())
    columns = prepared.prepare(samples, [[indices], [indices]]).columns
    assert all(column.proximal is not None for column in columns)
    reference._stepper.take(make_minibatch(samples, columns, indices, 16384, learner.device))
    assert_near(gradients(once), gradients(reference), 1e-6)


def test_plain_ppo_needs_no_proximal_pass(tmp_path: Path) -> None:
    """Nor does the option for data that are exactly on-policy; the mismatch is reported all the same."""
    options: list[dict[str, Any]] = [{"use_decoupled_loss": False}, {"recompute_logprob": False}]
    for knobs in options:
        lines: list[str] = []
        metrics = make_trainer(save_tiny(tmp_path), **knobs).update(*random_rows(), version=2, progress=lines.append)
        assert lines[0].startswith("minibatch 1 of 1")
        assert metrics["proximal/mean_difference"] > 0.1


def test_epochs_pass_over_the_data_again(tmp_path: Path) -> None:
    """Sample reuse: other minibatches, the same proximal logprobs; the ratio leaves 1."""
    trainer = make_trainer(save_tiny(tmp_path), ppo_n_minibatches=2, epochs=3)
    metrics = trainer.update(*random_rows(), version=2)
    assert trainer._learner.steps == 6
    assert metrics["policy/kl_proximal"] > 0
    assert metrics["tokens/padding_share"] < 0.5


def test_early_stop_spares_the_policy_and_counts(tmp_path: Path) -> None:
    """Plain PPO on rows whose behaviour logprobs are far too low: the mean ratio is above 5."""
    rows, scores = random_rows()
    far = [replace(row, logprobs=[-20.0 if sampled else 0.0 for sampled in row.action_mask]) for row in rows]
    trainer = make_trainer(save_tiny(tmp_path), use_decoupled_loss=False, critic={"model": "own"}, **GAE)
    before, critic = weights(trainer), trainer._learner.critic
    metrics = trainer.update(far, scores, version=2)
    assert metrics["policy/early_stopped"] == 1.0
    assert all(torch.equal(value, weights(trainer)[name]) for name, value in before.items())
    assert critic is not None
    assert critic.head.weight.any()  # values have no ratio: a critic of its own learns
    bold = make_trainer(save_tiny(tmp_path), use_decoupled_loss=False, early_stop_imp_ratio=None)
    assert bold.update(far, scores, version=2)["policy/early_stopped"] == 0.0
    assert not torch.equal(before["lm_head.weight"], weights(bold)["lm_head.weight"])


@pytest.mark.parametrize("critic", ["value-head", "own"])
def test_a_ratio_that_overflows_is_left_out_like_any_that_is_too_far(tmp_path: Path, critic: str) -> None:
    """exp(200) is infinite and its gradient is no number: the minibatch is skipped, the run goes on."""
    rows, scores = random_rows()
    far = [replace(row, logprobs=[-200.0 if sampled else 0.0 for sampled in row.action_mask]) for row in rows]
    trainer = make_trainer(save_tiny(tmp_path), use_decoupled_loss=False, critic={"model": critic}, **GAE)
    before = weights(trainer)
    assert trainer.update(far, scores, version=2)["policy/early_stopped"] == 1.0
    assert all(torch.equal(value, weights(trainer)[name]) for name, value in before.items())


def test_a_fixed_reference_must_be_given(tmp_path: Path) -> None:
    """Going on from a later checkpoint, the policy would be compared with itself."""
    trainer = make_trainer(save_tiny(tmp_path / "start"), kl={"kl_ctl": 0.1})
    trainer.update(*random_rows(), version=0)
    trainer.save(tmp_path / "model", tmp_path / "state")
    with pytest.raises(ValueError, match="give its folder as `first`"):
        trainer.load(tmp_path / "model", tmp_path / "state", seed=1)


def test_an_estimator_that_gives_a_critic_nothing_to_learn(tmp_path: Path) -> None:
    """One's own estimator may use a critic; then it says what the critic should have said."""
    register_advantage("no-returns", group)
    trainer = make_trainer(save_tiny(tmp_path), advantage={"type": "no-returns"}, critic={})
    with pytest.raises(ValueError, match="no-returns gives no returns"):
        trainer.update(*random_rows(), version=0)


def test_kl_in_the_reward_pulls_towards_the_reference(tmp_path: Path) -> None:
    """Without any other signal, the policy moves to the reference policy; the coefficient adapts."""
    first = tmp_path / "first"
    tiny_model(seed=7).save_pretrained(first)
    options: dict[str, Any] = {
        "kl": {"place": "reward", "kl_ctl": 1.0, "adaptive": True, "target": 1.0, "horizon": 100.0}
    }
    trainer = make_trainer(save_tiny(tmp_path / "now"), Optimizer(lr=3e-3), first=first, **options)
    rows, _ = random_rows()
    scores = [score for row in rows for score in make_scores(row.trajectory_id, *[1.0] * len(row.turns))]
    history = [trainer.update(rows, scores, version=2) for _ in range(6)]
    assert history[0]["kl/kl_ctl"] == 1.0
    assert history[1]["kl/kl_ctl"] == pytest.approx(1 + 0.2 * len(rows) / 100)
    assert history[-1]["policy/kl_reference"] < history[0]["policy/kl_reference"]


def test_a_moving_reference_follows(tmp_path: Path) -> None:
    """After an update it is the mean of itself and the policy, with a decay of 0.99; a fixed one stays."""
    folder = save_tiny(tmp_path)
    for reference, share in (("ema", 0.01), ("fixed", 0.0)):
        options: dict[str, Any] = {"kl": {"kl_ctl": 0.1, "place": "loss", "reference": reference}}
        trainer = make_trainer(folder, **options)
        before = weights(trainer)["lm_head.weight"]
        trainer.update(*random_rows(), version=2)
        held, after = trainer._learner.reference, weights(trainer)["lm_head.weight"]
        assert held is not None
        torch.testing.assert_close(held.model.state_dict()["lm_head.weight"], before + share * (after - before))


@pytest.mark.parametrize("kind", ["value-head", "own"])
def test_a_critic_learns_to_foresee_returns(tmp_path: Path, kind: str) -> None:
    """The same data again and again: it explains ever more, so normalised values come back to units of returns."""
    critic = {"model": kind, "lr": 1e-2 if kind == "value-head" else 3e-3, "value_eps_clip": 10.0}
    trainer = make_trainer(save_tiny(tmp_path), Optimizer(lr=1e-5), critic=critic, **GAE)
    explained = [trainer.update(*random_rows(), version=2)["value/explained_variance"] for _ in range(25)]
    assert explained[-1] > 0.25 > 0.01 > abs(explained[0])  # a head alone, on random features, explains a third


@pytest.mark.parametrize(("kind", "mean", "std"), [("exp", 0.0, None), ("ma", 7 / 3, None), ("none", 0.0, 1.0)])
def test_value_norm_by_hand(kind: str, mean: float, std: float | None) -> None:
    """Batches 1, 1 and 5 with beta 0.6: (0.4 * 0.6 * 1 + 0.4 * 5) / 0.64 … debiased; ma counts returns."""
    norm = ValueNorm(kind, 0.6)
    norm.update(torch.tensor([1.0, 1.0]))
    norm.update(torch.tensor([5.0]))
    if kind == "exp":
        mean = (0.4 * 0.6 * 1 + 0.4 * 5) / (0.4 * 0.6 + 0.4)
        std = math.sqrt((0.4 * 0.6 * 1 + 0.4 * 25) / 0.64 - mean**2)
    if kind == "ma":
        std = math.sqrt(27 / 3 - mean**2)
    assert std is not None
    assert (norm.mean, norm.std) == pytest.approx((mean, std))
    assert norm.denormalise(norm.normalise(3.0)) == pytest.approx(3.0)


def test_stale_trajectories_are_left_out_and_counted(tmp_path: Path) -> None:
    """What counts is the oldest token's version in the rows, against the version in training."""
    rows, scores = random_rows()  # versions 0, 1, 2 in turn
    knobs = PPO(device="cpu", threads=1, ppo_n_minibatches=1)
    trainer = Trainer(knobs, UNCLIPPED, Reward(), max_head_offpolicyness=1)
    trainer.load(save_tiny(tmp_path), None, seed=1)
    metrics = trainer.update(rows, scores, version=2)
    assert metrics["trajectories/too_old"] == sum(row.policy_version == 0 for row in rows) == 6
    assert metrics["trajectories"] == 10
    assert metrics["staleness/max"] == 1
    with pytest.raises(ValueError, match=r"16 of 16 .* rollout.max_head_offpolicyness=1 versions before 9"):
        trainer.update(rows, scores, version=9)


def test_all_wrong_raises_the_alarm(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A broken judge or prompt looks just so: it must not pass in silence."""
    rows, _ = random_rows()
    scores = [score for row in rows for score in make_scores(row.trajectory_id, *[0.0] * len(row.turns))]
    metrics = make_trainer(save_tiny(tmp_path)).update(rows, scores, version=2)
    assert metrics["reward/all_minimal"] == 1.0
    assert "every reward is minimal" in caplog.text


@pytest.mark.parametrize("part", ["reference", "critic"])
def test_other_models_that_are_broken_name_the_trajectories(tmp_path: Path, part: str) -> None:
    """A NaN in the reference policy or the critic is found before the weights are touched."""
    options = {"kl": {"kl_ctl": 0.1, "place": "loss"}} if part == "reference" else {**GAE, "critic": {"model": "own"}}
    trainer = make_trainer(save_tiny(tmp_path), **options)
    learner, before = trainer._learner, weights(trainer)
    model = learner.reference.model if learner.reference else learner.critic.own if learner.critic else None
    assert model is not None
    with torch.no_grad():
        next(model.parameters())[10] = float("nan")
    rows = [make_trajectory("hit", [[10, 11]]), make_trajectory("spared", [[12, 13]])]
    what = "reference logprobs" if part == "reference" else "values"
    with pytest.raises(ValueError, match=f"infinite {what} with the trajectories hit: nothing was trained"):
        trainer.update(rows, make_scores("hit", 1) + make_scores("spared", 0), version=0)
    assert all(torch.equal(value, weights(trainer)[name]) for name, value in before.items())


def test_state_of_other_settings_is_refused(tmp_path: Path) -> None:
    """A critic cannot go on from a state saved without one."""
    folder = save_tiny(tmp_path / "start")
    trainer = make_trainer(folder)
    trainer.update(*random_rows(), version=0)
    trainer.save(tmp_path / "model", tmp_path / "state")
    with pytest.raises(ValueError, match=r"no critic.safetensors in .*other settings of ppo.*policy.path"):
        make_trainer(folder, **GAE, critic={}).load(tmp_path / "model", tmp_path / "state", seed=1)


def test_loaded_weights_are_aligned(tmp_path: Path) -> None:
    """Vector code may sum in another order where memory is not aligned, as in the mapped file; bits would differ."""
    trainer = make_trainer(save_tiny(tmp_path))
    assert {parameter.data_ptr() % 64 for parameter in trainer._learner.model.parameters()} == {0}


def test_saved_folder_holds_what_the_contract_says(tmp_path: Path) -> None:
    """A plain transformers folder with float32 weights in one file, and a state without pickles."""
    trainer = make_trainer(save_tiny(tmp_path / "start"))
    trainer.update(*random_rows(), version=0)
    trainer.save(tmp_path / "model", tmp_path / "state")
    assert {path.name for path in (tmp_path / "model").iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
    }
    assert {tensor.dtype for tensor in load_file(tmp_path / "model" / "model.safetensors").values()} == {torch.float32}
    assert {path.name for path in (tmp_path / "state").iterdir()} == {"optimizer.safetensors", "state.json"}
    assert json.loads((tmp_path / "state" / "state.json").read_text()) == {"steps": 1, "kl_ctl": 0.0}


@pytest.mark.parametrize("tied", [False, True])
def test_canary_tells_weights_apart(tmp_path: Path, tied: bool) -> None:
    """The same for the same weights, also after save and load and whatever the global RNG; another after a step."""
    trainer = make_trainer(save_tiny(tmp_path / "start", tied=tied))
    before = trainer.canary()
    torch.rand(1)
    assert trainer.canary() == before
    trainer.update(*random_rows(), version=0)
    after = trainer.canary()
    assert after.token_ids == before.token_ids
    assert max(abs(a - b) for a, b in zip(after.logprobs, before.logprobs, strict=True)) > 1e-4
    trainer.save(tmp_path / "model", tmp_path / "state")
    assert make_trainer(tmp_path / "model").canary() == after


def test_canary_is_the_models_own_opinion(tmp_path: Path) -> None:
    """64 ids and the logprobs of the last 63 at temperature 1, though training is at another."""
    canary = make_trainer(save_tiny(tmp_path), temperature=0.5).canary()
    ids = torch.tensor(canary.token_ids)
    logprobs = tiny_model()(ids[None]).logits[0, :-1].log_softmax(-1)
    assert (len(canary.token_ids), len(canary.logprobs)) == (64, 63)
    torch.testing.assert_close(
        torch.tensor(canary.logprobs), logprobs.gather(-1, ids[1:, None])[:, 0], atol=1e-5, rtol=0
    )


def test_updates_raise_the_probability_of_what_is_rewarded(tmp_path: Path) -> None:
    """The sign of everything: after the prompt, token 20 wins and 21 loses."""
    trainer = make_trainer(save_tiny(tmp_path), Optimizer(lr=3e-3), ppo_n_minibatches=2)
    names = [f"{problem}{sample}" for problem in "pqrs" for sample in range(4)]
    answers = {name: 20 + int(name[1]) % 2 for name in names}
    rows = [make_trajectory(name, [[answers[name]]], problem=name[0], logprob=-4.0) for name in names]
    scores = [score for name in names for score in make_scores(name, float(answers[name] == 20))]
    prompt = torch.tensor([[1, 2, 3]])

    def chances() -> tuple[float, float]:
        probabilities = trainer._learner.model(prompt).logits[0, -1].softmax(-1)
        return probabilities[20].item(), probabilities[21].item()

    good, bad = chances()
    for version in range(5):
        trainer.update(rows, scores, version)
    assert chances()[0] > 3 * good
    assert chances()[1] < bad / 3


def test_autocast_and_checkpointing_change_little(tmp_path: Path) -> None:
    """The set-up for large models learns the same thing, with float32 weights and moments."""
    folder = save_tiny(tmp_path)
    plain = make_trainer(folder)
    large = make_trainer(folder, autocast="bfloat16", gradient_checkpointing=True, logprob_chunk_tokens=7)
    for trainer in (plain, large):
        trainer.update(*random_rows(), version=0)
    ours, theirs = (torch.cat([g.flatten() for g in gradients(t).values()]) for t in (large, plain))
    assert ours.dtype == torch.float32
    assert torch.cosine_similarity(ours, theirs, dim=0) > 0.99
    assert not torch.equal(ours, theirs)


def test_learning_rate_warms_up_across_loads(tmp_path: Path) -> None:
    """It rises by steps, not updates, and a restart does not begin again."""
    optimizer = Optimizer(lr=1.0e-3, warmup_steps=4)
    trainer = make_trainer(save_tiny(tmp_path / "start"), optimizer, ppo_n_minibatches=2)
    assert trainer.update(*random_rows(), version=0)["optimizer/lr"] == pytest.approx(0.5e-3)
    trainer.save(tmp_path / "model", tmp_path / "state")
    trainer.load(tmp_path / "model", tmp_path / "state", seed=1)
    assert [trainer.update(*random_rows(), version=0)["optimizer/lr"] for _ in range(2)] == pytest.approx([1e-3, 1e-3])


def test_gradients_are_clipped(tmp_path: Path) -> None:
    """The step sees the bound, the metrics the norm before it."""
    trainer = make_trainer(save_tiny(tmp_path), Optimizer(max_grad_norm=1e-3))
    metrics = trainer.update(*random_rows(), version=0)
    assert torch.nn.utils.get_total_norm(list(gradients(trainer).values())).item() == pytest.approx(1e-3, rel=1e-2)
    assert metrics["optimizer/grad_norm"] > 0.01


def test_infinite_loss_names_the_trajectory_and_spares_the_weights(tmp_path: Path) -> None:
    """exp(proximal - behaviour) overflows at a logprob of -200."""
    trainer = make_trainer(save_tiny(tmp_path))
    rows, scores = random_rows()
    broken = replace(rows[5], logprobs=[-200.0 if sampled else 0.0 for sampled in rows[5].action_mask])
    before = weights(trainer)
    with pytest.raises(ValueError, match="infinite losses with the trajectories t005: the step was not taken"):
        trainer.update([*rows[:5], broken, *rows[6:]], scores, version=0)
    assert all(torch.equal(value, weights(trainer)[name]) for name, value in before.items())


def test_gradient_that_is_not_a_number_spares_the_weights(tmp_path: Path) -> None:
    """The losses may be fine and the backward pass still fail; then all of the minibatch is suspect."""
    trainer = make_trainer(save_tiny(tmp_path))
    before = weights(trainer)
    next(trainer._learner.model.parameters()).register_hook(lambda gradient: gradient * float("nan"))
    with pytest.raises(ValueError, match=r"infinite gradients with the trajectories t000, t001, .* and 11 more"):
        trainer.update(*random_rows(), version=0)
    assert all(torch.equal(value, weights(trainer)[name]) for name, value in before.items())


def test_broken_weights_are_found_before_training(tmp_path: Path) -> None:
    """A policy that is NaN is reported from the proximal pass, here with a KL reward that needs it of all."""
    trainer = make_trainer(save_tiny(tmp_path), kl={"kl_ctl": 0.1})
    with torch.no_grad():
        next(trainer._learner.model.parameters())[10] = float("nan")
    rows = [make_trajectory("hit", [[10, 11]]), make_trajectory("spared", [[12, 13]])]
    with pytest.raises(ValueError, match="infinite proximal logprobs with the trajectories hit:"):
        trainer.update(rows, make_scores("hit", 1) + make_scores("spared", 0), version=0)


def test_nothing_to_train_on_is_an_error(tmp_path: Path) -> None:
    """An iteration whose episodes all failed does not pass for an update."""
    trainer = make_trainer(save_tiny(tmp_path))
    with pytest.raises(ValueError, match="none of 1 trajectories can be trained on: all failed"):
        trainer.update([make_trajectory("t", [[10]], status="failed")], [], version=0)


def test_what_options_leave_out_leaves_the_policy_as_it_is(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A filter that rejects every group must not bring the run to an end; it is told loudly."""
    trainer = make_trainer(save_tiny(tmp_path), mask_truncated=True)
    before = weights(trainer)
    cut = make_trajectory("cut", [[10]], status="truncated")
    cut = replace(cut, turns=[replace(cut.turns[0], finish_reason="length")])
    metrics = trainer.update([make_trajectory("t", [[10]], status="rejected"), cut], make_scores("cut", 1), version=0)
    assert set(metrics.values()) == {0.0}
    assert all(torch.equal(value, weights(trainer)[name]) for name, value in before.items())
    assert "nothing to train on" in caplog.text


def test_update_before_load_is_an_error() -> None:
    """There is no default policy."""
    with pytest.raises(ValueError, match="call load first"):
        Trainer(PPO(), Optimizer(), Reward()).update(*random_rows(), version=0)


def test_folders_that_are_not_what_they_should_be(tmp_path: Path) -> None:
    """No model, a model with weights missing (which transformers would make up), the state of another model."""
    with pytest.raises(ValueError, match=r"no config\.json"):
        make_trainer(tmp_path)
    trainer = make_trainer(save_tiny(tmp_path / "qwen3"))
    trainer.update(*random_rows(), version=0)
    trainer.save(tmp_path / "model", tmp_path / "state")
    with pytest.raises(ValueError, match="not that of this model"):
        trainer.load(save_tiny(tmp_path / "qwen2", "qwen2"), tmp_path / "state", seed=1)
    file = tmp_path / "model" / "model.safetensors"
    tensors = load_file(file)
    tensors.pop("lm_head.weight")
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(ValueError, match=r"lacks the weights \['lm_head.weight'\]"):
        trainer.load(tmp_path / "model", None, seed=1)


def test_progress_is_told(tmp_path: Path) -> None:
    """One line for the proximal pass and one for each step."""
    lines: list[str] = []
    make_trainer(save_tiny(tmp_path), ppo_n_minibatches=2).update(*random_rows(), version=0, progress=lines.append)
    assert [line.split(":")[0].split(" of ")[0] for line in lines] == [
        "proximal logprobs",
        "minibatch 1",
        "minibatch 2",
    ]
