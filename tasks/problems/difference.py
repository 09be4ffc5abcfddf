"""Problem sets that grow: which problems are new, what two sets are together, and a share of old ones to repeat.

Here two problems are the same where prompt and solutions are; an id is only a name.
"""

import hashlib
import json
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, count

from storage.records import Problem


def key(problem: Problem) -> str:
    """32 hexadecimal digits that name prompt and solutions, whatever the order of the solutions.

    The start of the sha256 of canonical JSON. Id, source and metadata do not count.
    """
    content = json.dumps([problem.prompt, sorted(set(problem.solutions))], separators=(",", ":"))
    return hashlib.sha256(content.encode()).hexdigest()[:32]


def new_problems(problems: Iterable[Problem], seen: Iterable[Problem]) -> list[Problem]:
    """Those of `problems` that are not among `seen`, in their order; of the same ones the first."""
    known = {key(problem) for problem in seen}
    fresh: dict[str, Problem] = {}
    for problem in problems:
        if (name := key(problem)) not in known:
            fresh.setdefault(name, problem)
    return list(fresh.values())


def union(*sets: Sequence[Problem]) -> list[Problem]:
    """All problems in order; of the same ones the first. Ids become unique.

    Where another problem has an id already, the later one's gets the first free of the suffixes `~2`, `~3` … What
    stands in front decides, so a set that is added behind renames nothing: union(a, b, c) is union(union(a, b), c).
    """
    together: dict[str, Problem] = {}
    numbers: dict[str, Iterator[int]] = {}
    for problem in new_problems(chain(*sets), []):
        taken = problem.problem_id
        if taken in together:
            suffixes = numbers.setdefault(taken, count(2))  # goes on where it stopped: ids may repeat a thousand times
            taken = next(name for number in suffixes if (name := f"{taken}~{number}") not in together)
        together[taken] = replace(problem, problem_id=taken)
    return list(together.values())


def replayed(problems: Sequence[Problem], share: float, old: Sequence[Problem], seed: int) -> list[Problem]:
    """Problems of `old`, drawn by `seed`: so many that they are `share` of them and `problems` together.

    As near as whole numbers come, and fewer where `old` has not so many that are none of `problems`. They keep their
    ids: put both together with `union`.

    Args:
        problems: different ones.
        share: 0 <= share < 1.
        old: what to draw from.
        seed: the same draw for the same seed and order of `old`.

    Raises:
        ValueError: a share of 1 or more would leave no place for `problems`.
    """
    if not 0 <= share < 1:
        raise ValueError(f"share={share} of old problems: give 0 or more and less than 1")
    candidates = new_problems(old, problems)
    wanted = round(len(problems) * share / (1 - share))
    return random.Random(seed).sample(candidates, min(wanted, len(candidates)))


def not_superseded(old: Iterable[Problem], new: Iterable[Problem]) -> list[Problem]:
    """Those of `old` whose prompt none of `new` has: a problem that comes again has had its solutions corrected."""
    prompts = {problem.prompt for problem in new}
    return [problem for problem in old if problem.prompt not in prompts]
