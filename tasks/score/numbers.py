r"""What a plain number is, and when two are the same: the only reading of numbers, for the verifier and the audit.

A plain number is evaluated: `12 + 7`, `2^{10}`, `36/2`, `18!` and `5x` are none. These are, also with a sign, a
currency, a unit, a percent sign, brackets around them, or a name before them (`x = 42`, `(C) 42`, `Total: 42`):

| number | written as |
|---|---|
| whole numbers, decimals | `1800`, `1,800.00`, `1 800`, `1{,}800`, `1.234,56`, `1,5`, `.5` |
| powers of ten | `1.8e6`, `1.8 \times 10^{6}`, `10^6`, `18 thousand`, `18k`, `1.8 million`, `2 dozen` |
| fractions with a rest, fractions of these | `1/2`, `\frac{1}{2}`, `\frac{1}{\frac{1}{3}}`; `3/1` |
| mixed numbers | `3 1/2`, `3\frac{1}{2}`, `3½`, `3 and 1/2`, `3-1/2` (which is 2.5) |

Numbers are compared exactly, with two exceptions. A percentage is itself or a hundredth of it: 28 % is 28 or 0.28. A
decimal of six or more significant digits is a fraction whose decimals never end, if it is that fraction correctly
rounded: 0.333333 is 1/3, 0.3333 is not.

Words beside a number change or deny it, in the languages of `languages.toml`; some scripts have no blanks:

| written | is |
|---|---|
| `n'est pas 42`, `nicht gleich 42`, `不是42`, `42ではない`, `42가 아니다` | no answer |
| `42个苹果`, `42です`, `42입니다` | 42 |
| `负42`, `минус 42` | -42 |
| `4万`, `4 тысячи` | 40,000 and 4,000 |
| `7或8`, `7 oder 8` | a list |
"""

import re
import tomllib
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache
from pathlib import Path

from tasks.score.plain_text import in_ascii, unmarked, unstyled

_TABLES = tomllib.loads(Path(__file__).with_name("languages.toml").read_text("utf-8")).values()


@cache
def words_of(kind: str) -> frozenset[str]:
    """Return the words of one kind in all languages."""
    return frozenset(word for table in _TABLES for word in table.get(kind, "").split())


def patterns(kind: str) -> str:
    """Return a regular expression for the words of one kind, longer ones first."""
    return "|".join(sorted(words_of(kind), key=lambda word: (-len(word), word)))


_SCRIPTS = r"\u0400-\u1dff\u2d00-\u2dff\u3005-\u3007\u3040-\ud7ff\uf900-\ufaff\ufb1d-\ufdff\ufe70-\ufefc\uff66-\uffdc"
SCRIPT = f"[{_SCRIPTS}]"
"""A letter, or a mark beside one, of a script in which no formula is written: neither Latin nor Greek."""
LETTER = rf"[A-Za-z\u00c0-\u024f\u1e00-\u1eff{_SCRIPTS}]"

_NOT, _IS = patterns("not"), patterns("is")
_NEAR = r"[\s$\\()\[\]}*\"'\u00ab\u00bb\u201c\u201d\u201e]*"
_DENIED_BEFORE = re.compile(rf"(?i)(?:(?<![\w'\u2019-])(?:{_NOT})(?:\s+(?:{_IS}))*|{patterns('denied')}){_NEAR}$")
DENIED_AFTER = re.compile(
    rf"(?i){_NEAR}(?:(?:{_IS})\s+(?:\w+\s+)?(?:{_NOT}|{patterns('wrong')})(?!\w)|(?:{_NOT})\s+(?:{_IS})(?!\w)|{patterns('after')})"
)
_BESIDE = 60
"""Most characters beside an answer in which it is denied."""
NEGATIVE = rf"(?:{patterns('minus')})(?![A-Za-z])\s*"
ALTERED = re.compile(rf"\s*(?:{patterns('altered')})")
JOINED = re.compile(rf"{patterns('or')}|{patterns('joint')}", re.IGNORECASE)
SCALES = {name: int(scale) for table in _TABLES for name, scale in table.get("scale", {}).items()}

_JOINT = re.compile(rf"(?<=\d)\s?([\u30a0-\u9fff\uac00-\ud7a3つこ]{{0,2}})\s?(?:{patterns('joint')})\s?(?=\d)")


