r"""Read the gold answers of problems: what kind of answer each one is, which decides how answers are compared with it.

| gold | kind |
|---|---|
| `18`, `$1,800`, `\frac{3}{4}`, `x = 5` | a plain number (`numbers`) |
| `27, 64`, `$27$ and $64$`, `(3, 2)`, `x = 2, y = -3`, `\pm 45` | several plain numbers |
| `Tuesday`, `\text{(C)}`, `Yes`, `ABC` | words |
| `2:30`, `52_8`, `1, 2, \ldots, n` | a time or ratio, a number in a base, a sequence: compared as they are written |
| `0 \le x \le 2`, `x<1 \text{ or } x>2` | intervals |
| everything else | an expression, which math-verify compares |
"""

import re
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

from tasks.problems.rows import is_placeholder
from tasks.score.numbers import LONGEST, Number, read_number
from tasks.score.plain_text import in_ascii, unescaped, unmarked, unstyled
from tasks.score.reading import BETWEEN_DOLLARS, final_statement


@dataclass(frozen=True, slots=True)
class Listed:
    """Several plain numbers, with the name of each, if they have any, and the brackets around them."""

    numbers: tuple[Number, ...]
    names: tuple[str, ...]
    brackets: str

    @property
    def is_ordered(self) -> bool:
        """True for a tuple or an interval."""
        return bool(set(self.brackets) & set("()[]"))

    @property
    def distinct_names(self) -> set[str]:
        return set(filter(None, self.names))


@dataclass(frozen=True, slots=True)
class Gold:
    """A gold answer.

    Example: Gold(text="1,800", number=Number(Fraction(1800), decimals=0))
    """

    solution: str  # as the problem has it
    text: str  # without delimiters
    number: Number | None = None
    listed: Listed | None = None
    words: str | None = None
    written: str | None = None  # of a kind that is compared as it is written
    interval: tuple[str, str] | None = None  # variable and interval


@lru_cache(maxsize=1024)
def read_gold(solution: str) -> Gold | None:
    """Return what a solution is; None if it is a placeholder."""
    if is_placeholder(solution):
        return None
    text = gold_text(solution)
    number = read_number(text) if "=" not in text or _NAMED.fullmatch(text) else None
    return Gold(
        solution,
        text,
        number=number,
        listed=None if number and _GROUPED.search(unstyled(text)) else read_list(text),
        words=read_words(text),
        written=written(text),
        interval=interval(text),
    )


_GROUPED = re.compile(r"(?<!\d)[1-9]\d{0,2}(?:,\d{3})+(?!\d)")
_QUOTED = re.compile(r"\s*\[\s*\"([^\"]*)\"\s*\]\s*")


def gold_text(solution: str) -> str:
    r"""Return a solution without delimiters; several formulas in it are a list.

    >>> gold_text(r"The answers are $27$ and $64$."), gold_text("$A$: $5$"), gold_text("$18"), gold_text('["12"]')
    ('27, 64', '5', '$18', '12')
    """
    text = unescaped(solution)
    if ("boxed" in text or len(text) > LONGEST) and (final := final_statement(text)) and (final.boxed or final.cued):
        text = final.text
    if quoted := _QUOTED.fullmatch(text):
        return quoted[1]
    formulas = list(BETWEEN_DOLLARS.finditer(text))
    if len(formulas) > 1:
        labelled = text[formulas[0].end() : formulas[1].start()].strip() == ":"
        return ", ".join(formula[1].strip(" ,;") for formula in formulas[labelled:])
    return BETWEEN_DOLLARS.sub(r"\1", text).strip() if formulas else text.strip()


_SEPARATOR = re.compile(r"\\[A-Za-z]+|\\\\|[(\[{}\])]|,|;|\n|&|(?<![A-Za-z])(?:and|or)(?![a-z])|\|\|?")
_OPEN, _CLOSE = "([{", ")]}"
_AROUND = re.compile(
    r"(?:(?:[A-Za-z]|\([A-Za-z](?:\s?,\s?[A-Za-z]){1,9}\))\s*(?:=|\\in(?![A-Za-z]))\s*|[A-Z])?"
    r"(\\?\{|\(|\[)(.*?)(\\?\}|\)|\])\s*",
    re.DOTALL,
)
_NAMED = re.compile(r"\s*((?:\\[A-Za-z]+|[A-Z]{2}|[A-Za-z])(?:_\{?\w{1,3}\}?|\([A-Za-z]\)|')?)\s*=\s*(.+)", re.DOTALL)


