"""Which values a configuration may hold: those that YAML and JSON give back as they were."""

import math
from collections.abc import Iterator
from typing import Any

_DEEPEST = 50
"""Mappings and lists within each other; what reads and writes YAML and JSON gives up somewhere above."""
_LARGEST_BITS = 10_000
"""Bits of the largest integer; Python writes no more than 4,300 digits."""
_SHOWN = 300
"""Characters of a value that a message shows."""


def check_plain(values: dict[str, Any]) -> None:
    """Refuse what could not be stored with a run, or would be read back as something else.

    >>> check_plain({"agent": {"args": {"limits": [1.0, math.inf]}}})
    Traceback (most recent call last):
    ValueError: agent.args.limits.1=inf is not a finite number: …

    Raises:
        ValueError: naming the dotted key and the value.
    """
    for depth, key, value in walk(values):
        if depth > _DEEPEST:
            raise ValueError(f"{key}: more than {_DEEPEST} mappings and lists within each other: nest them less deep")
        if problem := _problem(value):
            raise ValueError(f"{key}{problem}")


def walk(values: dict[Any, Any] | list[Any], depth: int = 1, prefix: str = "") -> Iterator[tuple[int, str, Any]]:
    """Depth, dotted key and value of everything in `values`, from the outside in.

    Raises:
        ValueError: a key is not text.
    """
    for name, value in values.items() if isinstance(values, dict) else enumerate(values):
        if isinstance(values, dict) and (not isinstance(name, str) or _is_broken(name)):
            raise ValueError(f"{prefix}{name!r}: a key must be text: write it in quotes")
        key = f"{prefix}{name}"
        yield depth, key, value
        if isinstance(value, dict | list):
            yield from walk(value, depth + 1, f"{key}.")


def brief(value: Any) -> str:
    """`value` in a message: not longer than a few lines, however large it is."""
    try:
        text = repr(value)
    except ValueError:  # more digits than Python writes
        return f"a number of {value.bit_length()} bits" if isinstance(value, int) else f"a {type(value).__name__}"
    rest = len(text) - _SHOWN
    return f"{text[:_SHOWN]} … {rest:,} more characters" if rest > 0 else text


def _problem(value: Any) -> str:
    """Describe what is wrong with a value, as text that follows its key; empty if nothing is."""
    if isinstance(value, float) and not math.isfinite(value):
        return f"={value!r} is not a finite number: JSON, in which runs keep their configuration, knows no other"
    if isinstance(value, int) and value.bit_length() > _LARGEST_BITS:
        return f": a number of {value.bit_length()} bits: use a smaller one"
    if isinstance(value, str) and _is_broken(value):
        return f"={value!r} holds half a surrogate pair, which UTF-8 cannot store: use text in UTF-8"
    if value is not None and not isinstance(value, bool | int | float | str | list | dict):
        return f"={value!r}: {type(value).__name__} cannot be stored: use text, numbers, true, false, lists or mappings"
    return ""


def _is_broken(text: str) -> bool:
    return any("\ud800" <= character <= "\udfff" for character in text)
