"""Advantages: baselines compare the same turns of one group, and only sampled tokens count."""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from configs.algorithm_parts import Advantage
from configs.score import Reward
from tasks.train.advantages import Estimated, Observed, estimate, normalise
from tasks.train.samples import Floats, Sample, build_samples
from tests.support.train_helpers import make_scores, make_trajectory

Rows = dict[str, tuple[str, list[float]]]
"""Maps a trajectory's id to its problem and the successes of its turns."""


def samples_of(rows: Rows, turn_discount: float = 1.0, scaling: float = 1.0, length: int = 1) -> list[Sample]:
    trajectories = [
        make_trajectory(name, [[10] * length for _ in successes], problem=problem, turn_discount=turn_discount)
        for name, (problem, successes) in rows.items()
    ]
    scores = [score for name, (_, successes) in rows.items() for score in make_scores(name, *successes)]
    return build_samples(trajectories, scores, Reward(scaling=scaling))


def advantages_of(samples: Sequence[Sample], **knobs: Any) -> list[list[float]]:
    observed = [Observed(np.zeros(len(sample.actions))) for sample in samples]
    knobs = {"normalisation": "none", **knobs}
    return [row.tolist() for row in estimate(samples, observed, Advantage(**knobs)).advantages]


def tool_group(many: Sequence[float], one: Sequence[float]) -> list[Sample]:
    """Return seven samples with the rewards `many` of their turns, and one with the rewards `one`."""
    rows: Rows = {f"s{n}": ("p", [(reward + 1) / 2 for reward in many]) for n in range(7)}
    return samples_of({**rows, "t": ("p", [(reward + 1) / 2 for reward in one])})


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("baseline", ["turn", "mixed", "episode"])
def test_all_turns_of_a_rare_strategy_learn(sign: int, baseline: str) -> None:
    """Seven answer wrong at once, one calls a tool first and is right; seven are right at once, one loops and fails.

    With a baseline for each turn, only the first call of a tool learns anything, because no other episode has a second.
    """
    samples = tool_group([-sign], [0, 0, 0, sign] if sign > 0 else [0] * 8 + [sign])
    advantages = advantages_of(samples, baseline=baseline, leave_one_out=True)
    turns = len(samples[-1].rewards)
    rare = [1.0] + [0.0] * (turns - 1) if baseline == "turn" else [1.0] * turns
    assert advantages[:7] == [[pytest.approx(-sign * 2 / 7)]] * 7
    assert advantages[7] == pytest.approx([2 * sign * value for value in rare])
    without = advantages_of(samples, baseline=baseline)  # the mean includes the episode itself
    assert without[7] == pytest.approx([1.75 * sign * value for value in rare])
    scaled = advantages_of(samples, baseline=baseline, scale_by_std=True)
    assert scaled[7] == pytest.approx([7**0.5 * sign * value for value in rare], rel=1e-5)


PROBABILITIES = ((0.3, 0.7), (0.6, 0.4))
"""Of stopping or going on at the first turn, and of a right or a wrong answer at the second."""
ENDS = (((0,), [-0.2]), ((1, 0), [-0.5, 1.0]), ((1, 1), [-0.5, -1.0]))
"""Actions and rewards of the three episodes that are possible."""
ENDS_OF_FIVE = [f"{place}{end}" for place in range(5) for end in range(3)]


def expected_gradient(returns: Sequence[Sequence[float]], chosen: Sequence[int]) -> Floats:
    """Return the gradient by both logits: the mean over the episodes of `return * d log probability`."""
    gradient = np.zeros(2)
    for end, of_turns in zip(chosen, returns, strict=True):
        for turn, (action, value) in enumerate(zip(ENDS[end][0], of_turns, strict=True)):
            gradient[turn] += value * ((action == 0) - PROBABILITIES[turn][0]) / len(chosen)
    return gradient