def is_denied(before: str, after: str = "") -> bool:
    """Return whether what stands between two texts is said to be no answer.

    >>> is_denied("La réponse n'est pas ", "."), is_denied("No, es "), is_denied("", "は答えではない")
    (True, False, True)
    """
    return bool(_DENIED_BEFORE.search(before[-_BESIDE:]) or DENIED_AFTER.match(after[:_BESIDE]))


def spaced(text: str) -> str:
    """Separate words from numbers in scripts that have no blanks.

    >>> spaced("答案是42个"), spaced("7或8")
    (' 答案是 42 个 ', '7  or 8')
    """
    if text.isascii():
        return text
    joined = _JOINT.sub(r" \1 or ", re.sub(r"百分之\s?([\d.]+)", r"\1%", text))
    return re.sub(f"{SCRIPT}+", r" \g<0> ", joined)


LONGEST = 200
"""The most characters of an answer that is read as a number."""


@dataclass(frozen=True, slots=True)
class Number:
    """A plain number.

    Example: "18.50 km" is Number(Fraction(37, 2), decimals=2, unit="km")
    """

    value: Fraction
    decimals: int | None = None  # how many were written, fewer than 0 before powers of ten; None: a fraction
    unit: str = ""
    percent: bool = False


def same(left: Number, right: Number) -> bool:
    """Return whether two numbers are the same; a unit matters only if both have one of the same kind.

    >>> half, percentage = read_number("0.5"), read_number("50%")
    >>> same(half, percentage), same(read_number("1/3"), read_number("0.333333"))
    (True, True)
    """
    if (one := UNITS.get(left.unit)) and (other := UNITS.get(right.unit)) and one != other:
        return False
    if left.value == right.value or _rounded(left, right) or _rounded(right, left):
        return True
    return left.percent != right.percent and same(_without_percent(left), _without_percent(right))


def _without_percent(number: Number) -> Number:
    """Return a number as it is, and a percentage as a hundredth of it."""
    decimals = None if number.decimals is None else number.decimals + 2
    return replace(number, value=number.value / 100, decimals=decimals, percent=False) if number.percent else number


def _rounded(decimal: Number, exact: Number) -> bool:
    """Return whether a decimal with enough digits is a fraction without an end, correctly rounded."""
    denominator = exact.value.denominator  # it divides a power of ten if the decimals have an end
    if decimal.decimals is None or exact.decimals is not None or not pow(10, denominator.bit_length(), denominator):
        return False
    power = Fraction(10) ** decimal.decimals
    return abs(decimal.value) * power >= 100_000 and 2 * abs(decimal.value - exact.value) * power <= 1


def simplified(text: str) -> str:
    r"""Return a short text in the form in which numbers are read.

    >>> simplified(r"\boldsymbol{18}\,\%"), simplified("**$18.00**.")
    ('18 %', '$18.00')
    """
    text = _DELIMITERS.sub(" ", text) if "\\" in text else text
    text = _CROSS.sub("\\\\times ", text) if "x" in text else text
    text = unmarked(unstyled(in_ascii(text.replace("\\$", "$").replace("\\%", "%"))))
    return text.strip(" \t\r\n,;:\"'").rstrip(" .,;:\"'\\")


_DELIMITERS = re.compile(r"\\[()\[\]]")
_CROSS = re.compile(r"(?<=\d) ?x ?(?=\d)")
_SIGN = re.compile(r"\s*([-+])\s*")
_CURRENCY = re.compile(r"(?:US|A|C|NZ|HK)?[$€£¥₹₽₩₪]|(?:USD|EUR|GBP|Rs\.?|INR|CHF)(?=[\s\d.-])")
_NEGATIVE = re.compile(NEGATIVE, re.IGNORECASE)
_ABOUT = re.compile(r"(?:\\(?:approx|sim|simeq)(?![A-Za-z])|about|approximately|exactly|roughly|around)\s*")
_CHOICE = re.compile(r"(?:\([A-Z]\)|[A-Z]\))\s*(?=\S)")
_LABEL = re.compile(
    r"(?:[^\W\d_]|\$)[\w '$()^{}\\-]*:\s*(?=\S)|(?:[A-Za-z']+\s+){1,6}(?:is|are|equals?|be)\s+"
    rf"|[^\W\d_不非未没沒無无至最超]*(?:{patterns('said')})\s*(?=\d)"
)
_EQUALS = re.compile(r"(?<![\\<>!=:/])(?<!\\not)(?<!\\not\s)=(?!=)|\\approx(?![A-Za-z])|\\equiv(?![A-Za-z])")
_OPENING = {"(": ")", "[": "]", "{": "}", '"': '"'}


