"""The gate: it decides whether a challenger replaces the champion, and gives every reason.

The challenger must be better on the target set with confidence, not worse than a margin on every guarded set, and
raise no alarm. The bounds are those of 95 % intervals of paired differences: the wider one of the bootstrap's interval
and one that is valid for few problems. On the target set an exact test must agree: McNemar's if each problem has one
episode, else the permutation test that flips signs (`tasks.evaluate.statistics`). Interval and test ask for more with
every look at the set (`level_of`), since one of many nights looks better by luck.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean
from typing import Any, Literal

from configs.evaluate import Gate

_LEVEL = 0.05
_LEAST_ITERATIONS = 4
"""The least number of iterations that show a trend."""
MAX_FAILED_VERDICTS = 0.02
"""Alarm if a larger share of the verdicts in training are timeouts or errors."""
HACKING_GAIN = 0.02
"""Alarm if success on the training problems rose by more than this, while accuracy on the target fell by more."""


@dataclass(frozen=True, slots=True)
class GateEvidence:
    """The numbers that the gate checks.

    Example: GateEvidence(comparisons={"held-out": {…}}, failed_verdicts=0.0, kl=0.04, training=[0.41, 0.48, 0.55, 0.6])
    """

    comparisons: Mapping[str, Mapping[str, Any]]  # by set: champion before, challenger after
    failed_verdicts: float  # share of timeouts and errors among the verdicts of the night's training data
    kl: float | None  # mean KL to the champion in nats per token; None if nothing was sampled
    training: Sequence[float]  # share of solved training episodes, by iteration
    look: int = 1  # number of gates since the last promotion, with this one


@dataclass(frozen=True, slots=True)
class GateCheck:
    """The result of one check of the gate.

    Example: GateCheck("held-out", "better", passed=True, says="first turn +0.120 [+0.050, +0.190]: above +0.000")
    """

    subject: str  # the name of a set, or the subject of an alarm
    kind: Literal["better", "not worse", "alarm"]
    passed: bool
    says: str


@dataclass(frozen=True, slots=True)
class Decision:
    """The gate's decision."""

    promote: bool
    harmful: bool  # worse with confidence: its problems are set aside
    checks: list[GateCheck]
    look: int  # as in `GateEvidence`
    level: float  # the largest p with which the challenger counted as better


def decide(evidence: GateEvidence, gate: Gate) -> Decision:
    """Decide whether the challenger replaces the champion.

    Raises:
        KeyError: a set that the gate names was not compared.
    """
    guarded = gate.guarded if gate.guarded is not None else list(evidence.comparisons)
    checks = [_better(evidence, gate)]
    checks += [_not_worse(name, evidence.comparisons[name], gate) for name in guarded]
    checks += _alarms(evidence, gate)
    harmful = any(_is_worse(evidence.comparisons[name], gate) for name in {gate.target, *guarded})
    promote = all(check.passed for check in checks)
    return Decision(promote, harmful, checks, evidence.look, level_of(evidence.look, gate))


def level_of(look: int, gate: Gate) -> float:
    """Return the largest two-sided p that counts as better at the k-th `look` since a promotion.

    A challenger without a gain passes with half of this probability. The shares 3 / ((k + 2) (k + 3)) of all looks sum
    to 1, so all looks until a promotion together have the probability `max_by_luck`, however many they are and however
    much they depend on each other. A promotion begins the count anew, so with 0.05 about one promotion in 20 is luck.
    Sources: Lan and DeMets (1983), Biometrika 70, 659-663, who spend a level over looks; Foster and Stine (2008),
    Journal of the Royal Statistical Society B 70, 429-444, who earn it anew.

    Example: with `max_by_luck=0.05` the levels are 0.025, 0.015, 0.01, … and 0.0019 at the tenth look.
    """
    if gate.max_by_luck is None:
        return _LEVEL
    return min(_LEVEL, 2 * gate.max_by_luck * 3 / ((look + 2) * (look + 3)))


def measured(gate: Gate) -> str:
    """Return the gate's measure in words.

    Example: "first turn", or "any turn, sampled".
    """
    return gate.measure.replace("_", " ") + (", sampled" if gate.episodes == "sampled" else "")


