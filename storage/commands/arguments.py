"""How every command line reads its arguments: options may stand before, between and behind the others."""

import argparse
import math
from collections.abc import Callable, Sequence
from typing import Any

_MOST = 10**9
"""Largest whole number: there are never so many versions, rows or moves."""


class Parser(argparse.ArgumentParser):
    """Also where the others are several: `verify demo/latest --deep champion`. Its commands are such parsers, too."""

    _mixing = False

    def parse_known_args(  # type: ignore[override]  # the overloads differ in what they return for a namespace
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """What argparse calls for the whole line, and for a command of it."""
        if self._mixing or self._subparsers is not None:  # commands have to come after what belongs to all of them
            return super().parse_known_args(args, namespace)
        self._mixing = True
        try:
            return self.parse_known_intermixed_args(args, namespace)
        finally:
            self._mixing = False


def parse_with_shared(parser: Parser, shared: argparse.ArgumentParser) -> argparse.Namespace:
    """Parse `sys.argv`; the options of `shared`, one of the parser's `parents`, may also stand behind a command."""
    found, rest = shared.parse_known_args()
    return parser.parse_args(rest, found)


def whole(least: int) -> Callable[[str], int]:
    """The `type` of an argument that is a whole number from `least` on."""

    def read(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = least - 1
        if number < least:
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number from {least} on")
        if number > _MOST:
            raise argparse.ArgumentTypeError(f"{text!r} is too large: {_MOST:,} at most")
        return number

    return read


def positive_or_zero(text: str) -> float:
    """The `type` of an argument that is a finite number from 0 on."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:  # also NaN
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 0 on")
    return number
