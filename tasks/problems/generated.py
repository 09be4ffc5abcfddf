"""Generated problems: arithmetic that a tiny policy can learn, word problems of one step, and games of guessing.

The same source of the configuration gives the same problems. Held-out problems are never among those of training. The
sentences of word problems are in `word_problems.yaml`: held-out ones have other sentences, people and things, so a
policy is evaluated on words that it was not trained on.
"""

import hashlib
import json
import random
from functools import cache
from itertools import count, islice, product
from operator import add, mul, sub
from pathlib import Path

import yaml

from configs.problems import ArithmeticSource, GuessSource, WordProblemSource
from storage.records import Problem
from tasks.problems.problem_set import SEED, ProblemError

Generated = ArithmeticSource | WordProblemSource | GuessSource
OPERATORS = {"+": add, "-": sub, "*": mul}
_DRAWS = 50
"""Draws for each problem that is asked for; so many are needed only where most problems of the range are drawn."""


def generate(source: Generated) -> list[Problem]:
    """Generate the problems of a source.

    Raises:
        ProblemError: the range of the source has fewer than its `count`.
    """
    if isinstance(source, ArithmeticSource):
        return _sums(source)
    return _games(source) if isinstance(source, GuessSource) else _word_problems(source)


def render(a: int, operator: str, b: int) -> str:
    """Write the prompt.

    >>> render(12, "+", -3)
    'What is 12 + -3?'
    """
    return f"What is {a} {operator} {b}?"


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


def _sums(source: ArithmeticSource) -> list[Problem]:
    """Make all problems of the split, shuffle them by the seed, and return the first `count`."""
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


@cache
def words_of(split: str) -> dict[str, list[str]]:
    """Return the sentences of a split by their operator (`plus`, `minus`), its `people` and its `things`."""
    words: dict[str, list[str]] = yaml.safe_load(Path(__file__).with_name("word_problems.yaml").read_text())[split]
    return words


def _word_problems(source: WordProblemSource) -> list[Problem]:
    """Draw `count` different problems of the split by the seed.

    >>> generate(WordProblemSource(kind="word-problems", operators=["+"], count=1))[0].prompt
    'Yusuf sold 43 stickers and still has 61. How many stickers were there at first?'
    """
    drawn, draws = dict[str, int](), random.Random(source.seed)
    for _ in range(_DRAWS * source.count):
        if len(drawn) == source.count:
            break
        prompt, solution = _draw(source, draws)
        drawn.setdefault(prompt, solution)
    if len(drawn) < source.count:
        raise ProblemError(
            f"{source.count} {source.split} word problems are more than low={source.low} and high={source.high} give: "
            "lower count or widen the range"
        )
    numbered = enumerate(drawn.items())
    return [Problem(f"{n:06d}", prompt, [str(solution)], "word-problems") for n, (prompt, solution) in numbered]


def _draw(source: WordProblemSource, draws: random.Random) -> tuple[str, int]:
    """Draw the prompt and the solution of one problem."""
    words, operator = words_of(source.split), draws.choice(source.operators)
    sentence = draws.choice(words["plus" if operator == "+" else "minus"])
    a, b = _number(source, draws), _number(source, draws)
    if operator == "-":
        a, b = max(a, b), min(a, b)
    name, other = draws.sample(words["people"], 2)
    prompt = sentence.format(a=a, b=b, name=name, other=other, things=draws.choice(words["things"]))
    return prompt, answer(a, operator, b)


def _number(source: WordProblemSource, draws: random.Random) -> int:
    """Draw a number: each number of digits is as frequent as the others, so that there are easy problems, too."""
    digits = draws.randint(len(str(source.low)), len(str(source.high)))
    return draws.randint(max(source.low, 10 ** (digits - 1)), min(source.high, 10**digits - 1))


def _games(source: GuessSource) -> list[Problem]:
    """Generate the first games of the split. Every fourth seed is held out.

    >>> generate(GuessSource(kind="guess-number", count=1))[0].metadata
    '{"seed": 1, "low": 1, "high": 7}'
    """
    held_out = source.split == "held-out"
    seeds = islice((seed for seed in count(1) if (seed % 4 == 0) == held_out), source.count)
    prompt, bounds = f"Guess the number from {source.low} to {source.high}.", {"low": source.low, "high": source.high}
    return [Problem(f"game{n}", prompt, [], "guess-number", json.dumps({SEED: n} | bounds)) for n in seeds]
