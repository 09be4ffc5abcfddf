"""A mixture: the problems of its members as one set, and whose turn it is in each draw."""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from fractions import Fraction

from configs.problems import NamedSource, Problems, StoredSource
from storage.records import Problem
from tasks.problems.problem_set import ProblemSet
from tasks.problems.sources import UseOfSolutions, load_problems


@contextmanager
def naming(where: str) -> Iterator[None]:
    """Let the message of a ValueError in the block begin with `where`, which names a member of a mixture."""
    try:
        yield
    except ValueError as error:
        if not str(error).startswith(where):
            error.args = (f"{where}{error}",)
        raise


def load_source(
    named: NamedSource,
    max_bad_share: float,
    use_of_solutions: Callable[[str], UseOfSolutions],
    read_stored: Callable[[str], list[Problem]],
) -> ProblemSet:
    """Load a source: see `load_problems`. Problems of a member get its name as their source.

    Raises:
        ProblemError: see `load_problems`; the message names the member.
    """
    if isinstance(named.source, StoredSource):
        return ProblemSet(of_member(named.name, read_stored(named.source.version)), bad=[])
    with naming(named.where):
        loaded = load_problems(named.source, max_bad_share, lambda source: use_of_solutions(named.name or source))
    return replace(loaded, problems=of_member(named.name, loaded.problems))


def of_member(name: str, problems: list[Problem]) -> list[Problem]:
    """Return problems as those of a member, whose name is their source and begins their ids; without one as they are.

    >>> [(each.problem_id, each.source) for each in of_member("sums", [Problem("1+2", "What is 1 + 2?", ["3"])])]
    [('sums/1+2', 'sums')]
    """
    if not name:
        return problems
    return [replace(each, problem_id=f"{name}/{each.problem_id}", source=name) for each in problems]


def by_member(knobs: Problems, problems: Sequence[Problem]) -> Iterator[tuple[NamedSource, Sequence[Problem]]]:
    """Yield the training problems of each member of a mixture; without one all of them."""
    for named in knobs.trained:
        yield named, [each for each in problems if each.source == named.name] if named.name else problems


class Turns:
    """The order in which the members of a mixture have their turns, one for each problem drawn.

    After t turns each member had t times its share of them, within less than one, whatever the shares: the algorithm of
    Tijdeman (1980), "The chairman assignment problem", Discrete Mathematics 32. Among the members that lag behind their
    share by 1 / (2m - 2) or more, the one has its turn that would be the first to lag too far without it.

    >>> list(Turns([2, 1, 1]).until(8))
    [0, 1, 2, 0, 0, 1, 2, 0]
    """

    def __init__(self, weights: Sequence[float]) -> None:
        shares = [Fraction(str(weight)) for weight in weights]
        scale = math.lcm(*(share.denominator for share in shares))
        scaled = [int(share * scale) for share in shares]
        self._shares = [each // math.gcd(*scaled) for each in scaled]  # whole numbers, in proportion to the weights
        self._whole, self._slack = sum(self._shares), max(2, 2 * len(scaled) - 2)
        self._faster = [math.lcm(*self._shares) // share for share in self._shares]
        self._lags = [0] * len(scaled)  # turns that a member should have had beyond those that it had, times `_whole`
        self._turns = bytearray()

    def until(self, end: int) -> bytearray:
        """Return the numbers of the members in turn, for `end` turns or more."""
        while len(self._turns) < end:
            self._lags = [lag + share for lag, share in zip(self._lags, self._shares, strict=True)]
            behind = [n for n, lag in enumerate(self._lags) if lag * self._slack >= self._whole]
            wait = self._whole * (self._slack - 1)  # times a member's `_faster`: in units that all members share
            chosen = min(behind, key=lambda n: (wait - self._slack * self._lags[n]) * self._faster[n])
            self._lags[chosen] -= self._whole
            self._turns.append(chosen)
        return self._turns


turns_of = functools.lru_cache(maxsize=2)(Turns)
"""The turns by weights, a tuple: a run asks for ever later ones."""
