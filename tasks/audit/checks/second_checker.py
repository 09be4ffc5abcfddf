r"""A second checker for answers in English.

It shares with the verifier only what a plain number is (`tasks.score.numbers`), which words deny an answer
(`tasks.score.languages`) and what is thought (`tasks.thoughts`).

It finds the final answer by rules of its own, compares numbers and lists of numbers by a comparison of its own, and
everything else as normalised strings. It knows no algebra: if one side is not a number and the strings differ, its
opinion is "cannot say". So is that on a number with something beside it that may give it another meaning.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from tasks.problems.rows import is_placeholder
from tasks.score.languages import is_denied
from tasks.score.numbers import LONGEST, Number, read_number
from tasks.thoughts import without_thoughts

Opinion = Literal["right", "wrong", "cannot say"]

UNSIGNED = r"(?:\d{1,3}(?:,\d{3})+(?![\d,])|\d+)(?:\.\d+)?|\.\d+"
"""A number in a text, with or without thousands separators."""

_LAST = 10_000  # characters at the end of a text in which the answer is searched

_CUE = re.compile(r"(?i)\banswers?\s*(?:is|are|:|=)+\s*:?\s*|####\s*")
_STATEMENT = re.compile(r"(?i)\banswers?\s*(?:is|are|:|=)+\s*:?|\bsolutions?\s*:|####|\\boxed\s*\{")
_MATH = re.compile(r"(?<!\\)\$\$?(.+?)(?<!\\)\$\$?|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
_COMMANDS = re.compile(r"\\(?:text|mbox|mathrm)\s*\{[^{}]*\}|\\[A-Za-z]+")
_PROSE = re.compile(r"[A-Za-z]{3,}|\n")
_SENTENCE = re.compile(r"(?:[.!?;](?=\s|$)|\n)")
_TERM = rf"(?:\d+\s+\d+/\d+|\d*\\[dt]?frac\d\d|\\[dt]?frac\{{[^{{}}]*\}}\{{[^{{}}]*\}}|{UNSIGNED})"
_EXPRESSION = re.compile(
    rf"(?:(?<![\w)}}])[-+\u2212]\s*)?{_TERM}(?:\s*(?:[-+*/^\u2212\u00d7\u00f7]|\\cdot|\\times|\\div)\s*{_TERM})*"
)
"""A number, or a sum or product of numbers, so that the 7 of `12 + 7` is not taken for an answer."""


def final_answer(text: str) -> str | None:
    r"""Return the final answer of `text` as it is written, or None without an answer.

    It is the last `\boxed{…}`, else what follows the last `####` or `answer is`, else the last formula, else the last
    number.

    >>> final_answer(r"so \boxed{\frac{1}{2}}"), final_answer("It is 3 + 4 = 7."), final_answer("none")
    ('\\frac{1}{2}', '7', None)
    """
    text = without_thoughts(text)[-_LAST:]
    if (boxed := _last_boxed(text)) is not None or "\\boxed" in text:
        return boxed  # None if the box was never closed
    cues = list(_CUE.finditer(text))
    if cues and (answer := after_cue(text[cues[-1].end() :])) != "":
        return answer
    if formulas := _formulas(text):
        return None if _OFFERED.search(text.rpartition(formulas[-1])[0]) else _right_side(formulas[-1])
    numbers = list(_EXPRESSION.finditer(text))
    return numbers[-1][0] if numbers and _stands_alone(numbers[-1]) else None


def after_cue(rest: str) -> str | None:
    """Return the answer at the beginning of `rest`: its first sentence, or the formula or number in that sentence.

    None: the sentence offers several answers, or something else than a number for one.
    """
    sentence = _SENTENCE.split(rest.strip(), maxsplit=1)[0].strip(" *:_")
    if re.search(r"\b(?:or|not)\b", sentence):
        return None
    if formulas := _formulas(sentence):
        return formulas[0]
    if read_numbers(sentence) is None:
        if read_numbers(tail := sentence.rpartition("=")[2].strip()):
            return tail
        if number := _EXPRESSION.search(sentence):
            return number[0] if _stands_alone(number) else None
    return sentence


def _stands_alone(number: re.Match[str]) -> bool:
    """Return whether nothing beside the number gives it another meaning, which this checker cannot read."""
    line = number.string[: number.start()].rpartition("\n")[2]
    before, after = line.rstrip(" \t$"), number.string[number.end() :]
    return not (_BEFORE.search(before) or _AFTER.match(after) or (before.endswith("=") and re.search(r"\d[a-z]", line)))


_FOREIGN = re.compile(r"[\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u036f\u0400-\u1fff\u2e80-\ud7ff]")
"""A letter of no English word and no formula."""
_BEFORE = re.compile(
    r"[\^_{<>√±\\²½]$|(?<!\w)[-\u2212\u2013]$|\d[.',]?$|\d[eE][-+]?$|\\ge$"
    r"|\b(?i:or|not|than|least|most|twice|half of|minus|negative|question|and|to)$"
)
_AFTER = re.compile(
    r"\s*(?:[\^_{\\²³½¼¾⅓⅔√!/]|\(?\d)|[a-zA-Z](?![a-zA-Z])|[-\u2013]\d|[ ,]?\d|e[-+]?\d|\s*%|π"
    r"|\s*(?i:thousand|hundred|million|billion|dozen|or|percent)\b"
)
_OFFERED = re.compile(r"\b(?:or|and|not)[\s$]*$|\$,[\s$]*$")


def _right_side(formula: str) -> str | None:
    """Return what a formula says that something is; None for an equation of several terms."""
    left, equals, right = formula.rpartition("=")
    return None if equals and re.search(r"\d\s*[a-z]", left) else right.strip()


def _formulas(text: str) -> list[str]:
    """Return the text between dollar signs or other math delimiters, unless it has words, as between two prices."""
    found = [next(filter(None, groups), "") for groups in _MATH.findall(text)]
    return [formula for formula in found if formula.strip() and not _PROSE.search(_COMMANDS.sub(" ", formula))]


def stated(text: str, solutions: Sequence[str]) -> list[tuple[str, bool]]:
    r"""Return each answer that `text` states right after a cue, and whether it is one of `solutions`.

    >>> stated("Hint: the answer is 19.", ["19"]), stated(r"Put it into \boxed{}.", ["19"])
    ([('answer is 19', True)], [])
    """
    found = []
    for cue in _STATEMENT.finditer(text):
        spellings = _spellings(cue[0], text[cue.end() : cue.end() + LONGEST])
        if spellings:
            right = any(compare(spelling, gold) == "right" for spelling in spellings for gold in solutions)
            found.append((f"{cue[0].strip()} {spellings[-1]}", right))
    return found


def _spellings(cue: str, rest: str) -> list[str]:
    """Return the answer right after a cue: the content of a box, or the sentence and the number that it begins with."""
    if "boxed" in cue:
        boxes = [rest[: end - len(cue)].strip() for begin, end in _boxes(cue + rest) if begin == len(cue)]
        return list(filter(None, boxes))
    rest = rest.lstrip(" \t\n*$")
    sentence = _SENTENCE.split(rest, maxsplit=1)[0].strip(" *:_")
    sentence = sentence[:-1] if sentence.count(")") > sentence.count("(") else sentence  # (the answer is 19)
    number = _EXPRESSION.match(rest)
    return list(filter(None, [sentence, number[0] if number else ""]))


def opinion(text: str, solutions: Sequence[str]) -> tuple[Opinion, str]:
    """Return whether the final answer of `text` is one of `solutions`, and the answer that was read."""
    answer = final_answer(text)
    if not answer or _FOREIGN.search(text) or is_denied(text.rpartition(answer)[0]):  # it knows only English words
        return "cannot say", ""
    opinions = [compare(answer, solution) for solution in solutions if not is_placeholder(solution)]
    if "right" in opinions:
        return "right", answer
    return ("wrong" if opinions and set(opinions) == {"wrong"} else "cannot say"), answer


def compare(answer: str, gold: str) -> Opinion:
    r"""Return whether two answers, without the text around them, mean the same.

    >>> compare(r"\dfrac{1}{2}", "0.5"), compare("19", "20"), compare("x+1", "1+x")
    ('right', 'wrong', 'cannot say')
    """
    plain_answer, plain_gold = bare(answer), bare(gold)
    if plain_answer and canonical(plain_answer) == canonical(plain_gold):
        return "right"
    left, right = read_numbers(plain_answer), read_numbers(plain_gold)
    return "cannot say" if left is None or right is None else compare_numbers(left, right)


_BRACES = re.compile(r"(\\(?:boxed|fbox)\s*\{)|\\.|[{}]", re.DOTALL)


def _last_boxed(text: str) -> str | None:
    """Return the content of the last box whose braces are closed."""
    if boxes := sorted(_boxes(text)):
        if len(boxes) > 1 and re.fullmatch(
            r"\}[\s$,;.]*(?:and|or)?[\s$]*\\f?boxe?d?\s*\{", text[boxes[-2][1] : boxes[-1][0]]
        ):
            return None  # several answers
        return text[slice(*boxes[-1])].strip()
    unbraced = re.findall(r"\\boxed\s+([^\s{}]+)", text)
    return unbraced[-1] if unbraced else None


def _boxes(text: str) -> list[tuple[int, int]]:
    """Return begin and end of the contents of closed boxes.

    It reads the text in one pass, because a policy that loops may open thousands of boxes.
    """
    open_braces: list[int] = []  # position where a box's content begins; -1 for another brace
    found: list[tuple[int, int]] = []
    for mark in _BRACES.finditer(text):
        if mark[1] or mark[0] == "{":
            open_braces.append(mark.end() if mark[1] else -1)
        elif mark[0] == "}" and open_braces and (begin := open_braces.pop()) >= 0:
            found.append((begin, mark.start()))
    return found


_NEAR = Fraction(1, 1000)  # relative difference up to which one number may be the other one, rounded


@dataclass(frozen=True, slots=True)
class Numbers:
    """The numbers of an answer: one, or those of a tuple, an interval or a list."""

    values: tuple[Fraction, ...]
    brackets: str  # around several numbers, such as `(]`; empty without brackets
    unit: str
    percent: bool


def compare_numbers(left: Numbers, right: Numbers) -> Opinion:
    """Return whether two answers are the same numbers; rounded or reordered numbers and other units are undecided."""
    if (len(left.values) == 1) != (len(right.values) == 1) or (left.unit and right.unit and left.unit != right.unit):
        return "cannot say"
    scales = [Fraction(1)]
    if left.percent != right.percent:  # 50 % may be written as 50 and as 0.5
        scales.append(Fraction(1, 100) if left.percent else Fraction(100))
    scaled = [tuple(value * scale for value in left.values) for scale in scales]
    ordered = set(left.brackets + right.brackets) & set("()[]")  # the order matters only in tuples and intervals
    if any(each == right.values if ordered else sorted(each) == sorted(right.values) for each in scaled):
        return "right" if left.brackets == right.brackets or not (left.brackets and right.brackets) else "cannot say"
    return "cannot say" if any(_are_near(each, right.values) for each in scaled) else "wrong"


def _are_near(left: tuple[Fraction, ...], right: tuple[Fraction, ...]) -> bool:
    """Return whether one answer may be the other one, rounded or in another order."""
    pairs = list(zip(sorted(left), sorted(right), strict=False))
    close = all(abs(one - other) <= _NEAR * max(abs(one), abs(other)) for one, other in pairs)
    rounded = all(one.denominator * other.denominator > 1 or one == other for one, other in pairs)
    return close and rounded and len(left) == len(right)


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
    unscripted = re.sub(r"([\^_])\s*\{(\w)\}", r"\1\2", _WORDS.sub(r"\1", plain))  # x^{2} as x^2
    text = re.sub(r"(?<!\d)\s|\s(?!\d)|\{(?=\w\})|(?<=\{\w)\}", "", unscripted)
    text = re.sub(r"^\((\w)\)$", r"\1", text)
    return text.casefold() if re.fullmatch(r"[A-Za-z.]{2,}|[A-Za-z]", text) else text


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