def _better(evidence: GateEvidence, gate: Gate) -> GateCheck:
    """Check the target set by interval and by test, because a bootstrap interval is too narrow for a few problems.

    Both have the level of this look. With a negative `least_gain` no gain is asked for, so only the interval counts.
    """
    comparison, level = evidence.comparisons[gate.target], level_of(evidence.look, gate)
    accuracy = comparison[gate.measure]
    above, p = _bounds(accuracy, level)[0] > gate.least_gain, accuracy["p"]
    certain = p <= level or gate.least_gain < 0
    asked = "" if gate.least_gain < 0 else f", at most {level:.2g}"
    look = "" if gate.max_by_luck is None else f"{asked} (look {evidence.look} since a promotion)"
    verdict = f"{'above' if above else 'not all above'} {gate.least_gain:+.3f}, p = {p:.2g}{look}"
    return GateCheck(gate.target, "better", above and certain, f"{_difference(comparison, gate, level)}: {verdict}")


def _not_worse(name: str, comparison: Mapping[str, Any], gate: Gate) -> GateCheck:
    passed = _bounds(comparison[gate.measure])[0] > -gate.margin
    verdict = "above" if passed else "not all above"
    hint = "" if passed or _is_worse(comparison, gate) else "; a larger set would narrow the interval"
    return GateCheck(name, "not worse", passed, f"{_difference(comparison, gate)}: {verdict} {-gate.margin:+.3f}{hint}")


def _is_worse(comparison: Mapping[str, Any], gate: Gate) -> bool:
    """Return whether the challenger is worse with confidence: the whole interval is below 0."""
    return _bounds(comparison[gate.measure])[1] < 0


def _bounds(accuracy: Mapping[str, Any], level: float = _LEVEL) -> tuple[float, float]:
    """Return the ends of all intervals together: if few problems differ, the bootstrap interval is too narrow."""
    intervals = accuracy["difference"], accuracy["adjusted_interval"]
    low, high = ([_end(interval, name, level) for interval in intervals] for name in ("low", "high"))
    return max(-1.0, min(low)), min(1.0, max(high))


def _end(interval: Mapping[str, Any], name: str, level: float) -> float:
    """Return an end of a 95 % interval, stretched from its value as a normal distribution's to the level."""
    widths = NormalDist().inv_cdf(level / 2) / NormalDist().inv_cdf(_LEVEL / 2)
    return float(interval[name]) + (widths - 1) * (float(interval[name]) - float(interval["value"]))


def _difference(comparison: Mapping[str, Any], gate: Gate, level: float = _LEVEL) -> str:
    accuracy = comparison[gate.measure]
    low, high = _bounds(accuracy, level)
    change = f"{measured(gate)} {accuracy['before']:.3f} -> {accuracy['after']:.3f}"
    return f"{change}, {accuracy['difference']['value']:+.3f} [{low:+.3f}, {high:+.3f}]"


def _alarms(evidence: GateEvidence, gate: Gate) -> Iterator[GateCheck]:
    share, most = evidence.failed_verdicts, MAX_FAILED_VERDICTS
    says = f"{share:.1%} of verdicts in training are timeouts or errors, at most {most:.1%}"
    yield _alarm("verifier", share <= most, says)
    if evidence.kl is not None:
        says = f"{evidence.kl:.3f} nats a token from the champion, at most {gate.max_kl:g}"
        yield _alarm("KL", evidence.kl <= gate.max_kl, says)
    for name, comparison in evidence.comparisons.items():
        tokens, truncated = comparison["answer_tokens"], comparison["truncated"]
        passed, says = False, "champion or challenger gave no answers"
        if tokens["ratio"] is not None:
            rise = truncated["after"] - truncated["before"]
            passed = tokens["ratio"] <= gate.max_length_ratio and rise <= gate.max_truncated_gain
            says = f"answers {tokens['before']:.1f} -> {tokens['after']:.1f} tokens, at most {gate.max_length_ratio:g} "
            says += f"times; truncated {rise:+.1%}, at most {gate.max_truncated_gain:+.1%}"
        yield _alarm(f"length on {name}", passed, says)
    yield _hacking_alarm(evidence, gate)


def _hacking_alarm(evidence: GateEvidence, gate: Gate) -> GateCheck:
    """Raise an alarm if training success rises while accuracy on the target set falls: a sign of reward hacking."""
    accuracy = evidence.comparisons[gate.target][gate.measure]["difference"]["value"]
    third = len(evidence.training) // 3
    if len(evidence.training) < _LEAST_ITERATIONS:
        return _alarm("reward hacking", True, f"{len(evidence.training)} iterations are too few to show a trend")
    rise = fmean(evidence.training[-third:]) - fmean(evidence.training[:third])
    passed = not (rise > HACKING_GAIN and accuracy < -HACKING_GAIN)
    says = f"solved while training {rise:+.3f} (last third against first), accuracy on {gate.target} {accuracy:+.3f}"
    return _alarm("reward hacking", passed, says)


def _alarm(subject: str, passed: bool, says: str) -> GateCheck:
    return GateCheck(subject, "alarm", passed, says)
