"""Checks of plain values that an agent made: of the exact types and sizes that Arrow stores."""

from numbers import Real
from typing import Any

import numpy as np

LONGEST_TEXT = 1_000_000
"""Characters of a text in a record."""
MOST_TOKENS = 4_000_000
"""Of a trajectory."""


class RefusedError(ValueError):
    """An agent asked or returned what cannot be; the message says what, and what to do."""


def check_ids(name: str, ids: Any, vocabulary: int) -> None:
    check_kinds(name, ids, {int})
    if len(ids) > MOST_TOKENS:
        raise RefusedError(f"{name}: {len(ids):,} are more than the {MOST_TOKENS:,} that a record may have")
    if ids and not (min(ids) >= 0 and max(ids) < vocabulary):
        strange = next(number for number in ids if not 0 <= number < vocabulary)
        raise RefusedError(f"{name}: the policy has no token {strange}, only 0 to {vocabulary - 1}")


def check_kinds(name: str, values: Any, kinds: set[type]) -> None:
    """Arrow would refuse other types, or store them as something else."""
    if type(values) is not list:
        raise RefusedError(f"{name}: {shown(values)} is no list")
    if strange := set(map(type, values)) - kinds:
        expected = " or ".join(sorted(kind.__name__ for kind in kinds))
        found = ", ".join(sorted(kind.__name__ for kind in strange))
        raise RefusedError(f"{name} holds values of type {found}, not {expected}: convert them (numpy: .tolist())")


def check_text(name: str, text: Any) -> None:
    if type(text) is not str:
        raise RefusedError(f"{name}: {shown(text)} is no text")
    if len(text) > LONGEST_TEXT:
        raise RefusedError(f"{name}: {len(text):,} characters are more than the {LONGEST_TEXT:,} that a text may have")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RefusedError(f"{name} cannot be stored as UTF-8: {error.reason} at character {error.start}") from None


def check_seed(name: str, seed: Any) -> None:
    if type(seed) is not int or not -(2**63) <= seed < 2**63:
        raise RefusedError(f"{name}: {shown(seed)} is no 64-bit number: keep the one in the outputs' seeds")


def number(name: str, value: Any) -> float:
    if isinstance(value, np.bool_):  # as Python's, which is a number
        value = bool(value)
    real = isinstance(value, Real) and -3e38 < value < 3e38  # type: ignore[operator]  # the abstract class has none
    if not real:  # also NaN, and what is infinite as a float32
        raise RefusedError(f"{name} is {shown(value)}: give a finite number")
    return float(value)


def shown(value: Any) -> str:
    """A value for a message: what it is, and a little of it."""
    plain = value is None or isinstance(value, str | int | float)
    return f"{value!r:.80}" if plain else f"a value of type {type(value).__name__}"
