"""The colours of tokens in seven steps; each step also has its own underline, and its numbers are in the legend."""

import math
from dataclasses import dataclass
from itertools import pairwise

LOGPROB_EDGES = (-0.01, -0.1, -0.5, -1.0, -2.0, -4.0)
"""In nats; a logprob below the first n edges is in step n, so likely tokens are in step 0."""


@dataclass(frozen=True, slots=True)
class ColourStep:
    """One entry of the legend.

    Example: ColourStep(css="p6", says="below -4 (probability below 1.8%)")
    """

    css: str
    says: str


def logprob_step(logprob: float | None) -> str:
    """Return the CSS class of a sampled token for its logprob.

    >>> logprob_step(0.0), logprob_step(-0.3), logprob_step(-9.0), logprob_step(math.nan)
    ('p0', 'p2', 'p6', 'broken')
    """
    if logprob is None or math.isnan(logprob) or logprob > 0:
        return "broken"
    return f"p{sum(logprob < edge for edge in LOGPROB_EDGES)}"


def logprob_legend() -> list[ColourStep]:
    """Return all steps, likely tokens first."""
    edges = [f"{edge:g} ({math.exp(edge):.2g})" for edge in LOGPROB_EDGES]
    between = [f"{upper} to {lower}" for upper, lower in pairwise(edges)]
    says = [f"above {edges[0]}", *between, f"below {edges[-1]}"]
    return [ColourStep(f"p{number}", text) for number, text in enumerate(says)]


_ADVANTAGE_STEPS = ("n3", "n2", "n1", "zero", "a1", "a2", "a3")


def advantage_step(advantage: float | None, largest: float) -> str:
    """Return the CSS class of a token for its advantage relative to the largest one; empty without an advantage.

    >>> advantage_step(-1.0, 1.0), advantage_step(0.4, 1.0), advantage_step(0.0, 0.0), advantage_step(None, 1.0)
    ('n3', 'a1', 'zero', '')
    """
    if advantage is None:
        return ""
    if not math.isfinite(advantage):
        return "broken"
    return _ADVANTAGE_STEPS[3 + (round(3 * advantage / largest) if largest else 0)]


def advantage_legend(largest: float) -> list[ColourStep]:
    """Return all steps, the most negative first; the edges are at 1/6, 1/2 and 5/6 of the largest advantage."""
    edges = [number * largest / 6 for number in (-5, -3, -1, 1, 3, 5)]
    between = [f"{lower:.3g} to {upper:.3g}" for lower, upper in pairwise(edges)]
    says = [f"below {edges[0]:.3g}", *between, f"above {edges[-1]:.3g}"]
    return [ColourStep(css, text) for css, text in zip(_ADVANTAGE_STEPS, says, strict=True)]
