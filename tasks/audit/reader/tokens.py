"""Prepare the tokens of a trajectory for a page: in spans, and for a long trajectory one part at a time."""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TypeVar

from storage.records import Trajectory
from storage.visible import visible

T = TypeVar("T")

PART = 2000
"""Tokens on one page."""


@dataclass(frozen=True, slots=True)
class Token:
    r"""One token of a trajectory; values that a damaged row lacks are None.

    Example: Token(position=18, id=108, text="\\boxed", sampled=True, logprob=-0.002, version=61, advantage=0.5)
    """

    position: int
    id: int
    text: str
    sampled: bool
    logprob: float | None
    version: int | None
    advantage: float | None

    @property
    def shown(self) -> str:
        """The visible text with a sign for line breaks, or the id if the token has no text."""
        return visible(self.text).replace("\n", "↵\n") or f"⟨{self.id}⟩"

    @property
    def about(self) -> str:
        """The values of the token in one line, for a tooltip."""
        numbers = (("logprob", self.logprob), ("advantage", self.advantage))
        values = [f"{name} {number:.4g}" for name, number in numbers if self.sampled and number is not None]
        version = [f"policy version {self.version}"] if self.sampled else ["not sampled"]
        return ", ".join([f"position {self.position}", f"id {self.id}", *values, *version])


@dataclass(frozen=True, slots=True)
class Span:
    """The tokens of a prompt, turn or feedback, or the part of them that is on this page.

    Example: Span(title="Turn 1", tokens=[…])
    """

    title: str
    tokens: list[Token]

    @property
    def sampled(self) -> bool:
        return any(token.sampled for token in self.tokens)

    def says(self, colour: str) -> str:
        """Describe the sampled tokens: their policy versions, and the mean logprob or the range of advantages."""
        sampled = [token for token in self.tokens if token.sampled]
        versions = sorted({token.version for token in sampled if token.version is not None})
        parts = (
            [f"policy version{'s' if len(versions) > 1 else ''} {', '.join(map(str, versions))}"] if versions else []
        )
        logprobs = [token.logprob for token in sampled if token.logprob is not None]
        advantages = [token.advantage for token in sampled if token.advantage is not None]
        if colour == "logprob" and logprobs:
            parts.append(f"mean logprob {sum(logprobs) / len(logprobs):.3g}")
        if colour == "advantage" and advantages:
            low, high = min(advantages), max(advantages)
            parts.append(f"advantage {low:.3g}" if low == high else f"advantages {low:.3g} to {high:.3g}")
        return ", ".join(parts)

    def changes(self) -> Iterator[tuple[Token, bool]]:
        """Yield each token, and whether another policy version begins with it."""
        before: int | None = None
        for token in self.tokens:
            yield token, token.sampled and token.version != before
            before = token.version if token.sampled else before


def parts(row: Trajectory) -> int:
    """Return the number of pages for the tokens."""
    return max(1, -(-len(row.token_ids) // PART))


def spans(row: Trajectory, part: int, text: Callable[[int], str], advantages: Mapping[int, float]) -> list[Span]:
    """Return the spans of one page.

    Args:
        row: the trajectory.
        part: number of the page, from 0.
        text: returns the text of a token id.
        advantages: advantages by position.
    """
    on_page = range(part * PART, min(len(row.token_ids), (part + 1) * PART))
    result = []
    for title, positions in groupby(on_page, lambda position: _title(row, position)):
        tokens = [_token(row, position, text, advantages) for position in positions]
        result.append(Span(title, tokens))
    return result


def _token(row: Trajectory, position: int, text: Callable[[int], str], advantages: Mapping[int, float]) -> Token:
    number, sampled = row.token_ids[position], bool(_at(row.action_mask, position))
    logprob, version = _at(row.logprobs, position), _at(row.versions, position)
    return Token(position, number, text(number), sampled, logprob, version, advantages.get(position))


def _at(values: Sequence[T], position: int) -> T | None:
    return values[position] if position < len(values) else None


def _title(row: Trajectory, position: int) -> str:
    """Return the title of the span of a token: a turn, the prompt, or the text after a turn."""
    for number, turn in enumerate(row.turns, 1):
        if turn.start <= position < turn.end:
            return f"Turn {number}"
    starts = sorted({0, *row.sequence_starts})
    sequence = bisect_right(starts, position)
    begin = starts[sequence - 1]
    before = [number for number, turn in enumerate(row.turns, 1) if begin <= turn.start and turn.end <= position]
    title = f"After turn {before[-1]}" if before else "Prompt"
    return f"{title}, sequence {sequence} of {len(starts)}" if len(starts) > 1 else title
