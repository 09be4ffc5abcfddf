import pytest

from tasks.audit.checks.verdicts import compare, opinion, stated

RIGHT = [  # pairs of answer and gold
    (r"\dfrac{1}{2}", "0.5"), (r"\frac12", "1/2"), (r"2\frac{1}{3}", "7/3"), ("2 1/3", r"\frac{7}{3}"),
    ("1,000", "1000"), (r"1{,}234.50", "1234.5"), (r"\$18.90", "18.9"), ("50%", "0.5"), (r"90^\circ", "90"),
    ("72 dollars", "72"), ("x=5", "5"), ("\u22123", "-3"), ("(1, 2)", r"\left(1,2\right)"),
    ("x=1, x=-2", "-2,1"), (r"\pm 3", "3,-3"), (r"(0, \frac{1}{2}]", "(0,0.5]"), (r"\text{Evelyn}", "evelyn"),
    (r"\text{(C)}", "C"), (r"3\sqrt2", r"3 \sqrt{2}"), ("x^{2}+1", "x^2 + 1"),
]  # fmt: skip
WRONG = [("19", "20"), (r"\frac{1}{3}", "0.5"), ("0.33", "1/3"), ("(1,2)", "(1,3)"), ("-3", "3"), ("112", "12")]
CANNOT_SAY = [
    ("x+1", "1+x"),  # algebra
    ("12 + 7", "19"),  # arithmetic
    ("0.3333", "1/3"),  # rounded
    ("(1,2]", "[1,2)"),
    ("9" * 5000, "1"),
]


@pytest.mark.parametrize(("answer", "gold"), [*RIGHT, *WRONG, *CANNOT_SAY])
def test_compares_answers(answer: str, gold: str) -> None:
    expected = "right" if (answer, gold) in RIGHT else "wrong" if (answer, gold) in WRONG else "cannot say"
    assert compare(answer, gold) == compare(gold, answer) == expected


def test_any_solution_counts_and_wrong_needs_all() -> None:
    """Where the answer stands is tested on the labelled answers of `tests/score`."""
    assert opinion(r"\boxed{7}", ["8", "7"]) == ("right", "7")
    assert opinion(r"\boxed{7}", ["8", "9"]) == ("wrong", "7")
    assert opinion(r"\boxed{7}", ["8", "x"]) == ("cannot say", "7")


@pytest.mark.parametrize(
    ("prompt", "gives"),
    [
        ("What is 12 + 7? (The answer is 19)", True),
        ("What is 12 + 7?\n#### 19", True),
        (r"What is 19 + 0? Put the answer into \boxed{}.", False),
        (r"Your answer is wrong. Try again. \boxed{20}", False),
        ("The answer is 19.5kg", False),
        ("The answer is 19.5 + 2", False),
    ],
)
def test_finds_what_a_prompt_states(prompt: str, gives: bool) -> None:
    assert any(right for _, right in stated(prompt, ["19"])) == gives