def read_number(text: str) -> Number | None:
    r"""Return the plain number that a whole text is, or None.

    >>> read_number("18,000 cm").value, read_number(r"x = 3\frac{1}{2}").value, read_number("-18 thousand").value
    (Fraction(18000, 1), Fraction(7, 2), Fraction(-18000, 1))
    >>> [read_number(other) for other in ("12 + 7", "7 = 8", "x + 7 = 26", "18!", "36/2", "5x", "18 or 19")]
    [None, None, None, None, None, None, None]
    """
    return next(iter(readings(text)), None)


def readings(text: str) -> list[Number]:
    r"""Return the plain number that a whole text is; the exact and the rounded one of `\frac{1}{3} \approx 0.33`."""
    if not text or len(text) > LONGEST:
        return []
    plain = simplified(text).replace("&", "").removeprefix("=>")
    *sides, last = _EQUALS.split(plain) if "=" in plain or "\\" in plain else [plain]
    number = _side(last)
    if number is None or not sides:
        return [number] if number else []
    if not all(_is_name(side) or _computes(side) for side in sides):
        return []
    before, roughly = _side(sides[-1]), ROUGHLY.search(plain)
    if before is None and roughly and not _is_name(sides[-1]):  # whether it is near cannot be checked
        return [number] if number.decimals and number.value else []
    if before is None or before.unit:
        return [number]
    if roughly:
        difference = abs(before.value - number.value)  # rounded or cut to as many decimals as it has
        return [before, number] if difference * Fraction(10) ** max(number.decimals or 0, 0) < 1 else []
    return [number] if same(before, number) else []


ROUGHLY = re.compile(r"\\approx(?![A-Za-z])|≈")


_ARGUMENTS = re.compile(r"(?<=[A-Za-z])\([^()]*\)|_\{[^{}]*\}|_[A-Za-z0-9]|\\(?:angle|triangle|overline)(?![A-Za-z])")
_NO_NAME = re.compile(r"\d|[<>]|^\s*(?:-|\\sqrt|\|[A-Za-z]\|)|\b(?:not|never)\b|n't\b")
_COMPUTATION = re.compile(r"(?:\\[dt]?frac|\\times|\\cdot|\\div|\\sqrt|\\pm|[\d\s.,+*/^(){}$%€£-])*")


def _is_name(side: str) -> bool:
    """Return whether the side of an equation names what is asked, as `x`, `f(2)` and `Total` do; `x + 7` does not."""
    return not _NO_NAME.search(_ARGUMENTS.sub("", side))


def _computes(side: str) -> bool:
    """Return whether the side of an equation has numbers and no unknowns, perhaps with units."""
    words = [word for word in re.findall(r"(?<!\\)[A-Za-z]+", side) if len(word) < 2]
    return not words or _COMPUTATION.fullmatch(side) is not None


def _side(text: str) -> Number | None:
    """Return the number that one side of an equation is."""
    text = _unwrapped(text)
    for prefix in (_CHOICE, _LABEL, _ABOUT):
        if (found := prefix.match(text)) and found.end() < len(text):
            text = _unwrapped(text[found.end() :])
    sign, text = _signs(text)
    number = _unsigned(_unwrapped(text))
    return replace(number, value=sign * number.value) if number else None


def _signs(text: str) -> tuple[int, str]:
    """Return the sign before a number, which may stand before or after a currency, and the rest."""
    sign = 1
    for _ in range(4):
        if found := _NEGATIVE.match(text):
            sign, text = -sign, text[found.end() :]
        elif found := _SIGN.match(text):
            sign, text = -sign if found[1] == "-" else sign, text[found.end() :]
        elif found := _CURRENCY.match(text):
            text = text[found.end() :].lstrip()
    return sign, text


def _unwrapped(text: str) -> str:
    """Remove blanks, dollar signs of formulas and pairs of brackets or quotes around a text."""
    text = _trimmed(text)
    while len(text) > 1 and _OPENING.get(text[0]) == text[-1] and (text[0] == '"' or _closing(text) == len(text) - 1):
        if "," in text and text[0] in "([":
            return text  # a tuple or an interval
        text = _trimmed(text[1:-1])
    return text


