"""Training problems that are also in an evaluation set, which a policy could answer from memory."""

import json
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from itertools import accumulate
from operator import or_
from textwrap import shorten
from typing import Literal

from storage.errors import first_few
from storage.records import Problem
from tasks.problems.problem_set import SEED, key

GRAM = 13  # tokens; the length that GPT-3's authors chose
_shown = partial(shorten, width=120, placeholder=" …")  # a text in a message

_SAME = str.maketrans(
    {superscript: f"^{digit}" for digit, superscript in enumerate("⁰¹²³⁴⁵⁶⁷⁸⁹")}  # NFKC would make 52 of 5²
    | dict.fromkeys("\u2010\u2011\u2012\u2013\u2014\u2212", "-")  # hyphens, dashes, minus
    | dict.fromkeys("\u2018\u2019\u201a\u2039\u203a", "'")
    | dict.fromkeys("\u201c\u201d\u201e\u00ab\u00bb", '"')
    | dict.fromkeys("\u00ad\u200b\u200c\u200d\ufeff", None)  # characters without width
)
_THOUSANDS = re.compile(r"(?<![\d.])\d{1,3}(?:(?:,|\{,\}|,\\!)\d{3})+(?!\d)")  # 1,000 and LaTeX's 1{,}000 and 1,\!000
_TOKEN = re.compile(
    r"""\\[a-z]+|\\\\                # a command and a line break of LaTeX
    |\d+(?:\.\d+)?|(?<!\w)\.\d+      # a number
    |[^\W\d_]+                       # a word
    |\.\.+                           # an ellipsis: 1, 2, ..., 10 is not 1, 2, 10
    |(?<=[\d)\]}])!+|(?<=\b[a-z])!+  # a factorial
    |(?<=\b[a-z])'+(?![a-z'])        # a derivative
    |[^\s\\.?!,;:"'`]                # a symbol; other full stops, marks, quotes and LaTeX's spaces are skipped
    """,
    re.VERBOSE,
)


_NUMBER = re.compile(r"(?<!\S)\.?\d\S*")  # a token among others

BOILERPLATE = 10
"""A 13-gram in more problems of a set than this, whatever its numbers, is a shared instruction or the template that the
problems were made by, and does not count as an overlap. A prompt of more different problems of a set, such as the rules
of a game, counts only if solutions and settings are the same."""


@dataclass(frozen=True, slots=True)
class Overlap:
    """A training problem, and the first problem of an evaluation set that it repeats as a whole or in part."""

    problem_id: str  # id of the training problem
    set_name: str  # name of the evaluation set
    other_id: str  # id of the problem in that set
    kind: Literal["exact", "13-gram"]
    shared: str  # the prompt, or the 13 tokens as they were compared; cut to about 120 characters


def find_overlaps(train: Sequence[Problem], evaluation: Mapping[str, Sequence[Problem]]) -> list[Overlap]:
    """Find training problems with the same prompt as a problem of an evaluation set, or with a 13-gram of one.

    Each problem is reported once per set, in the order of `train`; the same prompt takes precedence over a 13-gram.
    Prompts are compared by their `tokens`; a prompt of fewer than 13 tokens can only match as a whole. GPT-3's
    decontamination uses 13-grams of words (Brown et al., 2020, arXiv 2005.14165, appendix C); here symbols count, too.
    A 13-gram that more than 10 problems of a set share, numbers aside, does not count: it is an instruction to box the
    answer, or words of a template. In the training set it counts unless its numbers differ, too: many problems that
    repeat a passage with its numbers are so many leaks. Problems with one prompt are compared by solutions and setting,
    too, if it is that of more than 10 of a set, or if they have a seed and no solutions: such prompts are the rules of
    a game, and the metadata tell which game it is.

    Args:
        train: the training problems.
        evaluation: the evaluation sets by name.
    """
    indexes = {name: _index(problems) for name, problems in evaluation.items()}
    read = [(problem, tokens(problem.prompt)) for problem in train]
    templates = _templates(read, [shapes for *_, shapes in indexes.values()])
    sets = [_by_prompt(read), *(prompts for prompts, *_ in indexes.values())]
    rules = {whole for each in sets for whole, games in each.items() if len(games) > BOILERPLATE}
    overlaps = []
    for problem, words in read:
        whole, grams = " ".join(words), list(_grams(words))
        for name, (prompts, passages, _) in indexes.items():
            if games := prompts.get(whole):
                is_game = whole in rules or (not problem.solutions and SEED in json.loads(problem.metadata))
                other = games.get(_apart_from_prompt(problem)) if is_game else next(iter(games.values()))
                if other is not None:
                    overlaps.append(Overlap(problem.problem_id, name, other, "exact", _shown(problem.prompt)))
            elif gram := next((gram for gram in grams if gram in passages and _shape(gram) not in templates), None):
                overlaps.append(Overlap(problem.problem_id, name, passages[gram], "13-gram", _shown(gram)))
    return overlaps


