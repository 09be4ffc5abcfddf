"""What reads texts of policies, data sets and tools takes no quadratic time: such texts can be very long."""

import time
from collections.abc import Callable
from functools import partial

import pytest

from storage.visible import printable, visible
from tasks.agents import answers
from tasks.audit.checks.problems import contains_gold
from tasks.audit.checks.texts import personal, secret
from tasks.audit.checks.verdicts import compare, opinion, stated
from tasks.audit.decoding import stands_alone
from tasks.audit.report import wording
from tasks.problems.contamination import tokens
from tasks.problems.rows import is_placeholder
from tasks.score.by_model import _own_number
from tasks.score.code import program_in
from tasks.score.contract import grade
from tasks.score.golds import gold_text, interval, read_list, read_words, written
from tasks.score.numbers import read_number
from tasks.score.plain_text import in_ascii, unescaped, unmarked, unstyled
from tasks.score.reading import Statement, final_statement, last_formula, last_numbers, last_words
from tasks.score.verdict import Verdict
from tasks.thoughts import after, opened_by, split, without_thoughts
from tests.support.chat_formats import chat_of
from tests.support.tool_calling import ADD

LENGTH = 40_000
LIMIT_S = 1.0
"""Linear time is below 0.1 s; quadratic time is several seconds, such as those of `\\d+x` on digits."""

WORDS = r"""
1 1, 1. - \ \\ { } ( [ ) $ ` ``` * ** _ < <think> </think> <tool_call> << <<1 = 1= x= a é \boxed{
\boxed{1}, \frac \frac{ \frac{1}{ \text{ \sqrt( \( \[ ½ ² % ^ 1^ 10^ 1e 1: 1_ ! ' \quad \, ~ x< | & ;
\pm \ldots $1$, <b> <answer> eyJ- password= a@ 1- ~~~
"""
UNITS = [
    *WORDS.split(),
    *(" ", "\t", "\n", "1 ", "- ", "$ ", "a ", "A. ", "1 and ", "1 or ", "answer "),
    *("answer is ", "answer: 1 or ", "#### ", "\\boxed{1} ", "\\text{a} ", "\ud800", '"', ": ", ". ", "\\le ", "1\n"),
    *("$1$ ", "is ", "\n\n", "\x00", "\u200b", "A:\n", "\x1b[1m", "4111 ", "~~~ ", "\u0661"),
]


def _answered(text: str) -> answers.ParsedAnswer:
    chat = chat_of("qwen3")
    return answers.AnswerReader(chat).read([], chat.encode(text.encode(errors="replace").decode()), [ADD])


def _graded(gold: str, text: str) -> Verdict:
    return grade(text, (gold,))


def _of_statement(read: Callable[[Statement], object], cued: bool, text: str) -> object:
    return read(Statement(text, boxed=False, cued=cued))


READERS: dict[str, Callable[[str], object]] = {
    **{f"grade {gold}": partial(_graded, gold) for gold in ("5", "Monday", "2:30")},
    "final statement": final_statement,
    **{
        f"{read.__name__}, cued={cued}": partial(_of_statement, read, cued)
        for read in (last_numbers, last_formula, last_words)
        for cued in (False, True)
    },
    **{
        read.__name__: read
        for read in (in_ascii, unescaped, unstyled, unmarked, read_number, gold_text, read_list, read_words, written)
    },
    **{read.__name__: read for read in (interval, is_placeholder, program_in, tokens, visible, printable)},
    **{read.__name__: read for read in (split, without_thoughts, opened_by)},
    "what follows an opened thought": partial(after, "<think>"),
    "calls of the template": answers._CALL.findall,
    "an answer": _answered,
    "a judge's number": lambda text: [
        _own_number(f"{before}{text}\nScore: 8", 10) for before in ("", "Score: 1 out of ")
    ],
    "second checker": lambda text: opinion(text, ["5"]),
    "second checker's comparison": lambda text: compare(text, "5"),
    "stated answers": lambda text: stated(text[: LENGTH // 10], ["5"]),
    "golds": lambda text: contains_gold(text, ["5", "-1,000"]),
    "secrets": secret,
    "personal data": personal,
    "outputs of tools": partial(stands_alone, ["19", "a b"]),
    "Markdown": wording.plain,
}


def seconds(read: Callable[[str], object], text: str) -> float:
    begun = time.process_time()
    read(text)
    return time.process_time() - begun


@pytest.mark.parametrize("reader", READERS)
def test_long_texts_take_no_time(reader: str) -> None:
    for unit in UNITS:
        text = (unit * LENGTH)[:LENGTH]
        for hostile in (text, "$```" + text[:-6] + "`}"):
            assert seconds(READERS[reader], hostile) < LIMIT_S, (unit, hostile[:10], hostile[-10:])


def grows_linearly(read: Callable[[str], object], before: str, unit: str, behind: str) -> bool:
    """Compare the time for a text with that for four times as much: 4 if it is linear, 16 if it is quadratic.

    A measurement that says otherwise is made again, since a busy machine disturbs it.
    """
    for attempt in range(3):  # each with texts of its own, since readers remember what they have read
        texts = (before + (unit * length)[: length + attempt] + behind for length in (1500, 6000))
        short, long = (seconds(read, text) for text in texts)
        if long < 10 * max(short, 0.002):
            return True
    return False


GOLDS = ["5", "-3.5 \\text{ cm}", "50%", "27, 64", "(3, 2)", "x = 5", "C", "Monday", "2:30", "52_8", "1, 2, \\ldots, n"]
SOLVED = ["0 \\le x \\le 2", "x^2 + 1", "\\frac{x}{2}"]
"""Golds whose answers math-verify may read: its own time grows faster, and has a limit (`score.timeout_s`)."""
BLANKS = [" ", "\n", "\t", "\u3000", "~", "\\,", "\\ ", " \n"]
FRAMES = [("", "x"), ("\\boxed{A", "x}"), ("\\boxed{5", "}"), ("The answer is (C", "x"), ("$A", "x$"), ("#### 5", "!")]


@pytest.mark.parametrize("gold", [*GOLDS, *SOLVED])
def test_the_time_for_an_answer_grows_with_its_length(gold: str) -> None:
    """Whatever is asked for, blanks or marks between two parts of an answer take linear time."""
    read = partial(_graded, gold)
    read("\\boxed{A}")
    for before, behind in FRAMES:
        for unit in BLANKS if gold in SOLVED else [*BLANKS, ", ", "(", "- ", "or ", "C "]:
            assert grows_linearly(read, before, unit, behind), (before, unit, behind)


@pytest.mark.parametrize("gold", SOLVED)
@pytest.mark.parametrize(
    ("opening", "closing"), [("{", "}"), ("\\frac{1}{", "}"), ("\\{", "\\}"), ("(", ")"), ("[", "")]
)
def test_brackets_in_brackets_take_no_time(gold: str, opening: str, closing: str) -> None:
    """math-verify's time doubles with each; 5 % of timeouts would end the stage."""
    assert seconds(partial(_graded, gold), f"\\boxed{{{opening * 25}5{closing * 25}}}") < 10 * LIMIT_S
    assert _graded("\\frac{1}{1+\\frac{1}{2}}", "\\boxed{\\frac{1}{1+\\frac{1}{2}}}").name == "correct"
