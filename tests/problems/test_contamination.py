"""Training problems that are also in evaluation sets: the check finds copies, however written, and nothing else."""

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.records import Problem
from tasks.problems.contamination import BOILERPLATE, GRAM, Overlap, find_overlaps
from tests.support.problem_files import load_file

STORY = "Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in May."


def problem(prompt: str, problem_id: str = "train") -> Problem:
    return Problem(problem_id, prompt, ["1"])


def kinds(left: str, right: str) -> list[str]:
    """Return the kinds of overlap of `left` with an evaluation set that holds only `right`."""
    return [overlap.kind for overlap in find_overlaps([problem(left)], {"set": [problem(right, "other")]})]


SAME = [
    ("It costs 1,000 dollars.", "it costs 1000 dollars"),
    ("It costs 1,234,567.5 dollars.", r"It costs 1{,}234{,}567.5 dollars"),
    (r"Find $10,\!000 + x$.", "Find $10000+x$"),
    (r"A pen costs \$5.", "A pen costs $5"),
    ("5 − 3", "5 - 3"),  # noqa: RUF001
    ("pages 5–8", "pages 5-8"),  # noqa: RUF001
    ("Solve x² = 4", "Solve x^2 = 4"),
    ("“Why?” asked Ann’s friend", '"why" asked Ann\'s friend!'),  # noqa: RUF001
    ("Is it 3? No: 4, 5; or 6.", "is it 3 no 4 5 or 6"),
    ("ＷＨＡＴ is ７?", "what is 7"),  # noqa: RUF001
    ("What is\u200b 3?", "What is 3"),
    (r"Find $\frac{1}{2}$", r"find $\frac { 1 } { 2 }$"),
    ("Cafe\u0301 prices", "CAFÉ prices"),
]


@pytest.mark.parametrize(("left", "right"), SAME)
def test_the_same_problem_written_otherwise(left: str, right: str) -> None:
    """Case, blanks, punctuation, separators and Unicode variants do not hide a copy."""
    assert kinds(left, right) == kinds(right, left) == ["exact"]


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ("What is 12 + 7?", "What is 12 - 7?"), ("What is 12 + 7?", "What is 12 + 17?"),
        ("It costs 3.5", "It costs 35"), ("It costs .5", "It costs 5"), ("It costs 1.000", "It costs 1000"),
        ("1, 2 or 3", "12 or 3"), ("Divide 3:2", "Divide 32"), ("What is 5!", "What is 5"),
        ("Find n! for me", "Find n for me"), ("Find f'(2)", "Find f(2)"), ("Solve y'' = y", "Solve y' = y"),
        ("Add 1, 2, ..., 10", "Add 1, 2, 10"), ("What is 5²?", "What is 52?"), (r"$\sin x$", "$sin x$"),
        ("(1 + 2) * 3", "1 + 2 * 3"), ("x = 3", "x < 3"), ("5%", "5"), ("$5", "5"),
    ],
)  # fmt: skip
def test_other_problems_with_like_words(left: str, right: str) -> None:
    """Two short problems with different answers are never taken for copies."""
    assert kinds(left, right) == kinds(right, left) == []


def test_each_set_reports_a_problem_once() -> None:
    """A set reports a problem once: an equal prompt before a passage, and the first match of the set.

    The results have the order of the training set, and show the shared passage.
    """
    train = [problem("What is 1 + 1?", "short"), problem(STORY, "long"), problem("Other words", "free")]
    sets = {
        "one": [problem(STORY + " Why?", "a"), problem(STORY.upper(), "b"), problem(STORY, "c")],
        "two": [problem("Now: " + STORY, "d"), problem("what is 1+1", "e"), problem("Then: " + STORY, "f")],
    }
    assert find_overlaps(train, sets) == [
        Overlap("short", "two", "e", "exact", "What is 1 + 1?"),
        Overlap("long", "one", "b", "exact", STORY),
        Overlap("long", "two", "d", "13-gram", "natalia sold clips to 48 of her friends in april and then she"),
    ]


sentences = st.lists(st.sampled_from("abcdefgh"), max_size=40).map(" ".join)


@given(sentences, sentences)
def test_symmetric_and_as_defined(left: str, right: str) -> None:
    """The result is the same in both directions and equals a naive search."""

    def grams(text: str) -> set[str]:
        words = text.split()
        return {" ".join(words[start : start + GRAM]) for start in range(len(words) - GRAM + 1)}

    expected = ["exact"] if left == right else ["13-gram"] if grams(left) & grams(right) else []
    assert kinds(left, right) == kinds(right, left) == expected


