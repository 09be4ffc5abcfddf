"""Growing problem sets: find new problems, join sets, and draw old problems to replay.

Here two problems are the same if their prompts and solutions are the same. Their ids do not count.
"""

import hashlib
import json
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, count

from storage.records import Problem


def key(problem: Problem) -> str:
    """Compute 32 hexadecimal digits that identify prompt and solutions, in any order of the solutions.

    They are the start of the sha256 of canonical JSON. Id, source and metadata do not count.
    """
    content = json.dumps([problem.prompt, sorted(set(problem.solutions))], separators=(",", ":"))
    return hashlib.sha256(content.encode()).hexdigest()[:32]


def new_problems(problems: Iterable[Problem], seen: Iterable[Problem]) -> list[Problem]:
    """List the `problems` that are not among `seen`, in their order; keep only the first of equal problems."""
    seen_keys = {key(problem) for problem in seen}
    fresh: dict[str, Problem] = {}
    for problem in problems:
        if (problem_key := key(problem)) not in seen_keys:
            fresh.setdefault(problem_key, problem)
    return list(fresh.values())


def describe_change(before: Sequence[Problem], now: Sequence[Problem]) -> str:
    """Say how a set has changed.

    >>> describe_change([Problem("1", "1 + 1?", ["2"])], [Problem("1", "1 + 1?", ["2"]), Problem("2", "1 + 2?", ["3"])])
    '2 problems instead of 1, of which 1 is new; none is gone'
    """
    new, gone = len(new_problems(now, before)), len(new_problems(before, now))
    if not new and not gone:
        return f"the same {len(before)} problems in another order, with other ids or other metadata"
    counts = f"{len(now)} problems instead of {len(before)}, of which {new or 'none'} {'are' if new > 1 else 'is'} new"
    return f"{counts}; {gone or 'none'} {'are' if gone > 1 else 'is'} gone"


def union(*sets: Sequence[Problem]) -> list[Problem]:
    """Join sets in order, keep only the first of equal problems, and make the ids unique.

    If an earlier problem has the same id, the later problem's id gets the first free suffix of `~2`, `~3` … A set that
    is added at the end does not change earlier ids: union(a, b, c) is union(union(a, b), c).
    """
    joined: dict[str, Problem] = {}
    numbers: dict[str, Iterator[int]] = {}
    for problem in new_problems(chain(*sets), []):
        unique = problem.problem_id
        if unique in joined:
            suffixes = numbers.setdefault(unique, count(2))  # continues where it stopped: an id may repeat many times
            unique = next(name for number in suffixes if (name := f"{unique}~{number}") not in joined)
        joined[unique] = replace(problem, problem_id=unique)
    return list(joined.values())


def replayed(problems: Sequence[Problem], share: float, old: Sequence[Problem], seed: int) -> list[Problem]:
    """Draw problems of `old` that are not in `problems`: about `share` of all, when joined with `problems`.

    The number is rounded to a whole number, and smaller if `old` has too few. The drawn problems keep their ids; join
    them to `problems` with `union`.

    Args:
        problems: the problems to train on, without duplicates.
        share: 0 <= share < 1.
        old: the problems to draw from.
        seed: the same seed and order of `old` give the same draw.

    Raises:
        ValueError: `share` is negative, or 1 or more, which would leave no place for `problems`.
    """
    if not 0 <= share < 1:
        raise ValueError(f"share={share} of old problems: give 0 or more and less than 1")
    candidates = new_problems(old, problems)
    wanted = round(len(problems) * share / (1 - share))
    return random.Random(seed).sample(candidates, min(wanted, len(candidates)))


def not_superseded(old: Iterable[Problem], new: Iterable[Problem]) -> list[Problem]:
    """List the problems of `old` whose prompts are not in `new`: a prompt that comes again has corrected solutions."""
    prompts = {problem.prompt for problem in new}
    return [problem for problem in old if problem.prompt not in prompts]