def split_list(text: str) -> tuple[str, list[str]]:
    r"""Return the brackets around a list, or nothing, and its items.

    >>> split_list(r"\{1, \frac{2}{3}\}"), split_list("18 and 21; 63")
    (('{}', ['1', '\\frac{2}{3}']), ('', ['18', '21', '63']))
    """
    plain = unstyled(text).strip(" \n$").rstrip(".").strip(" \n$")
    brackets = ""
    if found := _AROUND.fullmatch(plain):
        depths = accumulate((character in "([") - (character in ")]") for character in found[2])
        if all(depth >= 0 for depth in depths):  # not those of `(0,1), (2,3)`
            brackets, plain = (found[1] + found[3]).replace("\\", ""), found[2]
    items, depth, begin = list[str](), 0, 0
    for mark in _SEPARATOR.finditer(plain):
        if mark[0] in _OPEN or mark[0] in _CLOSE:
            depth += (mark[0] in _OPEN) - (mark[0] in _CLOSE)
        elif depth == 0 and (mark[0][0] != "\\" or mark[0] in ("\\\\", "\\lor", "\\land")):
            items.append(plain[begin : mark.start()])
            begin = mark.end()
    stripped = [item.strip() for item in [*items, plain[begin:]]]
    return brackets, [item for item in stripped if item and item != "so"]


def read_list(text: str) -> Listed | None:
    """Return the plain numbers that a text lists, or None if it is something else or a single number."""
    if len(text) > 4 * LONGEST:
        return None
    brackets, items = split_list(in_ascii(text))
    items = [each for item in items for each in _both_signs(item)]
    if not (2 <= len(items) <= 50) and not (brackets == "{}" and items):
        return None
    named = [_NAMED.fullmatch(item) for item in items]
    readings = (read_number(found[2] if found else item) for item, found in zip(items, named, strict=True))
    if None in (numbers := tuple(readings)):
        return None
    names = tuple(found[1].partition("(")[0] if found else "" for found in named)
    if len(set(names)) > 1 and len(set(names)) < len(names) and all(names):
        return None  # several solutions of several unknowns
    return Listed(tuple(number for number in numbers if number is not None), names, brackets)


def _both_signs(item: str) -> list[str]:
    r"""Write `\pm 45` as two numbers."""
    name, found, rest = item.rpartition("\\pm")
    return [f"{name}{rest}", f"{name}-{rest.strip()}"] if found and name.strip()[-1:] in ("", "=") else [item]


_LETTERS = re.compile(r"[^\W\d_]|(?:[^\W\d_]{2,}|[aI])(?:(?:[.']?\s+|[.'-])(?:[^\W\d_]{2,}|[aIsmt]))*")
_CONSTANTS = frozenset(("pi", "e", "i", "oo", "inf", "infty", "infinity"))
_MANY = 200


def read_words(text: str) -> str | None:
    r"""Return words in the form in which they are compared, or None: letters without a vowel are a product.

    >>> read_words(r"\text{(C)}"), read_words("Tuesday."), read_words("xyz"), read_words("pi"), read_words("x")
    ('c', 'tuesday', None, None, None)
    """
    plain = plain_words(text)
    if len(plain) > _MANY or not _LETTERS.fullmatch(plain) or plain.casefold() in _CONSTANTS:
        return None
    if len(plain) == 1:
        return plain.casefold() if plain.isupper() else None
    product = plain.isascii() and plain.islower() and not re.search(r"[aeiou ]", plain)
    return None if product else canonical_words(plain)


def plain_words(text: str) -> str:
    """Return a text without styles, emphasis and what surrounds words."""
    return unmarked(unstyled(in_ascii(text.replace("\\(", "").replace("\\)", "")))).strip(" \t\n.,:;!\"'()[]{}$")


def canonical_words(plain: str) -> str:
    return " ".join(re.findall(r"\w+", plain.casefold()))


