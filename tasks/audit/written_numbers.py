"""Read answers as normalised strings and as lists of exact numbers: tuples, intervals and the like.

What one number is says `tasks.score.numbers`, for the verifier, too. Its bracket, its list and its comparison are the
second checker's own.
"""

import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from tasks.score.numbers import LONGEST, Number, read_number

__all__ = ["LONGEST", "UNSIGNED", "Opinion", "bare", "canonical", "compare_numbers", "read_numbers"]

Opinion = Literal["right", "wrong", "cannot say"]

_NEAR = Fraction(1, 1000)  # relative difference up to which one number may be the other one, rounded

UNSIGNED = r"(?:\d{1,3}(?:,\d{3})+(?![\d,])|\d+)(?:\.\d+)?|\.\d+"
"""A number in a text, with or without thousands separators."""


@dataclass(frozen=True, slots=True)
class Numbers:
    """The numbers of an answer: one, or those of a tuple, an interval or a list."""

    values: tuple[Fraction, ...]
    brackets: str  # around several numbers, such as `(]`; empty without brackets
    unit: str
    percent: bool

    def scaled(self, scale: Fraction) -> "Numbers":
        return Numbers(tuple(value * scale for value in self.values), self.brackets, self.unit, self.percent)


def compare_numbers(left: Numbers, right: Numbers) -> Opinion:
    """Return whether two answers are the same numbers; rounded or reordered numbers and other units are undecided."""
    if (len(left.values) == 1) != (len(right.values) == 1) or (left.unit and right.unit and left.unit != right.unit):
        return "cannot say"
    scaled = [left.scaled(scale) for scale in _scales(left, right)]
    if any(_are_same(each, right) for each in scaled):
        return "right" if left.brackets == right.brackets or not (left.brackets and right.brackets) else "cannot say"
    return "cannot say" if any(_are_near(each, right) for each in scaled) else "wrong"


def _scales(left: Numbers, right: Numbers) -> list[Fraction]:
    """Return the factors to try on `left`: 50 % may be written as 50 and as 0.5."""
    if left.percent == right.percent:
        return [Fraction(1)]
    return [Fraction(1), Fraction(1, 100) if left.percent else Fraction(100)]


def _are_same(left: Numbers, right: Numbers) -> bool:
    """Compare the values; their order matters only in tuples and intervals."""
    if set(left.brackets + right.brackets) & set("()[]"):
        return left.values == right.values
    return sorted(left.values) == sorted(right.values)


def _are_near(left: Numbers, right: Numbers) -> bool:
    """Return whether one answer may be the other one, rounded or in another order."""
    pairs = list(zip(sorted(left.values), sorted(right.values), strict=False))
    close = all(abs(one - other) <= _NEAR * max(abs(one), abs(other)) for one, other in pairs)
    rounded = all(one.denominator * other.denominator > 1 or one == other for one, other in pairs)
    return close and rounded and len(left.values) == len(right.values)


_IGNORED = re.compile(
    r"\\left(?![a-z])|\\right(?![a-z])|\\[bB]igg?[lr]?(?![a-z])|\\displaystyle|\\[!,;:>]|\\q?quad(?![a-z])|(?<!\\)\$"
    r"|\\[()\[\]]|\^\s*\{?\s*\\(?:circ|degree)\s*\}?|\\(?:degree|circ)(?![a-z])|°|\\\$|[€£]"
)
_REPLACED = {0x2212: "-", 0x2013: "-", 0xA0: " ", 0xD7: "*"}  # minus, dash, no-break space, times
_THOUSANDS = re.compile(r"(?<=\d)(?:\{,\}|,\\!)\s*(?=\d{3}(?!\d))")
_SPACES = re.compile(r"\\ |~|\s+")
_FRACTION = re.compile(r"\\[dtc]?frac")


