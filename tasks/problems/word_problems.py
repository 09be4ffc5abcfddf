"""Word problems of one step: sums and differences as people ask for them, generated from kinds of sentences.

The sentences are in `word_problems.yaml`. Held-out problems have other sentences, people and things than those of
training, so a policy is evaluated on words that it was not trained on. The numbers are drawn from the same range.
"""

import random
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from configs.problems import WordProblemSource
from storage.records import Problem
from tasks.problems.arithmetic import answer
from tasks.problems.problem_set import ProblemError

_DRAWS = 50
"""Draws for each problem that is asked for; so many are needed only where most problems of the range are drawn."""


@cache
def _words() -> dict[str, Any]:
    """Read sentences by operator, people and things of each split."""
    words: dict[str, Any] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
    return words


def generate(source: WordProblemSource) -> list[Problem]:
    """Draw `count` different problems of the split by the seed.

    >>> generate(WordProblemSource(kind="word-problems", count=1))[0].prompt
    'x'

    Raises:
        ProblemError: the range has too few.
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
    return [
        Problem(f"{number:06d}", prompt, [str(solution)], "word-problems")
        for number, (prompt, solution) in enumerate(drawn.items())
    ]


def _draw(source: WordProblemSource, draws: random.Random) -> tuple[str, int]:
    """Draw the prompt and the solution of one problem."""
    words, operator = _words()[source.split], draws.choice(source.operators)
    sentence = draws.choice(words["plus" if operator == "+" else "minus"])
    a, b = draws.randint(source.low, source.high), draws.randint(source.low, source.high)
    if operator == "-":
        a, b = max(a, b), min(a, b)
    name, other = draws.sample(words["people"], 2)
    prompt = sentence.format(a=a, b=b, name=name, other=other, things=draws.choice(words["things"]))
    return prompt, answer(a, operator, b)