def test_gsm8k_shares_passages_but_no_problem(data_folder: Path) -> None:
    """GSM8K's splits have no problem in common; four training problems repeat a passage of a test problem.

    Every row of the real data sets is usable.
    """
    files = {"gsm8k/train": "gsm8k", "gsm8k/test": "gsm8k", "math_500/test": "math"}
    sets = {
        name: load_file(data_folder / f"{name}.jsonl", 0.0, preset=preset).problems for name, preset in files.items()
    }
    assert [len(problems) for problems in sets.values()] == [7473, 1319, 500]
    found = find_overlaps(sets.pop("gsm8k/train"), sets)
    repeated = [("000021", "000633"), ("000407", "000582"), ("001315", "000603"), ("005163", "000603")]
    assert [(overlap.problem_id, overlap.other_id) for overlap in found] == repeated
    assert {(overlap.set_name, overlap.kind) for overlap in found} == {("gsm8k/test", "13-gram")}


def test_an_instruction_that_all_share_gives_no_problem_away() -> None:
    """A passage that many evaluation prompts share is no overlap; one that only a few share is."""
    ending = "Please reason step by step, and put your final answer in a box, with no words or units in it at all."
    numbered = [problem(f"How many apples are {n} and {n * 7} apples together? {ending}") for n in range(20)]
    train = [problem(f"A train is slow. {ending}"), numbered[3]]
    for many, expected in ((20, ["exact"]), (BOILERPLATE, ["13-gram", "exact"])):
        assert [overlap.kind for overlap in find_overlaps(train, {"set": numbered[:many]})] == expected


TOWNS = (
    "The town of {} has {} people. Another town nearby has {} fewer people and {} schools, and {} people how many "
    "people does the smaller town have? Reply with a whole number, without units, in the 1 box, as others do."
)


def town(number: int, seed: int) -> Problem:
    """Return a problem of a template: its numbers differ, one of three digits, and one of one digit, repeat in many."""
    draw = random.Random(f"{seed} {number}")
    name, people = draw.choice(["Ulm", "Bonn", "Trier"]), draw.randint(500, 600)
    numbers = draw.randint(10, 9999), draw.randint(2, 9)
    return Problem(f"{seed}/{number}", TOWNS.format(name, people, *numbers, people), [str(people - numbers[0])])


@pytest.mark.parametrize(("many", "held_out"), [(300, 200), (300, BOILERPLATE // 2), (BOILERPLATE // 2, 200)])
def test_a_template_is_no_leak(many: int, held_out: int) -> None:
    """Problems of one template share words and now and then a number; it may be many of one set and few of the other.

    What one problem has in common with another beside the template is still found.
    """
    train, evaluation = ([town(n, seed) for n in range(count)] for seed, count in enumerate((many, held_out)))
    assert find_overlaps(train, {"towns": evaluation}) == []
    leak = [evaluation[3], problem(f"Think. {STORY} How many?", "story")]
    found = find_overlaps([*train, *leak], {"towns": evaluation, "other": [problem(STORY, "9")]})
    assert [(each.problem_id, each.other_id, each.kind) for each in found] == [
        (evaluation[3].problem_id, evaluation[3].problem_id, "exact"),
        ("story", "9", "13-gram"),
    ]


def test_copies_of_one_problem_are_no_template() -> None:
    """A problem that is trained on many times, each time in other words, has the same numbers each time."""
    train = [problem(f"Case {'x' * n}: {STORY} How many?", f"{n}") for n in range(3 * BOILERPLATE)]
    shown = [problem(f"Example: {STORY} Now: what is {n} + {n * n}?", f"shot {n}") for n in range(3 * BOILERPLATE)]
    for each in (train, shown):
        assert len(find_overlaps(each, {"set": [problem(STORY, "9")]})) == len(each)


def game(number: int, told: dict[str, object], solutions: tuple[str, ...] = ()) -> Problem:
    return Problem(f"{number}", f"Find the exit of the maze. {STORY}", list(solutions), metadata=json.dumps(told))


@pytest.mark.parametrize(
    ("about", "solutions", "few", "found"),
    [
        (lambda n: {"seed": n}, (), 3, ["2"]),  # a seed says that it is a game
        (lambda n: {"maze": f"#{n}"}, (), 3, ["0", "1", "2"]),  # metadata may also be a mere number of a row
        (lambda n: {"maze": f"#{n}"}, (), BOILERPLATE + 2, [f"{BOILERPLATE + 1}"]),
        (lambda n: {"seed": n}, ("out",), BOILERPLATE + 2, [f"{BOILERPLATE + 1}"]),
        (lambda n: {"input_output": [n]}, (), BOILERPLATE + 2, [f"{n}" for n in range(BOILERPLATE + 2)]),
    ],
)
def test_games_with_one_prompt_differ_by_their_metadata(
    about: Callable[[int], dict[str, object]], solutions: tuple[str, ...], few: int, found: list[str]
) -> None:
    """Of games whose prompt tells the rules only the same game is an overlap, and hidden tests are no game."""
    train = [game(n, about(n), solutions) for n in range(few)]
    held_out = [game(n, about(n), solutions) for n in range(few - 1, 2 * few)]
    assert [overlap.problem_id for overlap in find_overlaps(train, {"set": held_out})] == found
