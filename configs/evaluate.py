"""The knobs of evaluation, and of retraining, whose gate compares evaluations."""

from typing import Annotated, Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from configs.knobs import Decay, Knobs, Name, NonNegativeInt, Share, Temperature, refuse_idle
from configs.problems import Source

HELD_OUT = "held-out"
"""The name of `problems.held_out` among the evaluation sets."""


class Evaluation(Knobs):
    every: PositiveInt = 10
    """Evaluate on the held-out problems before the first iteration, after each multiple of this number and after the
    last iteration."""
    sets: dict[Name, Source] = {}
    """Evaluation sets by name, in addition to `held-out`; for `evaluate` and `retrain`."""
    samples: NonNegativeInt = 0
    """Number of sampled episodes of each problem, in addition to the greedy one, for pass@k; 0: none. For `evaluate`
    and `retrain`."""
    temperature: Annotated[Temperature, Field(gt=0)] = 1.0
    """Temperature of the sampled episodes, 0.01 to 2."""
    max_failed_share: Share = 0.01
    """Largest share of episodes that failed by the set-up's fault, or of failed verdicts. Above it the evaluation is an
    error, and is played again."""
    fingerprints: dict[Name, str] = {}
    """Versions (`problems/…`) that the sets must have in `retrain`, or `removed`; empty: those of earlier nights."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if HELD_OUT in self.sets:
            raise ValueError(f"sets: {HELD_OUT!r} is the name of problems.held_out: choose another")
        if self.samples == 0:
            refuse_idle(self, "temperature", why="without samples")
        return self


class Gate(Knobs):
    """The checks that decide whether a challenger replaces the champion.

    Intervals are 95 % confidence intervals, paired over the problems of a set.
    """

    measure: Literal["first_turn", "any_turn"] = "first_turn"
    """An episode counts as right if its first answer is right (first_turn), or if any of its answers is (any_turn)."""
    episodes: Literal["greedy", "sampled"] = "greedy"
    """Compare the accuracy of the greedy episode of each problem, or the mean over `evaluation.samples` sampled ones.
    PPO raises that mean, and it depends less on luck: a small update changes many greedy answers."""
    target: Name = "held-out"
    """On this set the challenger must be better: the whole interval of the difference must be above `least_gain`, and
    the p value of McNemar's test (for sampled episodes, of a permutation test) must be small enough for
    `max_by_luck`. The p value is not checked if `least_gain` is negative."""
    max_by_luck: Annotated[float, Field(gt=0, le=0.5)] | None = 0.05
    """Largest probability that a challenger without any gain is promoted, over all nights until a promotion: the nights
    share it, the first one gets a quarter (p at most 0.025), and each later one less. The interval on the target has
    the same confidence. Empty: p at most 0.05 on each night, by which luck promotes one in a few dozen nights."""
    least_gain: Annotated[float, Field(ge=-1, le=1)] = 0.0
    """Least gain on the target; 0 asks for any certain gain."""
    guarded: list[Name] | None = None
    """On these sets the challenger must not be worse; empty: on all sets."""
    margin: Share = 0.05
    """On guarded sets the whole interval of the difference must be above minus this. Small sets have wide intervals:
    about ±0.06 with 200 problems, ±0.03 with 1,000."""
    max_kl: PositiveFloat = 1.0
    """Alarm if the challenger's sampled tokens are further from the champion than this, in nats per token."""
    max_length_ratio: Annotated[float, Field(gt=1)] = 2.0
    """Alarm if the challenger's answers are longer than the champion's by more than this factor."""
    max_truncated_gain: Share = 0.1
    """Alarm if the share of episodes that a token limit cut rose by more."""


class Retrain(Knobs):
    """Scheduled retraining: `run.name` names the series, whose nights are the runs `<name>-0001`, `<name>-0002` …"""

    champion: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]*$")] = "champion"
    """Alias of the champion. If it does not exist yet, `policy` becomes the first champion."""
    min_new: PositiveInt = 1
    """Least number of new problems for a night; fewer wait for more."""
    replay: Decay = 0.5
    """Share of a night's problems that come from earlier promoted nights, so that the policy does not forget them."""
    gate: Gate = Gate()
    """Checks that compare the challenger with the champion."""
