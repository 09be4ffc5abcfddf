"""Simulate many nights against one target set: how often the gate promotes by luck, and how soon it finds a gain.

python -m tests.experiments.nights      prints the table of tasks/retrain/README.md: one minute

Problems are between hopeless and certain: their chances of success are Beta(1/2, 1/2). The gate is the real one. Its
evidence has the exact test of greedy episodes and, for means of sampled episodes and for intervals, the normal
distribution, because a bootstrap for each of 100,000 nights would take hours.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.stats import binom, norm

from configs.evaluate import Gate
from tasks.retrain.gate import GateEvidence, decide

Floats = npt.NDArray[np.float64]
_Z = float(norm.ppf(0.975))
_QUIET = {"answer_tokens": {"before": 5.0, "after": 5.0, "ratio": 1.0}, "truncated": {"before": 0.0, "after": 0.0}}


@dataclass(frozen=True, slots=True)
class World:
    """What every night meets: a target set, how it is played, and what a challenger is really better by."""

    problems: int = 200
    samples: int = 0  # episodes of each problem; 0: a greedy one
    gain: float = 0.0


@dataclass(frozen=True, slots=True)
class Series:
    """The nights of many retrainings with one gate, up to a real gain's promotion."""

    promoted: npt.NDArray[np.bool_]  # [series, nights]
    inflation: Floats  # [series], the last champion's score minus its true accuracy

    def within(self, nights: int) -> float:
        """Return the share of series with a promotion in the first nights."""
        return float(self.promoted[:, :nights].any(axis=1).mean())


def simulate(world: World, gate: Gate, *, series: int, nights: int, before: int = 0, seed: int = 0) -> Series:
    """Play nights whose challengers all have the champion's skill, or `gain` more until one is promoted.

    Args:
        world: the set and the gain.
        gate: the gate's knobs.
        series: number of retrainings.
        nights: nights of each.
        before: nights without a promotion before the first one.
        seed: seed of all draws.
    """
    rng = np.random.default_rng(seed)
    skill = rng.beta(0.5, 0.5, (series, world.problems))
    better = skill + _gains(skill, world.gain, rng)
    champion, look = _play(skill, world.samples, rng), np.full(series, before + 1)
    promoted = np.zeros((series, nights), dtype=bool)
    for night in range(nights):
        challenger = _play(better, world.samples, rng)
        wins = _decisions(champion, challenger, world, gate, look)
        if world.gain:
            wins &= ~promoted.any(axis=1)
        promoted[:, night] = wins
        champion[wins] = challenger[wins]
        look = np.where(wins, 1, look + 1)
    return Series(promoted, champion.mean(axis=1) - skill.mean(axis=1))


def _gains(skill: Floats, gain: float, rng: np.random.Generator) -> Floats:
    """Spread a mean gain over some problems, which come halfway closer to certain success."""
    chosen = rng.random(skill.shape) < 2 * gain / (1 - skill.mean())
    return np.where(chosen, (1 - skill) / 2, 0.0)


def _play(skill: Floats, samples: int, rng: np.random.Generator) -> Floats:
    return rng.binomial(max(1, samples), skill) / max(1, samples)


def _decisions(
    before: Floats, after: Floats, world: World, gate: Gate, look: npt.NDArray[np.int64]
) -> npt.NDArray[np.bool_]:
    difference = after - before
    value, spread = difference.mean(axis=1), difference.std(axis=1) / world.problems**0.5
    if world.samples:
        p = 2 * norm.sf(np.abs(value) / np.maximum(np.sqrt((difference**2).sum(axis=1)) / world.problems, 1e-9))
    else:
        lost, won = (difference < 0).sum(axis=1), (difference > 0).sum(axis=1)
        p = np.minimum(1, 2 * binom.cdf(np.minimum(lost, won), lost + won, 0.5))
    columns = [before.mean(axis=1), after.mean(axis=1), value, value - _Z * spread, value + _Z * spread, p, look]
    return np.array([_promotes(gate, *row) for row in np.stack(columns, axis=1).tolist()])


def _promotes(
    gate: Gate, before: float, after: float, value: float, low: float, high: float, p: float, look: float
) -> bool:
    accuracy: dict[str, Any] = {"before": before, "after": after, "p": p}
    accuracy |= {key: {"value": value, "low": low, "high": high} for key in ("difference", "adjusted_interval")}
    comparisons = {"held-out": {"first_turn": accuracy, **_QUIET}}
    return decide(GateEvidence(comparisons, 0.0, 0.1, [0.5], int(look)), gate).promote


def main() -> None:
    """Print the table: each row has a measure for the gate without and with a rule for many nights."""
    plays = ((0, "greedy"), (8, "8 sampled"))
    rows: dict[str, Callable[[Gate], str]] = {
        f"equal policies, 60 nights, 200 problems, {name}": partial(_luck, samples) for samples, name in plays
    }
    for problems, (samples, name), before in product((200, 1000), plays, (0, 20)):
        title = f"a gain of 0.05, {problems} problems, {name}, after {before} nights without a promotion"
        rows[title] = partial(_power, World(problems, samples, 0.05), before)
    for title, measure in rows.items():
        print(f"| {title} | {measure(Gate(max_by_luck=None))} | {measure(Gate())} |", flush=True)


def _luck(samples: int, gate: Gate) -> str:
    result = simulate(World(200, samples), gate, series=1000, nights=60)
    return f"{result.promoted.sum(axis=1).mean():.3f}, score {result.inflation.mean():+.4f}"


def _power(world: World, before: int, gate: Gate) -> str:
    result = simulate(world, gate, series=300, nights=10, before=before)
    return ", ".join(f"{result.within(nights):.2f}" for nights in (1, 5, 10))


if __name__ == "__main__":
    main()
