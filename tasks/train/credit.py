"""Credit: which rewards of an episode pay which of its completions.

A reward pays every completion that the agent had received before the reward was given. So in a chain a turn earns its
own reward and all later ones; candidates of one request, and requests that ran at the same time, earn the same future
and not each other's past; and a reward at the end of the episode pays all. A completion that the agent never received
earns nothing.

Example: a planner (P) asks two workers (A, B) at once and answers (Q). It hears A first. Both are graded when both
are there, with 1 and 0; nobody grades P and Q. In the order in which they are stored:

    turn      A  B  P  Q
    received  1  2  0  3     place among the completions that the agent got
    asked     1  1  0  3     completions that the agent had when it asked
    paid      3  3  0  0     completions that it had when the reward was given; 0: none was given
    depth     1  1  0  2     turns in the longest line of causes before it, in a chain 0, 1, 2 …
    return    1  1  g  0     with the turn discount g, since the rewards of A and B come one turn deeper than P
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from storage.records import Trajectory

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Causes:
    """What came before what in an episode of K turns, of which the agent received N."""

    order: Ints  # K, place among the completions that the agent got, -1: it never got it; 0..K-1 in a chain
    depth: Ints  # K, number of turns in the longest line of causes before it; 0..K-1 in a chain
    paid: Ints  # K, completions that the agent had when the turn's reward was given; 1..K in a chain, 0 if never got

    @property
    def is_chain(self) -> bool:
        """Return whether each turn was asked for, received and paid before the next one, in the stored order."""
        return all(map(np.array_equal, (self.order, self.depth, self.paid), _chain(len(self.order))))

    def returns(self, rewards: Floats, penalties: Floats, discount: float, after: float) -> Floats:
        """Compute the returns [K] from the rewards [K] and penalties [K] of the turns; 0 for turns never received.

        A reward is discounted by `discount` as often as the deepest turn that the agent had when the reward was given
        is deeper than the turn that earns it. A penalty is due as soon as its turn is received. `after` comes one turn
        deeper than the deepest. In a chain: `R_k = r_k + p_k + discount * R_{k+1}`, with `after` as R after the last.
        """
        turns = [turn for turn in np.argsort(self.order).tolist() if self.order[turn] >= 0]  # N, as received
        due = np.bincount(self.paid, rewards, len(turns) + 1) + np.bincount(self.order + 1, penalties, len(turns) + 1)
        deepest = np.maximum.accumulate(self.depth[turns]).tolist()  # N, depth of the deepest turn received so far
        result, following, later = np.zeros(len(self.order)), after, deepest[-1] + 1 if turns else 0
        for turn, now, value in zip(turns[::-1], deepest[::-1], due[:0:-1].tolist(), strict=True):
            following = value + discount ** (later - now) * following
            result[turn] = discount ** (now - int(self.depth[turn])) * following
            later = now
        return result


def chain(turns: int) -> Causes:
    """Return the causes of a chain: each turn was asked for when the one before it had been received and paid."""
    return Causes(*_chain(turns))


def causes_of(row: Trajectory, graded: Bools) -> Causes:
    """Return what came before what in an episode, by its columns `received`, `asked` and `paid`.

    A graded turn [K] for which no reward was given while the agent ran is paid at the end, any other when it is
    received.
    """
    if not row.received:
        return chain(len(row.turns))
    received, paid = np.array(row.received, np.int64), np.array(row.paid, np.int64)
    given = np.where(graded, (received >= 0).sum(), received + 1)
    return Causes(received, _depth(received, row.asked), np.where(received < 0, 0, np.where(paid > 0, paid, given)))


def in_order(row: Trajectory) -> bool:
    """Return whether the columns of the order are empty, or say one thing that is possible."""
    turns, got = len(row.turns), [place for place in row.received if place >= 0]
    columns = row.received, row.asked, row.paid
    return not any(columns) or (
        all(len(column) == turns for column in columns)
        and sorted(got) == list(range(len(got)))
        and all(
            0 <= asked <= (received if received >= 0 else len(got)) and (paid == 0 or received < paid <= len(got))
            for received, asked, paid in zip(*columns, strict=True)
        )
    )


def _chain(turns: int) -> tuple[Ints, Ints, Ints]:
    places = np.arange(turns, dtype=np.int64)
    return places, places, places + 1


def _depth(received: Ints, asked: list[int]) -> Ints:
    """Count the turns [K] in the longest line of causes before each turn; 0 for turns never received."""
    depth, deepest = np.zeros_like(received), [-1]  # of the first 0, 1, 2 … completions that the agent got
    for turn in np.argsort(received).tolist():
        if received[turn] >= 0:
            depth[turn] = deepest[asked[turn]] + 1
            deepest.append(max(deepest[-1], int(depth[turn])))
    return depth
