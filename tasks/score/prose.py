r"""Find the last number, formula or words of a statement that has other words around it."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from tasks.score.numbers import SCALES, UNITS
from tasks.score.plain_text import in_ascii, unmarked, unstyled, words_of
from tasks.score.reading import Statement

_LONGEST_LINE = 5_000
"""Most characters at the end of a line in which its last number is searched."""
_ANNOTATION = re.compile(r"<<[^<>]{0,200}>>")  # of GSM8K's calculator: `9 * 2 = <<9*2=18>>18`
_BULLET = re.compile(r"^\s*(?:[-*•+]\s+(?=[^\s\d]|\d[\d.,]*\s+[A-Za-z])|\(?\d{1,2}[.)]\s+(?=\S))")
_MIXED = re.compile(r"(\d) and (?=\d+/\d)")
_SENTENCES = re.compile(r"(?<=(?<!\\)[.!?])\s+")
_WORD = re.compile(
    r"(?<![\\\w^])(?:[^\W\d_]{2,}(?:['\u2019-][^\W\d_]+)*(?![\w(^])|I['\u2019][a-z]+|[aAI](?=\s)|[^\x00-\x7f](?=\s))(?!\s*[=*/^])"
)
_SKIPPED_AFTER = words_of(
    """question problem step case line part figure fig equation eq example exercise page chapter section
    iteration"""
)
_NO_ANSWER_AFTER = words_of(
    """not twice double triple thrice half than least most below above under times plus divided multiplied
    squared"""
)
_OPERATORS = words_of(
    """plus minus times divided multiplied mod modulo squared cubed factorial choose percent pct percentage"""
)
_PARTS = words_of("half third quarter fifth tenth multiple factor double percent none")
_LABEL = re.compile(r"\s*[#(]?\d+[.:)]*")
_BEFORE_SIGN = frozenset(("", "is", "are", "answer", "equals", "be", "get", "gives"))


@dataclass(frozen=True, slots=True)
class _Segment:
    """What stands between two words and has a digit: a number or a formula."""

    text: str
    before: str  # the two words before, in lower case
    after: str  # the word after
    place: int  # how many words are before it
    start: int


def last_numbers(statement: Statement) -> list[str]:
    r"""Return the last number in a statement with words, as it is written; several if they are a list.

    >>> last_numbers(Statement("She has 3 1/2 cups.", False)), last_numbers(Statement("7 + 35\n= 42", False))
    (['3 1/2'], ['= 42'])
    >>> last_numbers(Statement("It is 7 or 8.", False)), last_numbers(Statement("It is 16 - 7, or 9 * 2", False))
    (['7', '8.'], ['16 - 7,', '9 * 2'])
    """
    for line in reversed(statement.text.splitlines()):
        if found := _last_of_line(line, cued=statement.cued):
            return found
    return []


def _last_of_line(line: str, *, cued: bool) -> list[str]:
    if not any(character.isnumeric() for character in line[-_LONGEST_LINE:]):
        return []
    plain = unmarked(unstyled(in_ascii(_ANNOTATION.sub("", line[-_LONGEST_LINE:])))).replace("\\$", "$")
    plain = _MIXED.sub(r"\1 ", plain)
    for sentence in reversed(_SENTENCES.split(plain if cued else _BULLET.sub("", plain, count=1))):
        if groups := _groups(sentence):
            first = cued and _FILLERS.fullmatch(sentence[: groups[0][0].start]) is not None
            return [_written(segment) for segment in groups[0 if first else -1]]
    return []


_FILLERS = re.compile(r"(?i)(?:is|are|about|approximately|exactly|just|only|simply|therefore|thus|that|[\s\W])*")


def _groups(sentence: str) -> list[list[_Segment]]:
    """Return the numbers and formulas of a sentence; those that `and` or `or` joins are one list."""
    groups: list[list[_Segment]] = []
    words = [match[0].casefold() for match in _WORD.finditer(sentence)]
    for segment in _segments(sentence):
        between = words[groups[-1][-1].place : segment.place] if groups else []
        if between == ["to"] or (len(between) <= _MOST_BETWEEN and between[-1:] in (["and"], ["or"])):
            groups[-1].append(segment)
        else:
            groups.append([segment])
    return groups


_MOST_BETWEEN = 2
"""Most words between two numbers of a list: `27 cats and 64 dogs`."""


def _segments(sentence: str) -> Iterator[_Segment]:
    """Yield what stands between words and has a digit, unless it is the number of a step, a question or the like."""
    begin, before, place = 0, "", 0
    for word in [*_WORD.finditer(sentence), None]:
        text = sentence[begin : word.start() if word else len(sentence)]
        if before.rpartition(" ")[2] in _SKIPPED_AFTER:
            text = _LABEL.sub("", text, count=1)
        if any(character.isdigit() for character in text):
            opening = "" if text.rstrip(" \t.,;!").endswith((")", "]")) else "(["
            yield _Segment(text.strip(f" \t|!{opening}"), before, word[0] if word else "", place, begin)
        if word:
            begin, before, place = word.end(), f"{before.rpartition(' ')[2]} {word[0].casefold()}".strip(), place + 1


def _written(segment: _Segment) -> str:
    """Return a number with the word before or after it that belongs to it; a part of a computation cannot be read."""
    text, (other, _, before) = segment.text, segment.before.rpartition(" ")
    binary = text[:1] in "*/^" or (text[:1] in "+-" and text[1:2].isspace())
    if (
        before in _NO_ANSWER_AFTER
        or before.endswith("n't")
        or (before == "of" and other in _PARTS)
        or (binary and before not in _BEFORE_SIGN)
    ):
        return f"{segment.before} {text}"
    if before in ("minus", "negative"):
        text = f"minus {text}"
    after = segment.after
    return f"{text} {after}" if after in SCALES or after in UNITS or after.casefold() in _OPERATORS else text


_FORMULA = re.compile(r"(?<!\\)\$\$?([^$]+?)(?<!\\)\$\$?|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
_JOINED = re.compile(r"[\s,;.]*(?:and|or|,|;)?[\s,;]*")
_PROSE = re.compile(r"(?<![\\A-Za-z])[^\W\d_]{4,}")
_LONGEST_FORMULA = 500
_ALIGNED = re.compile(r"\\begin\s?\{(?:align|gather|equation)\w*\*?\}(.*?)\\end\s?\{\w+\*?\}", re.DOTALL)


def last_formula(statement: Statement) -> str | None:
    r"""Return the last formula between delimiters, or those that a comma, `and` or `or` joins with it.

    Without delimiters it is what follows the last `is`, `are` or colon of the last line, if that has no long words.

    >>> last_formula(Statement("So it is $x^2$ or $y$.", False)), last_formula(Statement("It is x+1.", False))
    ('x^2, y', 'x+1')
    """
    paragraph = statement.text.rfind("\n\n", -_LONGEST_LINE, -_LONGEST_FORMULA) + 1  # cuts no formula
    tail = _ALIGNED.sub(_last_row, statement.text[paragraph or -_LONGEST_LINE :])
    if found := list(_FORMULA.finditer(tail)):
        joined = _joined(tail, found, first=statement.cued and not tail[: found[0].start()].strip(" *_:"))
        return joined if len(joined) <= _LONGEST_FORMULA else None
    lines = [line for line in tail.splitlines() if line.strip()]
    bare = re.split(r"\b(?:is|are)\b|:\s", unmarked(lines[-1]))[-1].strip(" \t.,;$") if lines else ""
    return bare if bare and not _PROSE.search(unstyled(bare)) else None


def _last_row(aligned: re.Match[str]) -> str:
    return "\\[" + aligned[1].rpartition("\\\\")[2].replace("&", "").strip(" =\n") + "\\]"


def _joined(text: str, found: list[re.Match[str]], *, first: bool) -> str:
    """Join formulas from the last one backwards, or from the first one on, while nothing else stands between them."""
    groups = [[found[0]]]
    for formula in found[1:]:
        if _JOINED.fullmatch(text, groups[-1][-1].end(), formula.start()):
            groups[-1].append(formula)
        else:
            groups.append([formula])
    chosen = groups[0] if first else groups[-1]
    return ", ".join(next(filter(None, formula.groups()), "").strip(" .,") for formula in chosen)


_CLAUSE = re.compile(r"\s*(?:[,;:(\u2013\u2014]|\s-\s|\b(?:because|since|as|so)\b)")
_LEADING = re.compile(r"\A(?:(?:it|that|this|option|choice|on|in|the|a|an|therefore|thus|is)\s+)+", re.IGNORECASE)


def last_words(statement: Statement) -> list[str]:
    """Return the words that a statement may end with: its last sentence, what follows its last `is`, a first clause.

    >>> last_words(Statement("So the day is Tuesday, I think.", False))
    ['So the day is Tuesday, I think', 'Tuesday, I think', 'So the day is Tuesday', 'Tuesday']
    """
    lines = [line for line in statement.text[-_LONGEST_FORMULA:].splitlines() if line.strip()]
    sentences = [each for each in _SENTENCES.split(lines[-1]) if each.strip()] if lines else []
    if not sentences:
        return []
    last = (sentences[0] if statement.cued else sentences[-1]).strip(" .!?")
    found = list[str]()
    for text in (last, _CLAUSE.split(last, maxsplit=1)[0]):
        after = re.split(r"\b(?:is|are|was|get|gives)\b|[=:]", text)[-1]
        found += [text, _LEADING.sub("", after.strip(), count=1)]
    formulas = _FORMULA.findall(last)
    return found + [part for part in (formulas[-1] if formulas else ()) if part]
