"""Training problems that also stand in an evaluation set: their accuracy would be remembered, not earned."""

import re
import unicodedata
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

from storage.records import Problem

GRAM = 13  # tokens; the length that GPT-3's authors chose
_SHOWN = 120  # characters of a text that a message shows

_SAME = str.maketrans(
    {superscript: f"^{digit}" for digit, superscript in enumerate("⁰¹²³⁴⁵⁶⁷⁸⁹")}  # NFKC would make 52 of 5²
    | dict.fromkeys("\u2010\u2011\u2012\u2013\u2014\u2212", "-")  # hyphens, dashes, minus
    | dict.fromkeys("\u2018\u2019\u201a\u2039\u203a", "'")
    | dict.fromkeys("\u201c\u201d\u201e\u00ab\u00bb", '"')
    | dict.fromkeys("\u00ad\u200b\u200c\u200d\ufeff", None)  # what has no width
)
_THOUSANDS = re.compile(r"(?<![\d.])\d{1,3}(?:(?:,|\{,\}|,\\!)\d{3})+(?!\d)")  # 1,000 and LaTeX's 1{,}000 and 1,\!000
_TOKEN = re.compile(
    r"""\\[a-z]+|\\\\                # a command and a line break of LaTeX
    |\d+(?:\.\d+)?|(?<!\w)\.\d+      # a number
    |[^\W\d_]+                       # a word
    |\.\.+                           # an ellipsis: 1, 2, ..., 10 is not 1, 2, 10
    |(?<=[\d)\]}])!+|(?<=\b[a-z])!+  # a factorial
    |(?<=\b[a-z])'+(?![a-z'])        # a derivative
    |[^\s\\.?!,;:"'`]                # a symbol; other full stops, marks, quotes and LaTeX's spaces are passed over
    """,
    re.VERBOSE,
)


BOILERPLATE = 10
"""What more problems of an evaluation set hold is an instruction they share, and gives no problem away."""


@dataclass(frozen=True, slots=True)
class Overlap:
    """A training problem and the first problem of one evaluation set that it repeats, whole or in part."""

    problem_id: str  # of the training problem
    set_name: str
    other_id: str  # of the problem of that set
    kind: Literal["exact", "13-gram"]
    shared: str  # the prompt, or the 13 tokens as they were compared; cut to about 120 characters


@dataclass(frozen=True, slots=True)
class _Index:
    """One evaluation set: whole prompts and their 13-grams, each with the id of the first problem that holds it."""

    whole: dict[str, str]
    grams: dict[str, str]


def find_overlaps(train: Sequence[Problem], evaluation: Mapping[str, Sequence[Problem]]) -> list[Overlap]:
    """Training problems with the prompt of a problem of a set, or with 13 tokens in a row in common with one.

    Each is reported once for a set, in the order of `train`; the same prompt goes before a 13-gram. Prompts are
    compared as `tokens`; one shorter than 13 tokens can only be the same as a whole. 13-grams are the measure of
    GPT-3's decontamination (Brown et al., 2020, arXiv 2005.14165, appendix C): of words there, symbols count here, too.
    Those that more than 10 problems of the set hold, such as an instruction to box the answer, do not count.

    Args:
        train: what the policy learns from.
        evaluation: the sets by their names.
    """
    indexes = {name: _index(problems) for name, problems in evaluation.items()}
    found = []
    for problem in train:
        words = tokens(problem.prompt)
        whole, grams = " ".join(words), list(_grams(words))
        for name, index in indexes.items():
            if whole in index.whole:
                found.append(Overlap(problem.problem_id, name, index.whole[whole], "exact", _cut(problem.prompt)))
            elif gram := next(filter(index.grams.__contains__, grams), None):
                found.append(Overlap(problem.problem_id, name, index.grams[gram], "13-gram", _cut(gram)))
    return found


def describe(overlaps: Sequence[Overlap], limit: int = 5) -> str:
    """One sentence for a message or a log: how many training problems, and the first `limit`, same prompts first.

    >>> print(describe([Overlap("000017", "gsm8k-test", "000044", "exact", "What is 12 + 7?")]))
    1 training problem stands in evaluation sets: 000017 is 000044 of 'gsm8k-test' (exact): "What is 12 + 7?"
    """
    count = len({overlap.problem_id for overlap in overlaps})
    if not count:
        return "no training problem stands in an evaluation set"
    first = sorted(overlaps, key=lambda overlap: overlap.kind != "exact")[:limit]
    more = [f"and {len(overlaps) - limit} more"] if len(overlaps) > limit else []
    subject = "1 training problem stands" if count == 1 else f"{count} training problems stand"
    return f"{subject} in evaluation sets: " + "; ".join([*map(_line, first), *more])


def tokens(prompt: str) -> list[str]:
    r"""The words, numbers and symbols by which prompts are compared: NFKC, no case, no punctuation of sentences.

    Arithmetic, decimal points, factorials, derivatives and the commands of LaTeX stay; thousands separators do not.

    >>> tokens("What is 1,000 + 3.5?"), tokens(r"Find $\frac{x}{2}$, please.")
    (['what', 'is', '1000', '+', '3.5'], ['find', '$', '\\frac', '{', 'x', '}', '{', '2', '}', '$', 'please'])
    """
    text = unicodedata.normalize("NFKC", prompt.translate(_SAME)).casefold()
    text = unicodedata.normalize("NFKC", text)  # not all that is folded stays composed
    text = _THOUSANDS.sub(lambda number: re.sub(r"\D", "", number[0]), text)
    return _TOKEN.findall(text)


def _index(problems: Sequence[Problem]) -> _Index:
    index, holders = _Index({}, {}), Counter[str]()
    for problem in problems:
        words = tokens(problem.prompt)
        index.whole.setdefault(" ".join(words), problem.problem_id)
        grams = dict.fromkeys(_grams(words))
        holders.update(grams.keys())
        for gram in grams:
            index.grams.setdefault(gram, problem.problem_id)
    for gram, count in holders.items():
        if count > BOILERPLATE:
            del index.grams[gram]
    return index


def _grams(words: Sequence[str]) -> Iterator[str]:
    """Each 13 words in a row, joined by spaces."""
    # Slices of one text: to join each would take several times longer.
    text, ends = " ".join(words), [*accumulate(len(word) + 1 for word in words)]
    return (text[start : end - 1] for start, end in zip([0, *ends], ends[GRAM - 1 :], strict=False))


def _line(overlap: Overlap) -> str:
    verb = "is" if overlap.kind == "exact" else "repeats a part of"
    return (
        f'{overlap.problem_id} {verb} {overlap.other_id} of {overlap.set_name!r} ({overlap.kind}): "{overlap.shared}"'
    )


def _cut(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _SHOWN else line[: _SHOWN - 1] + "…"
