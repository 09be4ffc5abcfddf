"""Checks that a configuration holds only values that YAML and JSON store and read back unchanged."""

import math
from collections.abc import Iterator
from typing import Any

_DEEPEST = 50
"""Most levels of nested mappings and lists; parsers and writers of YAML and JSON fail somewhere above this."""
_LARGEST_BITS = 10_000
"""Bits of the largest integer; Python writes at most 4,300 digits."""
_SHOWN = 300
"""Most characters of a value that a message shows."""


def check_plain(values: dict[str, Any]) -> None:
    """Refuse values that could not be stored with a run, or would be read back as something else.

    >>> check_plain({"agent": {"args": {"limits": [1.0, math.inf]}}})
    Traceback (most recent call last):
    ValueError: agent.args.limits.1=inf is not a finite number: …

    Raises:
        ValueError: the message names the dotted key and the value.
    """
    for depth, key, value in walk(values):
        if depth > _DEEPEST:
            raise ValueError(f"{key}: more than {_DEEPEST} nested mappings and lists: nest them less deeply")
        if problem := _problem(value):
            raise ValueError(f"{key}{problem}")


def walk(values: dict[Any, Any] | list[Any], depth: int = 1, prefix: str = "") -> Iterator[tuple[int, str, Any]]:
    """Yield depth, dotted key and value of everything in `values`, from the outside to the inside.

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
    """Write `value` for a message, in a few lines at most."""
    try:
        text = repr(value)
    except ValueError:  # more digits than Python writes
        return f"a number of {value.bit_length()} bits" if isinstance(value, int) else f"a {type(value).__name__}"
    rest = len(text) - _SHOWN
    return f"{text[:_SHOWN]} … {rest:,} more characters" if rest > 0 else text


def _problem(value: Any) -> str:
    """Describe what is wrong with a value, as text that follows its key; empty if nothing is."""
    if isinstance(value, float) and not math.isfinite(value):
        return f"={value!r} is not a finite number: runs store their configuration as JSON, which has no other numbers"
    if isinstance(value, int) and value.bit_length() > _LARGEST_BITS:
        return f": a number of {value.bit_length()} bits: use a smaller one"
    if isinstance(value, str) and _is_broken(value):
        return f"={value!r} holds half a surrogate pair, which UTF-8 cannot store: use valid UTF-8 text"
    if value is not None and not isinstance(value, bool | int | float | str | list | dict):
        return f"={value!r}: {type(value).__name__} cannot be stored: use text, numbers, true, false, lists or mappings"
    return ""


def _is_broken(text: str) -> bool:
    return any("\ud800" <= character <= "\udfff" for character in text)
