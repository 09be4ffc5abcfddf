"""Options of an update: epochs, early stop, KL, critic, staleness, and filters that leave nothing to train on."""

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from configs.algorithms import PPO
from configs.rollout import Rollout
from tasks.train.advantages import Observed
from tasks.train.algorithms.algorithm import Algorithm, Assignment
from tasks.train.components import LossInputs, LossOutputs
from tasks.train.samples import Sample
from tasks.train.train_state import ValueNorm, adapt
from tests.support.train_helpers import (
    GAE,
    gradients,
    is_unchanged,
    make_scores,
    make_trainer,
    make_trajectory,
    random_rows,
    save_tiny,
    tiny_model,
    weights,
)


def test_epochs_pass_over_the_data_again(tmp_path: Path) -> None:
    """Each epoch draws other minibatches and keeps the proximal logprobs, so the ratio leaves 1.

    One epoch of one minibatch needs no proximal pass, nor has plain PPO one; the mismatch is still reported.
    """
    lines = list[str]()
    trainer = make_trainer(save_tiny(tmp_path), minibatches=2, epochs=3)
    metrics = trainer.update(*random_rows(), version=2, progress=lines.append)
    assert lines.pop().startswith("minibatch 6 of 6")
    assert lines[0].startswith("proximal logprobs of 16 trajectories")
    assert trainer.state.steps == 6
    assert metrics["policy/ratio"] != 1.0
    assert metrics["policy/kl"] > 0
    assert metrics["tokens/padding_share"] < 0.5
    for objective in ("behaviour", "decoupled"):
        lines.clear()
        trainer = make_trainer(tmp_path, objective=objective)
        metrics = trainer.update(*random_rows(), version=2, progress=lines.append)
        assert lines[0].startswith("minibatch 1 of 1")
        assert metrics["proximal/mean_difference"] > 0.1


@pytest.mark.parametrize(("logprob", "critic"), [(-20.0, "own"), (-200.0, "own"), (-200.0, "value-head")])
def test_early_stop_spares_the_policy_and_counts(tmp_path: Path, logprob: float, critic: str) -> None:
    """Behaviour logprobs that are far too low give a mean ratio above 5: the step is skipped and counted.

    Even exp(200), which is infinite and whose gradient is NaN, ends no run.
    """
    rows, scores = random_rows()
    far = [replace(row, logprobs=[logprob if sampled else 0.0 for sampled in row.action_mask]) for row in rows]
    trainer = make_trainer(save_tiny(tmp_path), objective="behaviour", critic={"model": critic}, **GAE)
    before, state = weights(trainer), trainer.state
    assert trainer.update(far, scores, version=2)["policy/early_stopped"] == 1.0
    assert is_unchanged(trainer, before)
    assert state.critic
    assert state.critic.head.weight.any() == (critic == "own")  # values have no ratio: a critic of its own still learns
    if logprob == -20.0:
        bold = make_trainer(tmp_path, objective="behaviour", early_stop_imp_ratio=None)
        assert bold.update(far, scores, version=2)["policy/early_stopped"] == 0.0
        assert not is_unchanged(bold, before)


def test_the_coefficient_of_a_kl_in_the_reward_adapts(tmp_path: Path) -> None:
    """The policy is far from its reference, so the coefficient of the next update is larger by a clipped share."""
    first = tmp_path / "first"
    tiny_model(seed=7).save_pretrained(first)
    kl = {"place": "reward", "kl_ctl": 1.0, "adaptive": True, "target": 1e-3}
    trainer = make_trainer(save_tiny(tmp_path / "now"), version_0=first, kl=kl)
    coefficients = [trainer.update(*random_rows(), version=2)["kl/kl_ctl"] for _ in range(2)]
    assert coefficients == pytest.approx([1.0, 1 + 0.2 * 16 / 10_000])


def test_a_moving_reference_follows(tmp_path: Path) -> None:
    """An `ema` reference becomes 0.99 of itself and 0.01 of the policy after an update; a fixed one stays."""
    folder = save_tiny(tmp_path)
    for reference, share in (("ema", 0.01), ("fixed", 0.0)):
        options: dict[str, Any] = {"kl": {"kl_ctl": 0.1, "place": "loss", "reference": reference}}
        trainer = make_trainer(folder, **options)
        before = weights(trainer)["lm_head.weight"]
        trainer.update(*random_rows(), version=2)
        held, after = trainer.state.reference, weights(trainer)["lm_head.weight"]
        assert held is not None
        torch.testing.assert_close(held.state_dict()["lm_head.weight"], before + share * (after - before))


