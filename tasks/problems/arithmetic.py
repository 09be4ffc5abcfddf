"""Sums, differences and products of two integers: problems that a tiny policy can learn."""

import hashlib
import random
from itertools import product
from operator import add, mul, sub

from configs.problems import ArithmeticSource
from storage.records import Problem
from tasks.problems.problem_set import ProblemError

OPERATORS = {"+": add, "-": sub, "*": mul}


def render(a: int, operator: str, b: int) -> str:
    """Write the prompt.

    >>> render(12, "+", -3)
    'What is 12 + -3?'
    """
    return f"What is {a} {operator} {b}?"


def expression(prompt: str) -> str:
    """Return what a prompt asks for.

    >>> expression("What is 12 + -3?")
    '12 + -3'
    """
    return prompt.removeprefix("What is ").removesuffix("?")


def answer(a: int, operator: str, b: int) -> int:
    """Compute the solution.

    >>> answer(12, "+", -3)
    9
    """
    return int(OPERATORS[operator](a, b))


def split_of(prompt: str) -> str:
    """Return `held-out` for about a quarter of all prompts, else `train`.

    The split depends only on the text, so the splits share no prompt, for all seeds and ranges. `a + b` and `b + a` are
    different prompts and may be in different splits.
    """
    return "held-out" if hashlib.sha256(prompt.encode()).digest()[0] % 4 == 0 else "train"


def generate(source: ArithmeticSource) -> list[Problem]:
    """Generate all problems of the split, shuffle them by the seed, and return the first `count`.

    Raises:
        ProblemError: there are fewer than `count`, or none.
    """
    operands = range(source.low, source.high + 1)
    triples = product(operands, dict.fromkeys(source.operators), operands)  # an operator given twice counts once
    chosen = [triple for triple in triples if split_of(render(*triple)) == source.split]
    if len(chosen) < (source.count or 1):
        raise ProblemError(
            f"{len(chosen)} {source.split} problems lie between low={source.low} and high={source.high} with "
            f"operators={source.operators}, but count={source.count or 1}: lower count or widen the range"
        )
    random.Random(source.seed).shuffle(chosen)
    return [
        Problem(f"{a}{operator}{b}", render(a, operator, b), [str(answer(a, operator, b))], "arithmetic")
        for a, operator, b in chosen[: source.count]
    ]
