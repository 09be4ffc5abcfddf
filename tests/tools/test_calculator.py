"""The calculator is exact, and no expression keeps it busy."""

import asyncio
import time

import pytest

from tasks.tools.calculator import calculator
from tasks.tools.interface import ToolError


def compute(expression: str) -> str:
    return asyncio.run(calculator(expression))


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("2 * (3 + 4)", "14"), ("0.1 + 0.2", "0.3"), ("10 / 4", "2.5"),
        ("10 / 3", "10/3 (about 3.33333333333333)"), ("-7 // 2", "-4"), ("-7 % 3", "2"), ("2 ** -3", "0.125"),
        ("2 ** 100", "1267650600228229401496703205376"), ("+1_000 + 0x10", "1016"),
        ("1e-30", "0.000000000000000000000000000001"),
    ],
)  # fmt: skip
def test_results_are_exact(expression: str, result: str) -> None:
    """Whole numbers have no decimals, decimals are not rounded as floats are, and other fractions stay fractions."""
    assert compute(expression) == result


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("9 ** 9 ** 9", "a number has more than 10,000 bits"),
        ("1e-99999999999999999999", "a number has more than 10,000 bits"),
        ("2 ** 0.5", "the exponent 1/2 is not a whole number"),
        ("1 / 0", "division by zero"),
        ("(" * 400, "not an arithmetic expression"),
        ("-" * 990 + "1", "nested too deeply"),
        ("1" + "+1" * 500, "more than 1,000 characters"),
        ("2 ^ 3", r"'2 \^ 3' is not arithmetic: use"),
        ("1,000", "'1,000' is not arithmetic"),
        ("__import__('os')", "is not arithmetic"),
        ("True", "'True' is not arithmetic"),
    ],
)  # fmt: skip
def test_anything_else_is_refused_at_once(expression: str, message: str) -> None:
    """Large powers are refused before they are computed, and nothing but arithmetic is evaluated."""
    start = time.process_time()
    with pytest.raises(ToolError, match=message):
        compute(expression)
    assert time.process_time() - start < 1