def _trimmed(text: str) -> str:
    text = text.strip()
    surplus = text.count(")") - text.count("(")
    if surplus > 0 and text.endswith(")" * surplus):  # closed more often than opened
        text = text[:-surplus].rstrip()
    return text[:-1].rstrip() if text.endswith("$") and text.count("$") % 2 else text.strip("$ ")


def _closing(text: str) -> int:
    """Return the position of the bracket that closes the first character of a text; -1 if none does."""
    depth = 0
    for position, character in enumerate(text):
        depth += (character == text[0]) - (character == _OPENING[text[0]])
        if depth == 0:
            return position
    return -1


_GROUPED = r"\d{1,3}(?:,\d{3}(?!\d))+(?:\.\d+)?|\d{1,3}(?:[ ']\d{3}(?!\d))+(?:\.\d+)?"
_EUROPEAN = r"\d{1,3}(?:\.\d{3}){2,}(?:,\d+)?|\d{1,3}(?:\.\d{3})+,\d+"
_COMMA = r"\d+,\d+"
_SIMPLE = r"\d+(?:\.\d+)?\.?|\.\d+"
DECIMAL = rf"(?:{_EUROPEAN}|{_GROUPED}|{_COMMA}|{_SIMPLE})"
_POWER = r"10\s?\^\s?(?:\{\s?([-+]?\d{1,3})\s?\}|\(\s?([-+]?\d{1,3})\s?\)|([-+]?\d{1,3}))"
_SCIENTIFIC = re.compile(
    rf"({DECIMAL})\s?(?:[eE]([-+]?\d{{1,3}})(?![\d.])|(?:\\times|\\cdot|[*xX])\s?{_POWER})|{_POWER}"
)
_DECIMAL = re.compile(DECIMAL)
_SLASHED = re.compile(rf"({DECIMAL})\s?(?:/|\\div)\s?([-+]?(?:{DECIMAL}))")
_MIXED = re.compile(
    r"(\d{1,9})(\s?[-+]\s?|\s+and\s+|\s+|\s*(?=\\))(?:(\d{1,9})\s?/\s?(\d{1,9})|(?=\\[dtc]?frac)(.*))", re.DOTALL
)
_FRACTION = re.compile(r"\\[dtc]?frac\s*")
_BRACED = re.compile(r"(?<=\d)\{\s*(\\[dtc]?frac.*)\}", re.DOTALL)


def _unsigned(text: str) -> Number | None:
    """Return the number, with its unit, that a text without a sign is."""
    text = _BRACED.sub(r" \1", text)
    for pattern, read in _READERS.items():
        if (found := pattern.match(text)) and (number := read(found, text[found.end() :])):
            return _with_unit(*number)
    return None


Found = tuple[Number, str] | None
"""A number, and the text after it."""


def _mixed(found: re.Match[str], rest: str) -> Found:
    number: Number | None = Number(Fraction(int(found[3]), int(found[4]) or 1)) if found[3] else None
    if not number:
        number, rest = _fraction(found, _FRACTION.sub("", found[5], count=1)) or (None, "")
    if not number or not 0 < number.value < 1:
        return None
    return Number(Fraction(found[1]) + (-number.value if "-" in found[2] else number.value)), rest


def _scientific(found: re.Match[str], rest: str) -> Found:
    power = int(next(filter(None, found.groups()[1:])))
    number = _decimal_number(found[1] or "1")
    if abs(power) > 400:
        return None
    return Number(number.value * Fraction(10) ** power, (number.decimals or 0) - power), rest


def _decimal(found: re.Match[str], rest: str) -> Found:
    return _decimal_number(found[0]), rest


def _decimal_number(text: str) -> Number:
    r"""Return the number that `DECIMAL` matched.

    >>> [str(_decimal_number(text).value) for text in ("1,800", "1 800.5", "1.234,5", "1,5", "0,125", "18.")]
    ['1800', '3601/2', '2469/2', '3/2', '1/8', '18']
    """
    if re.fullmatch(_EUROPEAN, text):
        text = text.replace(".", "").replace(",", ".")
    elif not re.fullmatch(_GROUPED, text) or text.startswith("0,"):
        text = text.replace(",", ".")
    digits = re.sub(r"[ ,']", "", text).rstrip(".")
    return Number(Fraction(digits), len(digits.partition(".")[2]))


def _slashed(found: re.Match[str], rest: str) -> Found:
    return _evaluated(_decimal_number(found[1]), _side(found[2]), rest)