def describe(overlaps: Sequence[Overlap]) -> str:
    """Describe overlaps in one sentence: the number of training problems, and the first few, same prompts first.

    >>> print(describe([Overlap("000017", "gsm8k-test", "000044", "exact", "What is 12 + 7?")]))
    1 training problem is also in evaluation sets: 000017 is 000044 of 'gsm8k-test' (exact): "What is 12 + 7?"
    """
    count, lines = len({overlap.problem_id for overlap in overlaps}), []
    for each in sorted(overlaps, key=lambda overlap: overlap.kind != "exact"):
        verb = "is" if each.kind == "exact" else "repeats a part of"
        other = f"{each.other_id} of {each.set_name!r} ({each.kind})"
        lines.append(f'{each.problem_id} {verb} {other}: "{each.shared}"')
    subject = "1 training problem is" if count == 1 else f"{count} training problems are"
    return f"{subject} also in evaluation sets: {first_few(lines, 5)}"


def tokens(prompt: str) -> list[str]:
    r"""Split a prompt into the words, numbers and symbols by which prompts are compared.

    The text is normalised by NFKC and case folding. Punctuation of sentences and thousands separators are dropped.
    Arithmetic, decimal points, factorials, derivatives and the commands of LaTeX stay.

    >>> tokens("What is 1,000 + 3.5?"), tokens(r"Find $\frac{x}{2}$, please.")
    (['what', 'is', '1000', '+', '3.5'], ['find', '$', '\\frac', '{', 'x', '}', '{', '2', '}', '$', 'please'])
    """
    text = unicodedata.normalize("NFKC", prompt.translate(_SAME)).casefold()
    text = unicodedata.normalize("NFKC", text)  # case folding can undo the composition
    text = _THOUSANDS.sub(lambda number: re.sub(r"\D", "", number[0]), text)
    return _TOKEN.findall(text)


_ByPrompt = Mapping[str, dict[str, str]]
"""For each prompt, as its tokens, the first id of each of its problems, by solutions and setting."""


def _apart_from_prompt(problem: Problem) -> str:
    return key(replace(problem, prompt=""))


def _by_prompt(read: Iterable[tuple[Problem, list[str]]]) -> _ByPrompt:
    """Group problems by their prompts, of which each has the tokens beside it."""
    found: dict[str, dict[str, str]] = defaultdict(dict)
    for problem, words in read:
        found[" ".join(words)].setdefault(_apart_from_prompt(problem), problem.problem_id)
    return found


def _index(problems: Sequence[Problem]) -> tuple[_ByPrompt, dict[str, str], Counter[str]]:
    """Index a set: problems by whole prompt, first problem of each 13-gram, number of problems with each shape."""
    read = [(problem, tokens(problem.prompt)) for problem in problems]
    passages, shapes = dict[str, str](), Counter[str]()
    for problem, words in read:
        shapes.update({*_grams(_shape(" ".join(words)).split())})
        for gram in _grams(words):
            passages.setdefault(gram, problem.problem_id)
    return _by_prompt(read), passages, shapes


def _shape(text: str) -> str:
    """Replace the numbers among tokens that are joined by spaces."""
    return _NUMBER.sub("#", text)


def _templates(train: Iterable[tuple[Problem, list[str]]], sets: Sequence[Counter[str]]) -> set[str]:
    """Return the shapes of 13-grams that are words of a template, given the number of problems with each in `sets`.

    They are in many problems of a set, or in many of training whose numbers differ. But one with the same numbers
    throughout training, and in one problem of a set, is no template: many prompts show that problem as an example.
    """
    held, found = reduce(or_, sets, Counter[str]()), defaultdict[str, dict[str, str]](dict)
    for _, words in train:
        whole = " ".join(words)
        numbers = " ".join(_NUMBER.findall(whole))
        for gram, shape in zip(_grams(words), _grams(_shape(whole).split()), strict=True):
            if shape in held and len(grams := found[shape]) <= BOILERPLATE:
                grams.setdefault(numbers, gram)
    of_set = {shape for shape, count in held.items() if count > BOILERPLATE}
    repeated = {shape: {*grams.values()} for shape, grams in found.items() if len(grams) > BOILERPLATE}
    return of_set | {shape for shape, grams in repeated.items() if held[shape] > 1 or len(grams) > 1 or shape in grams}


def _grams(words: Sequence[str]) -> Iterator[str]:
    """Iterate over the 13-grams of `words`, joined by spaces."""
    # Slices of one text: joining each 13-gram would take several times longer.
    text, ends = " ".join(words), [*accumulate(len(word) + 1 for word in words)]
    return (text[start : end - 1] for start, end in zip([0, *ends], ends[GRAM - 1 :], strict=False))
