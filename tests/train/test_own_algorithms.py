"""Algorithms and losses of one's own: what they may do, and their mistakes, which are told before anything starts."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from configs import ConfigError, load
from configs.algorithms import read_algorithm
from tasks.train.advantages import Observed, against_group
from tasks.train.algorithms import check_algorithm
from tasks.train.algorithms.algorithm import Algorithm, Assignment
from tasks.train.algorithms.ppo import PPO
from tasks.train.components import Component, LossInputs, LossOutputs
from tasks.train.samples import Sample
from tests.support.train_helpers import assert_near, gradients, make_trainer, save_tiny
from tests.train.test_algorithms import rows


class Halved(Algorithm):
    """An algorithm of a user's: half of the reward, and cross-entropy with a weight that its knob gives."""

    def __init__(self, context: Any, weight: float = 0.5, component: str = "ce", mistake: str = "") -> None:
        super().__init__(context)
        self.weight, self.name, self.mistake = weight, component, mistake
        self.per = "episode" if mistake == "per" else "tokens"  # type: ignore[assignment]
        self.uses = () if mistake == "undeclared" else ("logprobs",)
        self.recomputes, self.entropy_gradient, self.early_stop = True, False, None

    def assign(self, samples: Sequence[Sample], observed: Sequence[Observed]) -> Assignment:
        if self.mistake == "raise":
            raise ZeroDivisionError
        advantages = [sample.returns[sample.turn_of_action] / 2 for sample in samples]
        if self.mistake == "lengths":
            advantages = [np.zeros(len(sample.actions) + 1) for sample in samples]
        given = [np.full(len(sample.actions), self.weight) for sample in samples]
        return Assignment(advantages, {**self.share(advantages).weights, self.name: given})

    def component(self, name: str) -> Component:
        own = Component(lambda inputs: LossOutputs(inputs.logp * 0))
        return own if name == "weight-only" else super().component(name)

    def loss(self, inputs: LossInputs) -> LossOutputs:
        loss = -inputs.advantages * inputs.logp
        if self.mistake == "tensor":
            return loss  # type: ignore[return-value]
        if self.mistake == "undeclared":
            loss = loss * inputs.behaviour.exp()
        return LossOutputs(loss.mean() if self.mistake == "mean" else loss, {"surprise": -inputs.logp.detach()})


def doubled(inputs: LossInputs) -> LossOutputs:
    """A loss of a user's."""
    return LossOutputs(-2 * inputs.advantages * inputs.logp)


class Clipped(PPO):
    """A class of a user's on top of PPO."""

    recomputes, entropy_gradient, early_stop = False, False, None

    def assign(self, samples: Sequence[Sample], observed: Sequence[Observed]) -> Assignment:
        return self.share(against_group(samples, observed))

    def loss(self, inputs: LossInputs) -> LossOutputs:
        return Algorithm.loss(self, inputs)


def named_entropy(inputs: LossInputs) -> LossOutputs:
    """A loss of a user's with a metric that the update has, too."""
    return LossOutputs(-inputs.advantages * inputs.logp, {"ratio": inputs.logp.exp(), "entropy": inputs.logp})


def test_an_algorithm_of_ones_own(tmp_path: Path) -> None:
    """It is named by its module, the numbers that its loss returns are metrics, and it may add a component."""
    for args in ({}, {"component": "weight-only"}):
        trainer = make_trainer(save_tiny(tmp_path), type=f"{__name__}:Halved", args=args)
        metrics = trainer.update(*rows(), version=2)
        assert (metrics["trajectories"], metrics["policy/surprise"] > 1) == (16, True)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"weight": math.nan}, r"gave NaN or infinite weights of ce to the trajectories made-up 0"),
        ({"component": "cee"}, r"component 'cee', which is unknown, did you mean 'ce'\?; there are ce, ref_kl"),
        ({"wait": 1}, r"algorithm\.args\.wait=1: .* takes no such argument; it takes weight"),
        ({"mistake": "lengths"}, r"gave 5 advantages to made-up 0, which has 4 action tokens"),
        ({"mistake": "raise"}, r"failed on made-up episodes: ZeroDivisionError.*test_own_algorithms\.py, line \d+"),
        ({"mistake": "mean"}, r"the loss of the component rl: loss has the shape \[\], but there are 4 tokens"),
        ({"mistake": "tensor"}, r"the loss of the component rl returned Tensor: return LossOutputs"),
        ({"mistake": "undeclared"}, r"its loss reads the logprobs of sampling: name them in its attribute `uses`"),
        ({"mistake": "per"}, r"per='episode': a loss is divided by 'tokens', 'episodes' or a number above 0"),
        ({"loss": "doubled"}, r"no metric `ratio`, but algorithm\.early_stop_imp_ratio limits it: return it"),
        ({"loss": "named_entropy"}, r"the loss of the component rl: a metric cannot be called 'entropy': rename it"),
    ],
    ids=str,
)
def test_mistakes_in_ones_own_are_told_before_anything_starts(args: dict[str, Any], message: str) -> None:
    """Those of a class, by its arguments, and those of a loss beside the class of PPO."""
    own: dict[str, Any] = {"type": f"{__name__}:Halved", "args": args}
    if loss := args.get("loss"):
        own = {"type": "ppo", "loss": f"{__name__}:{loss}"}
    with pytest.raises(ValueError, match=message):
        check_algorithm(read_algorithm(own))


def test_knobs_beside_a_class_or_loss_of_ones_own() -> None:
    """Arguments of the class are `args`; a loss may be another function, which does not see the clip.

    A class on top of PPO says itself what it needs.
    """
    check_algorithm(read_algorithm({"type": "ppo", "loss": f"{__name__}:doubled", "early_stop_imp_ratio": None}))
    check_algorithm(read_algorithm({"type": f"{__name__}:Clipped"}))
    own = ["algorithm.type=my_module:Mine"]
    assert load("smoke", [*own, "algorithm.loss=a:b"]).algorithm.type == "my_module:Mine"
    with pytest.raises(
        ConfigError, match=r"scale=2: unknown key.*; arguments of your class are algorithm\.args=\{scale"
    ):
        load("smoke", [*own, "algorithm.scale=2"])
    with pytest.raises(ValueError, match=r"eps_clip=0\.3 has no effect with a loss of your own"):
        read_algorithm({"type": "grpo", "loss": "a:b", "eps_clip": 0.3})


def test_a_loss_of_ones_own_replaces_the_policy_loss(tmp_path: Path) -> None:
    """Twice the loss of REINFORCE has twice the gradient."""
    folder, found = save_tiny(tmp_path), []
    for loss in (None, f"{__name__}:doubled"):
        trainer = make_trainer(folder, type="rloo", kl_ctl=0, loss=loss)
        trainer.update(*rows(), version=2)
        found.append(gradients(trainer))
    assert_near(found[1], {name: 2 * value for name, value in found[0].items()}, 1e-5)