def _fraction(_: re.Match[str], rest: str) -> Found:
    r"""Read the rest of `\frac{1}{2}`, `\frac12` or a fraction of fractions."""
    top, rest = _argument(rest)
    bottom, rest = _argument(rest)
    return _evaluated(_side(top), _side(bottom), rest) if top and bottom else None


def _argument(text: str) -> tuple[str, str]:
    """Return the first argument of a command of LaTeX, a group or one digit, and the rest."""
    text = text.lstrip()
    if not text.startswith("{"):
        return text[:1], text[1:]
    position = _closing(text)
    return (text[1:position], text[position + 1 :]) if position > 0 else ("", "")


def _evaluated(top: Number | None, bottom: Number | None, rest: str) -> Found:
    """Return a quotient, unless it is that of two whole numbers without a rest: 36/2 has still to be computed."""
    if top is None or bottom is None or not bottom.value:
        return None
    value, whole = top.value / bottom.value, top.value.denominator == bottom.value.denominator == 1
    return None if whole and value.denominator == 1 and abs(bottom.value) != 1 else (Number(value), rest)


_READERS = {_MIXED: _mixed, _SCIENTIFIC: _scientific, _FRACTION: _fraction, _SLASHED: _slashed, _DECIMAL: _decimal}


_NAMES = "|".join(name for name in SCALES if name not in "kKMB")
SCALE = re.compile(rf"(?:(?<=\d)|\s*)(?:{_NAMES})(?![A-Za-z])|[kKMB](?![A-Za-z])")
_PERCENT = re.compile(r"[\s$]*(?:%|per\s?cent(?:age)?(?![a-z])|pct(?![a-z]))\.?")
_BASE_TEN = re.compile(r"^_(?:10|\{10\})")
_DEGREES = re.compile(r"\s*\^\s?\{?\s?\\(?:circ|degree)\s?\}?|\s*\\(?:degree|circ)(?![A-Za-z])")


def _with_unit(number: Number, rest: str) -> Number | None:
    """Return the number with the scale, percent sign or unit that follows it, or None if something else follows."""
    if scale := SCALE.match(rest):
        factor, rest = SCALES[scale[0].strip()], rest[scale.end() :]
        number = replace(number, value=number.value * factor, decimals=None if number.decimals is None else 0)
    if percent := _PERCENT.match(rest):
        number, rest = replace(number, percent=True), rest[percent.end() :]
    rest = _DEGREES.sub(" degrees ", _BASE_TEN.sub("", rest), count=1)
    unit = _unit(rest)
    return None if unit is None else replace(number, unit=unit)


_IN_WORDS = re.compile(rf"^\s*(?:\((?:{LETTER}|[ -])*\)|/\s?(?=[a-z]{{4}}))")
_UNIT = re.compile(
    rf"{LETTER}(?:{LETTER}|[.'\"-])*"
    r"|\^\s?\{?[-]?[1-4]\}?(?!\d)|[$€£¥₹/*()\s,;-]|(?<=[A-Za-z])[23](?![\d.])|\\cdot(?![A-Za-z])"
)


def _unit(rest: str) -> str | None:
    """Return what follows a number as a unit in lower case; None: it is none, such as `x`, `^2`, `!` or `or 19`."""
    if not rest.strip(" .,;:$)]}"):
        return ""
    if DENIED_AFTER.match(rest) or ALTERED.match(rest):
        return None
    rest = _IN_WORDS.sub("", rest)
    attached, words, end = rest[:1].isalpha(), list[str](), 0
    while end < len(rest):
        found = _UNIT.match(rest, end)
        if not found or (not words and found[0][0] in "^/*(,;-\\"):
            return None
        if re.match(LETTER, found[0]):
            words.append(found[0].rstrip("."))
        end = found.end()
    if not words:
        return ""
    # Some words behind a number make it another one, or none.
    if not _is_unit(words[0], attached) or (words_of("operation") | words_of("no_unit")).intersection(words):
        return None
    return " ".join(words).casefold()


def _is_unit(word: str, attached: bool) -> bool:
    """Return whether a word may be a unit: letters that a number is multiplied with, as in `5x` and `5ab`, are none."""
    if word in words_of("unit") or len(word) > 3 or re.match(SCRIPT, word):
        return True
    return not attached and (len(word) == 3 or word in ("a", "of", "an", "in", "on", "at"))


UNITS = {name: kind for kind in words_of("kind") for name in kind.split("|")}
"""Units that are no names for each other: 18 cm are not 18 m."""