def bare(answer: str) -> str:
    """Remove delimiters, sizes, currencies and degrees; write minus, fractions and thousands in one way."""
    text = _THOUSANDS.sub(",", answer.translate(_REPLACED))
    text = _SPACES.sub(" ", _IGNORED.sub("", text))
    text = _FRACTION.sub(r"\\frac", text.replace("\\lbrace", "\\{").replace("\\rbrace", "\\}"))
    text = re.sub(r"\\frac\s*(\d)\s*(\d)(?!\d)", r"\\frac{\1}{\2}", text)
    text = re.sub(r"\\frac\s*(\d)\s*\{", r"\\frac{\1}{", text)
    text = re.sub(r"(\\frac\{[^{}]*\})\s*(\d)(?!\d)", r"\1{\2}", text)
    text = re.sub(r"\\sqrt\s*(\w)", r"\\sqrt{\1}", text)
    return text.strip(" *.") if not text.lstrip(" *").startswith(".") else text.strip(" *").rstrip(".")


_WORDS = re.compile(r"\\(?:text|mbox|mathrm|textbf|textit|textrm|mathbf|operatorname)\s*\{([^{}]*)\}")


def canonical(plain: str) -> str:
    """Return the string by which answers that are not numbers are compared."""
    text = re.sub(r"(?<!\d)\s|\s(?!\d)|\{(?=\w\})|(?<=\{\w)\}", "", _unscripted(_WORDS.sub(r"\1", plain)))
    text = re.sub(r"^\((\w)\)$", r"\1", text)
    return text.casefold() if re.fullmatch(r"[A-Za-z.]{2,}|[A-Za-z]", text) else text


def _unscripted(text: str) -> str:
    r"""Write `x^{2}` as `x^2`."""
    return re.sub(r"([\^_])\s*\{(\w)\}", r"\1\2", text)


_EQUALS = re.compile(r"^\s*[A-Za-z](?:_\{?\w\}?)?(?:\(\w\))?\s*(?:=|\\in(?![a-z]))\s*")
_BRACKETED = re.compile(r"^(\(|\[|\\\{)(.*)(\)|\]|\\\})$", re.DOTALL)


def read_numbers(text: str) -> Numbers | None:
    """Return the numbers that an answer consists of, or None if it is something else."""
    if not text or len(text) > LONGEST:
        return None
    plain = bare(text)
    if len({name[0] for part in _parts(plain)[1] if (name := _EQUALS.match(part))}) > 1:
        return None  # x = 2, y = 3
    brackets, parts = _parts(_EQUALS.sub("", plain))
    numbers = [number for part in parts for number in _numbers(_EQUALS.sub("", part))]
    known = [number for number in numbers if number is not None]
    if not known or len(known) < len(numbers):
        return None
    units, percent = {number.unit for number in known}, any(number.percent for number in known)
    values = tuple(number.value for number in known)
    return Numbers(values, brackets if len(known) > 1 else "", units.pop() if len(units) == 1 else "", percent)


def _parts(text: str) -> tuple[str, list[str]]:
    """Return the brackets and the elements of a tuple, list or interval; `1,000` without brackets is one number."""
    brackets, inner = "", text.strip()
    if found := _BRACKETED.match(inner):
        brackets, inner = (found[1] + found[3]).replace("\\", ""), found[2]
    elif re.fullmatch(rf"\s*[-+]?\s*(?:{UNSIGNED})\s*", inner):
        return "", [inner.replace(",", "")]
    return brackets, [part.strip() for part in re.split(r",|;|\bor\b|\band\b", inner)]


def _numbers(text: str) -> list[Number | None]:
    r"""Return the number that `text` is, or two numbers if it begins with `\pm`; None is not a number."""
    text = text.strip()
    if text.startswith(("\\pm", "±")):
        value = text.removeprefix("\\pm").removeprefix("±").strip()
        return [read_number(value), read_number(f"-{value}")]
    return [None if re.search(r"[A-Za-z].*=", text) else read_number(text)]