@pytest.mark.parametrize("baseline", ["turn", "mixed", "episode"])
def test_baselines_are_unbiased(baseline: str) -> None:
    """The mean gradient over all 243 groups of five episodes is that of the expected return, up to a factor.

    With `leave_one_out` it is that itself. Only `turn` has less at turns that one episode alone may reach.
    """
    likely = [np.prod([PROBABILITIES[turn][a] for turn, a in enumerate(actions)]) for actions, _ in ENDS]
    of_end = {name: ("p", [(reward + 1) / 2 for reward in ENDS[int(name[1])][1]]) for name in ENDS_OF_FIVE}
    samples = {sample.trajectory_id: sample for sample in samples_of(of_end)}
    true = np.zeros(2)
    for end, probability in enumerate(likely):
        true += probability * expected_gradient([samples[f"0{end}"].returns.tolist()], [end])
    for leave_one_out, factor in ((True, 1.0), (False, 0.8)):
        mean = np.zeros(2)
        for chosen in itertools.product(range(3), repeat=5):
            group = [samples[f"{place}{end}"] for place, end in enumerate(chosen)]
            advantages = advantages_of(group, baseline=baseline, leave_one_out=leave_one_out)
            mean += np.prod([likely[end] for end in chosen]) * expected_gradient(advantages, chosen)
        assert mean[0] == pytest.approx(factor * true[0], abs=1e-12)
        if baseline == "turn":
            assert abs(mean[1]) < 0.999 * factor * abs(true[1])
        elif leave_one_out or baseline == "episode":
            assert mean[1] == pytest.approx(factor * true[1], abs=1e-12)
        else:  # n is 4 or 5, whatever the sample itself does
            assert 0.75 < mean[1] / true[1] <= factor


def test_equal_returns_are_not_divided_by_their_rounding() -> None:
    """The mean of three times 0.1 is not 0.1 in floating point; divided by a tiny deviation, it would be noise."""
    agreeing = samples_of({name: ("p", [1]) for name in "abc"}, scaling=0.1)
    assert advantages_of(agreeing, scale_by_std=True) == [[0.0]] * 3


@pytest.mark.parametrize(
    "knobs", [{"scale_by_std": True}, {"normalisation": "group"}, {"normalisation": "batch"}], ids=str
)
def test_a_solved_group_does_not_train_on_its_penalties_at_full_strength(knobs: dict[str, Any]) -> None:
    """All answers to p are right, half of those to q. Penalties of 0 to 0.02 nats give p advantages of as much.

    Divided together with the rewards, they would be as large in p as the rewards' are in q.
    """
    right: Rows = {f"p{n}": ("p", [1]) for n in range(4)}
    samples = samples_of({**right, **{f"q{n}": ("q", [n % 2]) for n in range(4)}})
    observed = [Observed(np.array([-penalty])) for penalty in (0.0, 0.01, 0.02, 0.01, 0.0, 0.01, 0.02, 0.01)]

    apart = np.concatenate(estimate(samples, observed, Advantage(**{"normalisation": "none", **knobs})).advantages)
    assert apart[:4] == pytest.approx([0.01, 0, -0.01, 0], abs=1e-12)
    scale = 2**-0.5 if knobs.get("normalisation") == "batch" else 1.0
    assert apart[4:] == pytest.approx(np.array([-1, 1, -1, 1]) / scale + apart[:4], abs=1e-4)


def test_one_wrong_answer_does_not_fill_the_whole_step() -> None:
    """One wrong answer in 512 gets -21.9 in standard deviations: the bound divides all advantages by more."""
    rows: Rows = {f"{p:02d}{n:02d}": (f"p{p}", [float(p + n > 0)]) for p in range(32) for n in range(16)}
    samples = samples_of(rows)
    unbounded, bounded = (
        np.concatenate(advantages_of(samples, normalisation="batch", bound=bound)) for bound in (None, 10.0)
    )
    assert unbounded[0] == pytest.approx(-21.9, abs=0.01)
    assert bounded[0] == pytest.approx(-10)
    assert bounded == pytest.approx(unbounded * 10 / -unbounded[0])
    assert np.concatenate(advantages_of(samples[:32], normalisation="batch", bound=10.0)) == pytest.approx(
        np.concatenate(advantages_of(samples[:32], normalisation="batch", bound=None))
    )