_CLOCK = r"\d{1,3}(?:\s?:\s?\d{1,3})+"
_TIME = re.compile(rf"({_CLOCK})\s*(?:[ap]\.?\s?m\.?)?", re.IGNORECASE)
_BASE = re.compile(r"-?[0-9A-Fa-f]+\s*_\s*\{?\s*\d+\s*\}?")
_WITHIN = re.compile(rf"(?<![\d:.]){_CLOCK}(?![\d:])|(?<![0-9A-Fa-f])[0-9A-Fa-f]++\s?_\s?\{{?\d+\}}?")
_ELLIPSIS = re.compile(r"\\(?:ldots|dots|cdots|dotsc|dotsb)(?![A-Za-z])|\.\.\.+")


def written(text: str) -> str | None:
    r"""Return a text of a kind that is compared as it is written, in one form; None for all other kinds.

    >>> written("2:30 p.m."), written("52_{8}"), written(r"1, 2, \ldots, n"), written("52")
    ('2:30', '52_8', '1,2,...,n', None)
    """
    plain = unstyled(in_ascii(text)).strip(" $.,*").rpartition("=")[2].strip() if len(text) <= 4 * LONGEST else ""
    if time := _TIME.fullmatch(plain):
        return time[1].replace(" ", "")
    if _BASE.fullmatch(plain):
        return re.sub(r"[\s{}]", "", plain)
    if _ELLIPSIS.search(plain):
        return re.sub(r"[\s{}]|\\text", "", _ELLIPSIS.sub("...", plain)).strip("[]()")
    return None


def last_written(text: str) -> str | None:
    """Return the last time, ratio or number in a base within a sentence, in the form of `written`."""
    found = _WITHIN.findall(in_ascii(text[-LONGEST:]))
    return written(found[-1]) if found else None


_SIGNS = {
    **dict.fromkeys(("\\leqslant", "\\leq", "\\le", "<="), "<="),
    **dict.fromkeys(("\\geqslant", "\\geq", "\\ge", ">="), ">="),
    **{"\\lt": "<", "\\gt": ">", "<": "<", ">": ">"},
}
_SIGN = re.compile(r"\s*(\\(?:leqslant|leq|le|geqslant|geq|ge|lt|gt)(?![A-Za-z])|<=|>=|<|>)\s*")
_VARIABLE = re.compile(r"[A-Za-z]")
_LETTER = re.compile(r"(?<![A-Za-z\\])[A-Za-z]")
_COMMAND = re.compile(r"\\[A-Za-z]+")
_OR = re.compile(r"\s*(?:,\s*)?(?:(?<![A-Za-z])or(?![A-Za-z])|\\lor(?![A-Za-z]))\s*")

_BUILT = re.compile(r"\\\{\s*[A-Za-z]\s*(?:\\mid|:|\|)(.*)\\\}")


def interval(text: str) -> tuple[str, str] | None:
    r"""Return the variable and the interval that inequalities of one variable describe, or None.

    >>> interval(r"0 \le x \le 2"), interval(r"x<1 \text{ or } x>2"), interval("x + y < 1")
    (('x', '[0,2]'), ('x', '(-\\infty,1)\\cup(2,\\infty)'), None)
    """
    if len(text) > LONGEST or not _SIGN.search(text := unstyled(in_ascii(text)).strip(" $.")):
        return None
    found = [_interval_of(inequality) for inequality in _OR.split(_BUILT.sub(r"\1", text))]
    variables = {each[0] if each else None for each in found}
    if len(variables) != 1 or (variable := variables.pop()) is None:
        return None
    return variable, "\\cup".join(each[1] for each in found if each)


def _interval_of(text: str) -> tuple[str, str] | None:
    """Return the variable and the interval of one inequality, or of a chain of two."""
    terms, signs = (sides := _SIGN.split(text))[::2], [_SIGNS[sign] for sign in sides[1::2]]
    if any(">" in sign for sign in signs):  # read it from right to left
        terms, signs = terms[::-1], [sign.replace(">", "<") if ">" in sign else "?" for sign in signs[::-1]]
    if not all(terms) or "?" in signs or len(signs) not in (1, 2):
        return None
    if len(signs) == 1 and _VARIABLE.fullmatch(terms[0]):
        terms, signs = ["-\\infty", *terms], ["<", *signs]
    elif len(signs) == 1:
        terms, signs = [*terms, "\\infty"], [*signs, "<"]
    low, variable, high = terms
    if not _VARIABLE.fullmatch(variable) or any(map(_LETTER.search, (_COMMAND.sub("", low), _COMMAND.sub("", high)))):
        return None
    return variable, f"{'[' if '=' in signs[0] else '('}{low},{high}{']' if '=' in signs[1] else ')'}"
