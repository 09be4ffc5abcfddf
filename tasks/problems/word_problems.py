"""Word problems of one step: sums and differences as people ask for them, generated from kinds of sentences.

The sentences are in `word_problems.yaml`. Held-out problems have other sentences, people and things than those of
training, so a policy is evaluated on words that it was not trained on.
"""

import random
from functools import cache
from pathlib import Path

import yaml

from configs.problems import WordProblemSource
from storage.records import Problem
from tasks.problems.arithmetic import answer
from tasks.problems.problem_set import ProblemError

_DRAWS = 50
"""Draws for each problem that is asked for; so many are needed only where most problems of the range are drawn."""


@cache
def _all_words() -> dict[str, dict[str, list[str]]]:
    """Read the words of both splits."""
    words: dict[str, dict[str, list[str]]] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
    return words


def words_of(split: str) -> dict[str, list[str]]:
    """Return the sentences of a split by their operator (`plus`, `minus`), its `people` and its `things`."""
    return _all_words()[split]


def generate(source: WordProblemSource) -> list[Problem]:
    """Draw `count` different problems of the split by the seed.

    >>> generate(WordProblemSource(kind="word-problems", operators=["+"], count=1))[0].prompt
    'Yusuf sold 43 stickers and still has 61. How many stickers were there at first?'

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
