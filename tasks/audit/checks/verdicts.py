r"""A second opinion on a sample of verdicts, and on what texts state. `verdicts.sql` has the other checks of verdicts.

The second checker has simpler rules than the verifier, and "cannot say" wherever they do not suffice. It shares with
the verifier what a plain number is and which words deny it (`tasks.score.numbers`), what a list of numbers is
(`tasks.score.golds`) and what is thought (`tasks.thoughts`). Where the final answer stands is a rule of its own, and it
compares numbers exactly. It knows no algebra, and no language but English.
"""

import re
from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise
from typing import Literal

from tasks.audit.checks import AuditEvidence, Measured, check
from tasks.evaluate.statistics import proportion
from tasks.problems.rows import is_placeholder
from tasks.score.golds import Listed, read_list
from tasks.score.numbers import DECIMAL, LONGEST, Number, is_denied, read_number
from tasks.score.plain_text import in_ascii, unmarked, unstyled
from tasks.tables.sets import Case
from tasks.thoughts import without_thoughts

Opinion = Literal["right", "wrong", "cannot say"]

_LAST = 10_000  # characters at the end of a text in which the answer is searched
_NEAR = Fraction(1, 1000)  # relative difference up to which one number may be the other one, rounded
_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{((?:[^{}]|\{(?:[^{}]|\{[^{}]*+\})*+\})*+)\}")
_OPENED = re.compile(r"\\(?:boxed|fbox)\b")
_DELIMITERS = re.compile(r"\\[\[\]()]")
_BOX_BEGIN = re.compile(r"\\(?:boxed|fbox)\s*\{$")
_JOINED = re.compile(r"[\s$,;.]*+(?:and|or)?[\s$]*+")
_CUE = re.compile(r"(?i)####\s*|\banswers?\s*(?:is|are|:|=)[\s:*$]*")
_REASON = re.compile(r"(?<![\s,]),?\s++(?:because|since|which|[\u2014\u2013-])\s.*")
_SAYS = re.compile(r"(?<![<>!:])=|\b(?:is|are|equals|has|have|gives|get|costs?|total:)\s")
_SENTENCE = re.compile(r"[.!?;](?=\s|$)|\n")
_STATEMENT = re.compile(r"(?i)\banswers?\s*(?:is|are|:|=)+\s*:?|\bsolutions?\s*:|####|\\boxed\s*\{")
_NUMBER = re.compile(rf"[-+]?(?>{DECIMAL})(?!\s*[\d*/^+=\u2212-]|\w|[.,:]\d)")
_FOREIGN = re.compile(r"[\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u036f\u0400-\u1fff\u2e80-\ud7ff]")
"""A letter of no English word and no formula."""


def final_answer(text: str) -> str | None:
    r"""Return the final answer of `text` as it is written; None if there is none, or several.

    It is the last `\boxed{…}`, else the sentence after the last `####` or `answer is`, else the number after the last
    `=` or `is` of the text.

    >>> final_answer(r"so \boxed{\frac{1}{2}}"), final_answer("It is 3 + 4 = 7."), final_answer("none")
    ('\\frac{1}{2}', '7', None)
    """
    text = _DELIMITERS.sub("$", without_thoughts(text)[-_LAST:])
    if opened := len(_OPENED.findall(text)):
        boxes = list(_BOX.finditer(text))
        if len(boxes) < opened:  # one is not closed, or holds another one
            return None
        several = any(_JOINED.fullmatch(text[one.end() : other.start()]) for one, other in pairwise(boxes[-2:]))
        return None if several and boxes[-2][1] != boxes[-1][1] else boxes[-1][1].strip()
    *_, begin = 0, *(cue.end() for cue in _CUE.finditer(text))
    sentences = [each.strip() for each in _SENTENCE.split(text[begin:].strip(" \n*:_$")) if each.strip()]
    if not sentences:
        return None
    if begin:
        return _REASON.sub("", sentences[0]).strip(" $*_")
    answer = _SAYS.split(sentences[-1])[-1].strip(" $*_")
    if not _numbers(answer) or re.search(r"\d\s*[a-z]", sentences[-1].rpartition(answer)[0]):
        return None  # no number, or one side of an equation with an unknown
    return answer


