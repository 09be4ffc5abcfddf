"""Parsing of every command line: options may come before, between and after positional arguments."""

import argparse
import math
from collections.abc import Callable, Sequence
from typing import Any

_LARGEST = 10**9
"""Largest whole number that is accepted; numbers of versions, rows and moves are smaller."""


class Parser(argparse.ArgumentParser):
    """A parser that accepts options between several positional arguments: `verify demo/latest --deep champion`.

    The parsers of its commands are of this type, too.
    """

    _mixing = False

    def parse_known_args(  # type: ignore[override]  # the overloads differ in what they return for a namespace
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """Parse intermixed arguments. argparse calls this for the whole line, and again for a command in it."""
        if self._mixing or self._subparsers is not None:  # intermixed parsing does not support commands
            return super().parse_known_args(args, namespace)
        self._mixing = True
        try:
            return self.parse_known_intermixed_args(args, namespace)
        finally:
            self._mixing = False


def parse_with_shared(parser: Parser, shared: argparse.ArgumentParser) -> argparse.Namespace:
    """Parse `sys.argv`. The options of `shared`, one of the parser's `parents`, may also come after a command."""
    namespace, rest = shared.parse_known_args()
    return parser.parse_args(rest, namespace)


def whole(least: int) -> Callable[[str], int]:
    """Return the `type` of an argument that is a whole number, at least `least`."""

    def read(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = least - 1
        if number < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
        if number > _LARGEST:
            raise argparse.ArgumentTypeError(f"{text!r} is too large: {_LARGEST:,} at most")
        return number

    return read


def positive_or_zero(text: str) -> float:
    """Convert an argument to a finite number, at least 0; for argparse's `type`."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:  # also NaN
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 0")
    return number