def test_value_norm_by_hand() -> None:
    """Batches 1, 1 and 5 with beta 0.6: the mean is (0.4 * 0.6 * 1 + 0.4 * 5) / 0.64, debiased."""
    norm = ValueNorm(0.6)
    norm.update(torch.tensor([1.0, 1.0]))
    norm.update(torch.tensor([5.0]))
    mean = (0.4 * 0.6 * 1 + 0.4 * 5) / (0.4 * 0.6 + 0.4)
    assert (norm.mean, norm.std) == pytest.approx((mean, math.sqrt((0.4 * 0.6 * 1 + 0.4 * 25) / 0.64 - mean**2)))
    assert norm.denormalise(norm.normalise(3.0)) == pytest.approx(3.0)


def test_stale_trajectories_are_left_out_and_counted(tmp_path: Path) -> None:
    """Staleness is the version in training minus the version of the oldest token, however new the others are."""
    rows, scores = random_rows()  # versions 0, 1, 2 in turn
    versions = [1 if sampled else -1 for sampled in rows[0].action_mask]
    versions[rows[0].turns[0].start] = 0
    rows[0] = replace(rows[0], versions=versions)
    trainer = make_trainer(save_tiny(tmp_path), advantage={}, rollout=Rollout(max_head_offpolicyness=1))
    metrics = trainer.update(rows, scores, version=2)
    assert metrics["trajectories/too_old"] == sum(row.policy_version == 0 for row in rows) == 6
    assert metrics["trajectories"] == 10
    assert metrics["staleness/max"] == 1
    with pytest.raises(ValueError, match=r"16 of 16 .* rollout.max_head_offpolicyness=1 versions before 9"):
        trainer.update(rows, scores, version=9)


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"kl": {"kl_ctl": 0.1}}, "proximal logprobs"),  # the KL reward needs them for all trajectories
        ({"kl": {"kl_ctl": 0.1, "place": "loss"}}, "reference logprobs"),
        ({**GAE, "critic": {"model": "own"}}, "values"),
    ],
    ids=["policy", "reference", "critic"],
)
def test_models_that_are_broken_name_the_trajectories(tmp_path: Path, options: dict[str, Any], what: str) -> None:
    """A NaN in policy, reference policy or critic is found before the weights change."""
    trainer = make_trainer(save_tiny(tmp_path), **options)
    state = trainer.state
    models = {"proximal logprobs": state.model, "values": state.critic and state.critic.own}
    model = models.get(what) or state.reference
    assert model
    with torch.no_grad():
        next(model.parameters())[10] = float("nan")
    rows = [make_trajectory("hit", [[10, 11]]), make_trajectory("spared", [[12, 13]])]
    before = weights(trainer)
    with pytest.raises(ValueError, match=f"infinite {what} with the trajectories hit: nothing was trained"):
        trainer.update(rows, make_scores("hit", 1) + make_scores("spared", 0), version=0)
    assert is_unchanged(trainer, before) == (what != "proximal logprobs")  # NaN is not equal to itself


@pytest.mark.parametrize("other_weights", [False, True])
def test_a_new_optimizer_warms_up_anew(tmp_path: Path, other_weights: bool) -> None:
    """The steps of a fork whose moments go on are counted further; also a fork of its version 0 begins anew."""
    trainer = make_trainer(save_tiny(tmp_path / "start"))
    trainer.update(*random_rows(), version=2)
    trainer.save(tmp_path / "model", state := tmp_path / "state")
    for again in (other_weights, False):
        adapt(state, PPO(), PPO(), other_weights=again)
        counts = json.loads((state / "state.json").read_text())
        assert (counts["steps"] == 0, "optimizer" in counts["anew"]) == (other_weights, other_weights)