def opinion(text: str, solutions: Sequence[str]) -> tuple[Opinion, str]:
    """Return whether the final answer of `text` is one of `solutions`, and the answer that was read."""
    answer = final_answer(text)
    if not answer or _FOREIGN.search(text):
        return "cannot say", ""
    before, number = text.rpartition(answer)[0], re.search(r"\d", answer)
    if is_denied(_BOX_BEGIN.sub("", before)) or (number and is_denied(before + answer[: number.start()])):
        return "cannot say", ""
    opinions = [compare(answer, solution) for solution in solutions if not is_placeholder(solution)]
    if "right" in opinions:
        return "right", answer
    return ("wrong" if opinions and set(opinions) == {"wrong"} else "cannot say"), answer


def compare(answer: str, gold: str) -> Opinion:
    r"""Return whether two answers, without the text around them, mean the same; a rounded number is undecided.

    >>> compare(r"\dfrac{1}{2}", "0.5"), compare("19", "20"), compare("x+1", "1+x")
    ('right', 'wrong', 'cannot say')
    """
    (name, *value), (other, *another) = (_bare(each).split("=") for each in (answer, gold))
    if len(value) == len(another) == 1 and name != other:
        return "cannot say"  # they may be two unknowns
    left, right = _numbers(answer), _numbers(gold)
    if left is None or right is None:
        return "right" if _bare(answer) and _bare(answer) == _bare(gold) else "cannot say"
    names, units = left.distinct_names | right.distinct_names, {each.unit for each in (*left.numbers, *right.numbers)}
    if (len(left.numbers) == 1) != (len(right.numbers) == 1) or len(names) > 1 or len(units - {""}) > 1:
        return "cannot say"
    if _are_same(left.numbers, right.numbers) or (
        not (left.is_ordered or right.is_ordered) and _are_same(_sorted(left), _sorted(right))
    ):
        return "right" if left.brackets == right.brackets or not (left.brackets and right.brackets) else "cannot say"
    return "cannot say" if _may_be(left, right) else "wrong"


def _numbers(text: str) -> Listed | None:
    """Return the number or the numbers that a text is; None for others. `1,2` is a list."""
    number = None if re.fullmatch(r"\s*[-+]?\d+,\d{1,2}\s*", text) else read_number(text)
    return Listed((number,), ("",), "") if number else read_list(text)


def _sorted(listed: Listed) -> list[Number]:
    return sorted(listed.numbers, key=lambda number: number.value)


def _are_same(ours: Sequence[Number], theirs: Sequence[Number]) -> bool:
    return len(ours) == len(theirs) and all(map(_same, ours, theirs))


def _same(one: Number, other: Number) -> bool:
    """Return whether two numbers are exactly equal; 50 % may be written as 50 and as 0.5."""
    scale = Fraction(1, 100) if one.percent else Fraction(100)
    return one.value == other.value or (one.percent != other.percent and one.value * scale == other.value)


def _may_be(left: Listed, right: Listed) -> bool:
    """Return whether one answer may be the other one, rounded or in another order."""
    pairs = [(one.value, other.value) for one, other in zip(_sorted(left), _sorted(right), strict=False)]
    near = all(abs(one - other) <= _NEAR * max(abs(one), abs(other)) for one, other in pairs)
    rounded = all(one == other or one.denominator * other.denominator > 1 for one, other in pairs)
    return near and rounded and len(left.numbers) == len(right.numbers)


def _bare(text: str) -> str:
    """Return the string by which answers that are not numbers are compared."""
    plain = re.sub(r"[\s{}$]|\\[()]", "", unmarked(unstyled(in_ascii(text)))).replace("\\dfrac", "\\frac").strip(".")
    word = re.fullmatch(r"\(?([A-Za-z])\)?|[A-Za-z.]{2,}", plain)
    return (word[1] or word[0]).casefold() if word else plain


