"""The verifier against math-verify called one by one, on answers as in rollouts: 32 problems in groups of 16.

A group's success rate is drawn uniformly. It has few different wrong answers, because a policy repeats its mistakes.
Answers come in random order, because episodes end in random order.
"""

import gc
import random
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from configs import load
from tests.benchmarks.fixtures import Lab
from tests.benchmarks.result import Row, spread

if TYPE_CHECKING:
    from tasks.score.verifier import Verifier

PROBLEMS, GROUP = 32, 16
WARM_UP = 1
MANY, FEW = 20, 4  # batches; math-verify needs seconds for LaTeX
LATEX = (
    r"\frac{11}{11}",
    r"11\sqrt{11}",
    r"\left(11, \frac{1}{11}\right)",
    "x^2 + 11x - 11",
    r"\left[11, \infty\right)",
)
WORDS = ("so", "then", "we", "add", "both", "sides", "and", "divide", "by", "two", "which", "leaves", "half")

Pair = tuple[str, list[str]]
"""An answer and the solutions."""


@dataclass(frozen=True, slots=True)
class _Measured:
    theirs: float  # seconds
    ours: float
    again: float  # with all verdicts in the cache
    distinct: int  # pairs that were sent to a worker process


def measure(_: Lab) -> list[Row]:
    """Measure each kind of answers with an empty cache and warm workers."""
    from tasks.score.verifier import Verifier

    settings = load("demo").score
    gc.freeze()  # objects of other benchmarks would slow down each garbage collection of the bare side
    with Verifier(settings.workers, settings.timeout_s) as verifier:
        return [
            _row(verifier, "numbers", MANY, lambda _: "1111", lambda _: ""),
            _row(verifier, "LaTeX", FEW, lambda rng: rng.choice(LATEX), lambda _: ""),
            _row(verifier, "LaTeX after distinct working", FEW, lambda rng: rng.choice(LATEX), make_working),
        ]


def _row(
    verifier: "Verifier",
    kind: str,
    count: int,
    form: Callable[[random.Random], str],
    working: Callable[[random.Random], str],
) -> Row:
    rng, used = random.Random(kind), set[str]()
    batches = [make_batch(rng, used, form, working) for _ in range(WARM_UP + count)]
    runs = [_measure(verifier, pairs) for pairs in batches][WARM_UP:]
    ratios = [run.theirs / run.ours for run in runs]
    ours, again = (median(seconds) for seconds in zip(*[(run.ours, run.again) for run in runs], strict=True))
    return Row(
        benchmark=f"one by one / verifier: {kind}",
        measured=spread(ratios, "{:.1f}".format),
        detail=f"{PROBLEMS * GROUP} answers ({median(run.distinct for run in runs):.0f} distinct) in {ours:.3f} s, "
        f"again from the cache in {again:.4f} s; verdicts identical in all {len(runs)} batches",
    )


def _measure(verifier: "Verifier", pairs: list[Pair]) -> _Measured:
    sent = verifier.sent
    start = time.perf_counter()
    verdicts = verifier.grade(pairs)
    ours = time.perf_counter() - start
    distinct = verifier.sent - sent
    assert distinct == len({(answer, *solutions) for answer, solutions in pairs}), "the cache was not empty"
    start = time.perf_counter()
    verifier.grade(pairs)
    again = time.perf_counter() - start
    start = time.perf_counter()
    expected = _one_by_one(pairs)
    theirs = time.perf_counter() - start
    if differing := [pair for pair, a, b in zip(pairs, verdicts, expected, strict=True) if (a.success == 1) != b]:
        raise AssertionError(f"the verifier and math-verify disagree: {differing[:3]}")
    return _Measured(theirs, ours, again, distinct)


def _one_by_one(pairs: list[Pair]) -> list[bool]:
    r"""Grade as math-verify's documentation does it; \boxed{} is needed because bare LaTeX is not parsed."""
    from math_verify import parse, verify

    return [
        any(verify(parse(f"\\boxed{{{solution}}}"), parse(answer)) for solution in solutions)
        for answer, solutions in pairs
    ]


def make_batch(
    rng: random.Random,
    used: set[str],
    form: Callable[[random.Random], str],
    working: Callable[[random.Random], str],
) -> list[Pair]:
    """Make the answers of one rollout, shuffled. No solution occurs in two batches, so the cache never helps."""
    pairs = []
    for _ in range(PROBLEMS):
        shape = form(rng)
        while (gold := _fill(rng, shape)) in used:
            pass
        used.add(gold)
        wrong, rate = [_fill(rng, shape) for _ in range(4)], rng.random()
        for _ in range(GROUP):
            value = gold if rng.random() < rate else rng.choices(wrong, [8, 4, 2, 1])[0]
            answer = rng.choices([f"\\boxed{{{value}}}", f"The answer is ${value}$."], [9, 1])[0]
            pairs.append((working(rng) + answer, [gold]))
    rng.shuffle(pairs)
    return pairs


def _fill(rng: random.Random, shape: str) -> str:
    """Replace each digit 1 of `shape` by a random digit."""
    return re.sub("1", lambda _: str(rng.randint(1, 9)), shape)


def make_working(rng: random.Random) -> str:
    """Make about 150 words with a few formulas."""
    words = rng.choices([*WORDS, f"$x_{{1}} = {rng.randint(2, 99)} + y$"], k=150)
    return " ".join(words) + f", case {rng.getrandbits(48)}: "
