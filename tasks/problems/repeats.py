"""Problems of one set that ask the same: they are drawn more often than others."""

from collections.abc import Sequence
from dataclasses import dataclass

from storage.records import Problem
from tasks.problems.contamination import tokens


@dataclass(frozen=True, slots=True)
class Repeat:
    """A problem that asks the same as an earlier one of its set.

    Example: Repeat(problem_id="000004", earlier_id="000001", same_solutions=True)
    """

    problem_id: str
    earlier_id: str
    same_solutions: bool


def find_repeats(problems: Sequence[Problem]) -> list[Repeat]:
    """Find problems whose prompt an earlier one has, under another id or with other spaces.

    Prompts are compared as in the search for contamination, by words, numbers and symbols.
    """
    first: dict[str, Problem] = {}
    repeats = []
    for problem in problems:
        earlier = first.setdefault(" ".join(tokens(problem.prompt)) or problem.prompt, problem)
        if earlier is not problem:
            same = set(earlier.solutions) == set(problem.solutions)
            repeats.append(Repeat(problem.problem_id, earlier.problem_id, same))
    return repeats


def describe_repeats(repeats: Sequence[Repeat], limit: int = 5) -> list[str]:
    """Describe repeats in a sentence for each kind: those with the same solutions, and those with others.

    >>> describe_repeats([Repeat("000004", "000001", True)])
    ['1 row asks the same as an earlier one (000004 as 000001): such problems are drawn more often']
    """
    with_same = [repeat for repeat in repeats if repeat.same_solutions]
    with_others = [repeat for repeat in repeats if not repeat.same_solutions]
    kinds = ((with_same, "such problems are drawn more often"), (with_others, "but with other solutions, look at them"))
    return [f"{_counted(found, limit)}: {meaning}" for found, meaning in kinds if found]


def _counted(repeats: Sequence[Repeat], limit: int) -> str:
    named = [f"{repeat.problem_id} as {repeat.earlier_id}" for repeat in repeats[:limit]]
    more = [f"and {len(repeats) - limit} more"] if len(repeats) > limit else []
    rows = "1 row asks" if len(repeats) == 1 else f"{len(repeats)} rows ask"
    return f"{rows} the same as an earlier one ({', '.join([*named, *more])})"