def stated(text: str, solutions: Sequence[str]) -> list[tuple[str, bool]]:
    r"""Return each answer that `text` states right after a cue, and whether it is one of `solutions`.

    >>> stated("Hint: the answer is 19.", ["19"]), stated(r"Put it into \boxed{}.", ["19"])
    ([('answer is 19', True)], [])
    """
    found = []
    for cue in _STATEMENT.finditer(text):
        if spellings := _spellings(cue[0], text[cue.end() : cue.end() + LONGEST]):
            right = any(compare(spelling, gold) == "right" for spelling in spellings for gold in solutions)
            found.append((f"{cue[0].strip()} {spellings[-1]}", right))
    return found


def _spellings(cue: str, rest: str) -> list[str]:
    """Return the answer right after a cue: the content of a box, or the sentence and the number that it begins with."""
    if "boxed" in cue:
        box = _BOX.match(cue + rest)
        return [box[1].strip()] if box and box[1].strip() else []
    sentence = _SENTENCE.split(rest.lstrip(" \t\n*$"), maxsplit=1)[0].strip(" *:_")
    sentence = sentence[:-1] if sentence.count(")") > sentence.count("(") else sentence  # (the answer is 19)
    number = _NUMBER.match(sentence)
    return list(filter(None, [sentence, number[0] if number else ""]))


_SHOWN = 60  # characters
_LEAST = 20  # turns; fewer are too few for a share


@check("false_negatives", "turn", needs="scores golds")
def false_negatives(evidence: AuditEvidence) -> Measured:
    """Estimate the share of right answers among those judged wrong, which teach the policy to avoid them."""
    return _contradicted("false_negatives", "wrong", "right", evidence)


@check("false_positives", "turn", needs="scores golds")
def false_positives(evidence: AuditEvidence) -> Measured:
    """Estimate the share of wrong answers among those judged right."""
    return _contradicted("false_positives", "correct", "wrong", evidence)


def _contradicted(
    name: str, verdict: Literal["wrong", "correct"], contrary: Opinion, evidence: AuditEvidence
) -> Measured:
    """Grade a sample of math-verify's turns with `verdict` again, and flag those that the second checker contradicts.

    The value is the lower end of the 95 % interval of the share that the second checker contradicts. If it could judge
    too few, those that it could not judge are flagged, too.
    """
    sample = evidence.database.all("from judged_turns(?, ?)", verdict, evidence.settings.judged_again)
    opinions = [opinion(given, solutions) for *_, given, solutions in sample]
    measured = _measured([each for each, _ in opinions], verdict, contrary)
    flagged = {contrary, "cannot say"} if measured.judged < evidence.settings.least_judged else {contrary}
    cases = list[Case]()
    for (row, version, turn, given, solutions), (second, answer) in zip(sample, opinions, strict=True):
        if second in flagged:
            read = f"cannot judge {given[-_SHOWN:]!r}" if second == "cannot say" else f"reads {answer[:_SHOWN]!r}"
            gold = " or ".join(repr(solution[:_SHOWN]) for solution in solutions[:3])
            detail = f"turn {turn + 1}: judged {verdict}; the second checker {read}, the gold is {gold}"
            cases.append(Case("turn", row, version, detail))
    evidence.database.flag_all(name, cases)
    return measured


def _measured(opinions: Sequence[Opinion], verdict: str, contrary: Opinion) -> Measured:
    decided: list[Opinion] = [opinion for opinion in opinions if opinion != "cannot say"]
    judged = len(decided) / len(opinions) if len(opinions) >= _LEAST else 1.0
    if not decided:
        says = f"the second checker could judge none of {len(opinions):,} turns judged {verdict}"
        return Measured(0.0, 0, says, judged)
    estimate = proportion([float(opinion == contrary) for opinion in decided])
    says = f"the second checker calls {decided.count(contrary):,} of {len(decided):,} turns judged {verdict} {contrary}"
    says += f": {estimate.value:.1%}, 95 % interval {estimate.low:.1%} to {estimate.high:.1%}"
    if len(decided) < _LEAST:
        says += f"; fewer than {_LEAST} turns raise no alarm"
    if undecided := len(opinions) - len(decided):
        says += f"; it cannot judge {undecided:,} more"
    return Measured(estimate.low if len(decided) >= _LEAST else 0.0, len(decided), says, judged)