@pytest.mark.parametrize(
    ("before", "after", "anew"),
    [
        ({}, {**GAE, "critic": {}}, ["critic"]),
        ({**GAE, "critic": {}}, {**GAE, "critic": {"model": "own"}}, ["critic"]),
        ({"kl": {"kl_ctl": 0.1}}, {"kl": {"kl_ctl": 0.2, "reference": "ema"}}, ["reference"]),
        ({"kl": {"kl_ctl": 0.1, "reference": "ema"}}, {"kl": {"kl_ctl": 0.2, "reference": "ema"}}, []),
    ],
)
def test_a_state_is_continued_with_other_options(
    tmp_path: Path, before: dict[str, Any], after: dict[str, Any], anew: list[str]
) -> None:
    """What the options of a fork need and the state does not have begins anew; moments, steps and RNG go on."""
    trainer = make_trainer(save_tiny(tmp_path / "start"), **before)
    trainer.update(*random_rows(), version=2)
    trainer.save(model := tmp_path / "model", state := tmp_path / "state")
    adapt(state, PPO(**before), PPO(**after))
    assert [part for part in json.loads((state / "state.json").read_text())["anew"] if part in anew] == anew
    forked = make_trainer(model, state=state, version_0=model, **after)
    old, new = trainer.state, forked.state
    assert (new.steps, new.kl_ctl) == (old.steps, PPO(**after).kl.kl_ctl)
    assert torch.equal(new.generator.get_state(), old.generator.get_state())
    step = [next(iter(each.adamw.state.values()))["exp_avg"] for each in (old, new)]
    assert torch.equal(*step)
    forked.update(*random_rows(), version=2)
    forked.save(tmp_path / "model", tmp_path / "again")
    assert "anew" not in json.loads((tmp_path / "again" / "state.json").read_text())
    make_trainer(model, state=tmp_path / "again", version_0=model, **after)  # the next updates find all parts


WITH_RATIOS = ("ppo", "dr_grpo", "reinforce_pp", "dapo", "gspo", "gspo_token", "cispo", "max_rl", "mis", "echo", "opd")


@pytest.mark.parametrize(
    ("name", "logprob"), [*(("grpo", far) for far in (-30.0, -60.0, -300.0)), *((name, -95.0) for name in WITH_RATIOS)]
)
def test_one_wrong_logprob_of_the_engine_is_no_whole_step(tmp_path: Path, name: str, logprob: float) -> None:
    """A token that got worse than its group, whose ratio is exp(25) or overflows, moves the gradient by a bounded part.

    At -95 the run stopped, and named all trajectories of the minibatch.
    """
    rows, scores = random_rows(longest=6)
    scores = [replace(score, success=0.0, reward=0.0) if score.trajectory_id == "t005" else score for score in scores]
    place = rows[5].turns[0].start
    found = []
    for wrong in (False, True):
        logprobs = [logprob if at == place and wrong else value for at, value in enumerate(rows[5].logprobs)]
        trainer = make_trainer(save_tiny(tmp_path), teacher=tmp_path if name == "opd" else None, type=name)
        trainer.update([*rows[:5], replace(rows[5], logprobs=logprobs), *rows[6:]], scores, version=2)
        found.append(torch.cat([value.flatten() for value in gradients(trainer).values()]))
    assert torch.isfinite(found[1]).all()
    assert (found[1] - found[0]).norm() < 10 * found[0].norm()


class Steep(Algorithm):
    """An algorithm of a user's whose gradient overflows where a token was very unlikely."""

    def assign(self, samples: Sequence[Sample], observed: Sequence[Observed]) -> Assignment:
        return self.share([np.ones(len(sample.actions)) for sample in samples])

    def loss(self, inputs: LossInputs) -> LossOutputs:
        return LossOutputs((inputs.logp - inputs.behaviour).exp())


@pytest.mark.parametrize("logprob", [-85.0, -200.0])
def test_a_gradient_that_overflows_names_the_trajectory_that_made_it(tmp_path: Path, logprob: float) -> None:
    """Finite losses may have gradients whose norm is not finite: the largest ones are named, not all of 16."""
    rows, scores = random_rows()
    wrong = replace(rows[5], logprobs=[logprob if sampled else 0.0 for sampled in rows[5].action_mask])
    trainer = make_trainer(save_tiny(tmp_path), type=f"{__name__}:Steep")
    before = weights(trainer)
    remedy = "the step was not taken.*provenance exclude --ids FILE"
    with pytest.raises(ValueError, match=rf"infinite (gradients|losses) with the trajectories t005: {remedy}"):
        trainer.update([*rows[:5], wrong, *rows[6:]], scores, version=2)
    assert is_unchanged(trainer, before)
