"""Where the sequences of a trajectory begin, and why."""

from dataclasses import dataclass
from typing import Literal

from storage.records import Trajectory


@dataclass(frozen=True, slots=True)
class Beginning:
    """The begin of a sequence that is not the episode's only one.

    conversation: its first turn follows none. branch: it repeats the tokens up to another turn, from which it goes on.
    rewritten: its first turn follows another one, but the tokens before it are others.

    Example: Beginning(sequence=2, of=3, kind="branch", follows=0)
    """

    sequence: int  # from 1 on
    of: int
    kind: Literal["conversation", "branch", "rewritten"]
    follows: int  # the turn that its first turn follows; -1: none


def beginnings(row: Trajectory) -> dict[int, Beginning]:
    """Return the beginnings of sequences, by the number of their first turn; none if the row is one conversation."""
    starts, found = sorted({0, *row.sequence_starts}), dict[int, Beginning]()
    if len(starts) < 2:
        return {}
    first: dict[int, int] = {}
    for number, turn in enumerate(row.turns):
        first.setdefault(_start(starts, turn.start), number)
    for start, number in first.items():
        follows = row.follows[number] if number < len(row.follows) else number - 1
        kind = _kind(row, starts, start, follows)
        found[number] = Beginning(starts.index(start) + 1, len(starts), kind, follows)
    return found


def _start(starts: list[int], place: int) -> int:
    return max((start for start in starts if start <= place), default=0)


def _kind(
    row: Trajectory, starts: list[int], start: int, follows: int
) -> Literal["conversation", "branch", "rewritten"]:
    if not 0 <= follows < len(row.turns):
        return "conversation"
    before = row.turns[follows]
    history = row.token_ids[_start(starts, before.start) : before.end]
    return "branch" if row.token_ids[start : start + len(history)] == history else "rewritten"
