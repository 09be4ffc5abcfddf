"""Checks of an agent's plain values: they must have the exact types and sizes that Arrow stores."""

from numbers import Real
from typing import Any

import numpy as np

LONGEST_TEXT = 1_000_000
"""Most characters of a text in a record."""
MOST_TOKENS = 4_000_000
"""Most tokens of a trajectory."""


class RefusedError(ValueError):
    """An invalid observation or return value of an agent; the message says what was wrong and what to do."""


def check_ids(name: str, ids: Any, vocabulary: int) -> None:
    check_kinds(name, ids, {int})
    if len(ids) > MOST_TOKENS:
        raise RefusedError(f"{name}: {len(ids):,} tokens are too many, a record has at most {MOST_TOKENS:,}")
    if ids and not (min(ids) >= 0 and max(ids) < vocabulary):
        strange = next(number for number in ids if not 0 <= number < vocabulary)
        raise RefusedError(f"{name}: the policy has no token {strange}, only 0 to {vocabulary - 1}")


def check_kinds(name: str, values: Any, kinds: set[type]) -> None:
    """Check that `values` is a list with values of exactly these types: Arrow would refuse or convert others."""
    if type(values) is not list:
        raise RefusedError(f"{name}: {shown(values)} is not a list")
    if strange := set(map(type, values)) - kinds:
        expected = " or ".join(sorted(kind.__name__ for kind in kinds))
        actual = ", ".join(sorted(kind.__name__ for kind in strange))
        raise RefusedError(f"{name} holds values of type {actual}, not {expected}: convert them (numpy: .tolist())")


def check_text(name: str, text: Any) -> None:
    if type(text) is not str:
        raise RefusedError(f"{name}: {shown(text)} is not a text")
    if len(text) > LONGEST_TEXT:
        raise RefusedError(f"{name}: {len(text):,} characters are too many, a text has at most {LONGEST_TEXT:,}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RefusedError(f"{name} cannot be stored as UTF-8: {error.reason} at character {error.start}") from None


def check_seed(name: str, seed: Any) -> None:
    if type(seed) is not int or not -(2**63) <= seed < 2**63:
        raise RefusedError(f"{name}: {shown(seed)} is not a 64-bit number: keep the seed of the engine's outputs")


def number(name: str, value: Any) -> float:
    if isinstance(value, np.bool_):  # not a number to Python, unlike its own bool
        value = bool(value)
    real = isinstance(value, Real) and -3e38 < value < 3e38  # type: ignore[operator]  # the abstract class has no `<`
    if not real:  # also NaN, and values that are infinite as float32
        raise RefusedError(f"{name} is {shown(value)}: give a finite number")
    return float(value)


def shown(value: Any) -> str:
    """Return a value as text for a message: its beginning if it is plain, otherwise its type."""
    plain = value is None or isinstance(value, str | int | float)
    return f"{value!r:.80}" if plain else f"a value of type {type(value).__name__}"
