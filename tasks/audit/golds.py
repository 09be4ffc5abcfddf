"""Find gold answers in texts that should not have them."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

MOST_PROBLEMS = 0.5
"""Share of the problems. The same words about many problems may be an example or a fixed phrase. They count as a leak
only if they contain the gold answers of more than this share of the problems."""


@dataclass(frozen=True, slots=True)
class StatedAnswer:
    """Words that state an answer, and whether it is the gold answer.

    Example: StatedAnswer(run="demo", words="answer is 19", problem_id="12+7", data_set=0, is_gold=True)
    """

    run: str
    words: str
    problem_id: str
    data_set: int
    is_gold: bool


def leaks(answers: Iterable[StatedAnswer]) -> Iterator[StatedAnswer]:
    """Group stated answers by their words; yield the gold ones of a group if most of its problems have a gold one."""
    by_words: dict[tuple[str, str], dict[str, StatedAnswer]] = {}
    for answer in answers:
        by_words.setdefault((answer.run, answer.words), {})[answer.problem_id] = answer
    for by_problem in by_words.values():
        golds = [answer for answer in by_problem.values() if answer.is_gold]
        if len(golds) > MOST_PROBLEMS * len(by_problem):
            yield from golds


def contains_gold(text: str, solutions: Sequence[str]) -> bool:
    """Return whether `text` contains one of `solutions` as a whole: 112, 1.12 and -12 do not contain 12."""
    plain = re.sub(r"(?<=\d),(?=\d{3}\b)", "", text)
    return any(
        re.search(rf"(?<![\w.\-]){re.escape(gold)}(?!\w|\.\d)", plain) is not None
        for solution in solutions
        if (gold := re.sub(r"(?<=\d),(?=\d{3}\b)", "", solution.strip()))
    )