def gae_of(sample: Sample, values: Sequence[float], **knobs: Any) -> tuple[list[float], list[float]]:
    """Return the advantages and returns of one sample."""
    observed = Observed(np.zeros(len(sample.actions)), np.array(values))
    estimated = estimate([sample], [observed], Advantage(**{"type": "gae", "normalisation": "none", **knobs}))
    assert estimated.returns is not None
    return estimated.advantages[0].tolist(), estimated.returns[0].tolist()


def golden(turn_discount: float = 1.0) -> Sample:
    """Return two turns of two tokens, with reward 0 on the first and 1 on the second."""
    row = make_trajectory("t", [[10, 11], [12, 13]], turn_discount=turn_discount)
    (sample,) = build_samples([row], make_scores("t", 0.5, 1), Reward())
    return sample


def test_gae_golden_values() -> None:
    """Mask 1 1 0 0 1 1, V .5, terminal reward 1, lambda .95. A form that includes feedback gives 1.174 1.236 …

    The return after a cut is discounted like the next turn; lambda 0 isolates it.
    """
    advantages, returns = gae_of(golden(), [0.5] * 4, gae_lambda=0.95)
    assert advantages == pytest.approx([0.4286875, 0.45125, 0.475, 0.5])
    assert returns == pytest.approx([0.9286875, 0.95125, 0.975, 1.0])
    sample = dataclasses.replace(golden(turn_discount=0.8), after=0.7)
    advantages, _ = gae_of(sample, [0.5] * 4, discount=0.9, gae_lambda=0.0)
    assert advantages[3] == pytest.approx(1 + 0.8 * 0.7 - 0.5)


def test_normalisation_of_values_by_hand() -> None:
    """Every token counts, so long turns weigh more; a masked token is normalised but has weight 0."""
    samples = samples_of({"a": ("p", [1]), "b": ("p", [0]), "c": ("q", [1]), "d": ("q", [0])})
    samples[3] = dataclasses.replace(samples[3], in_loss=np.array([False]))
    raw = [np.array([value]) for value in (1.0, -1.0, 1.0, -1.0)]
    batch = (np.concatenate(raw) - 1 / 3) / (np.std([1, -1, 1]) + 1e-5)
    group = [1 / (1 + 1e-5), -1 / (1 + 1e-5), 0.0, -2 / 1e-5]
    for over, expected in (("batch", batch), ("group", group)):
        knobs = Advantage.model_validate({"normalisation": over, "bound": None})
        assert np.concatenate(normalise(samples, Estimated(raw), knobs)) == pytest.approx(expected)


def test_normalisation_leaves_groups_that_agree_at_zero() -> None:
    """Groups without variance keep advantage 0, whatever the batch's mean: here all long answers of q are wrong."""
    parts: list[tuple[Rows, int]] = [
        ({"a": ("p", [1])}, 3),
        ({"b": ("p", [0])}, 1),
        ({"c": ("q", [0]), "d": ("q", [0])}, 50),
    ]
    samples = [sample for rows, length in parts for sample in samples_of(rows, length=length)]
    for over in ("batch", "group"):
        advantages = advantages_of(samples, normalisation=over)
        assert advantages[2:] == [[0.0] * 50] * 2
        assert advantages[0][0] == -advantages[1][0] > 0
        # Seven right answers, with the wrong one masked, get 1, neither 0 nor 1 / epsilon.
        masked = samples_of({f"r{n}": ("p", [float(n < 7)]) for n in range(8)})
        masked[7] = dataclasses.replace(masked[7], in_loss=np.array([False]))
        advantages = advantages_of(masked, normalisation=over)
        assert np.concatenate(advantages) == pytest.approx(np.array([1] * 7 + [-7]), abs=1e-3)
    tokens = np.concatenate(advantages_of(samples, normalisation="batch"))
    assert (tokens**2).mean() == pytest.approx(1, abs=1e-3)
