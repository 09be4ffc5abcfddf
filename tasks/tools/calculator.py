"""The tool `calculator`: exact arithmetic. It needs no sandbox, because it evaluates nothing but numbers.

    calculator("2 * (3 + 4)")   # 14
    calculator("0.1 + 0.2")     # 0.3
    calculator("10 / 4")        # 2.5
    calculator("10 / 3")        # 10/3 (about 3.33333333333333)

The result is a whole number, or a decimal number if 15 digits write it exactly; otherwise a fraction with its
approximation. A number of more than about 3,000 digits is refused, powers before they are computed.
"""

import ast
import operator
from collections.abc import Callable
from decimal import Context, Decimal, Inexact, InvalidOperation
from fractions import Fraction

from tasks.tools.interface import ToolError

_LONGEST = 1000
"""Most characters of an expression."""
_MOST_BITS = 10_000
"""Largest size of a numerator or denominator, about 3,000 digits; Python writes at most 4,300."""
_TOO_LARGE = f"a number has more than {_MOST_BITS:,} bits"


async def calculator(expression: str) -> str:
    """Compute an expression exactly, such as "(1 + 2) * 3 / 4". It knows numbers, + - * / // % ** and parentheses."""
    text = expression.strip()
    if len(text) > _LONGEST:
        raise ToolError(f"the expression has more than {_LONGEST:,} characters")
    try:
        return _written(_value(ast.parse(text, mode="eval").body, text))
    except SyntaxError as error:
        raise ToolError(f"not an arithmetic expression: {error.msg}") from None
    except ZeroDivisionError:
        raise ToolError("division by zero") from None
    except InvalidOperation:  # a decimal number with an exponent beyond 10**18
        raise ToolError(_TOO_LARGE) from None
    except (RecursionError, MemoryError):  # Python's parser raises both
        raise ToolError("the expression is nested too deeply") from None


def _value(node: ast.expr, text: str) -> Fraction:
    """Return the value of a node in the expression `text`."""
    match node:
        case ast.BinOp(left, sign, right) if type(sign) in _OPERATIONS:
            return _checked(Fraction(_OPERATIONS[type(sign)](_value(left, text), _value(right, text))))
        case ast.UnaryOp(ast.USub() | ast.UAdd() as sign, operand):
            return _value(operand, text) * (-1 if isinstance(sign, ast.USub) else 1)
        case ast.Constant(int(number)) if not isinstance(number, bool):
            return _checked(Fraction(number))
        case ast.Constant(float()):
            return _decimal(ast.get_source_segment(text, node) or "")
    what = ast.get_source_segment(text, node)
    raise ToolError(f"{what!r} is not arithmetic: use numbers, + - * / // % ** and parentheses")


def _decimal(text: str) -> Fraction:
    """Return the exact value of a decimal number, which a float would round."""
    number = Decimal(text)
    if abs(number.adjusted()) > _MOST_BITS:  # before the power of ten is computed
        raise ToolError(_TOO_LARGE)
    return _checked(Fraction(number))


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1:
        raise ToolError(f"the exponent {exponent} is not a whole number, so the power may not be exact")
    bits = max(base.numerator.bit_length(), base.denominator.bit_length()) - 1
    if bits * abs(exponent) > _MOST_BITS:  # before it is computed
        raise ToolError(_TOO_LARGE)
    return Fraction(base**exponent.numerator)


def _checked(number: Fraction) -> Fraction:
    if max(number.numerator.bit_length(), number.denominator.bit_length()) > _MOST_BITS:
        raise ToolError(_TOO_LARGE)
    return number


def _written(number: Fraction) -> str:
    if number.denominator == 1:
        return str(number)
    context = Context(prec=15)
    decimal = context.divide(Decimal(number.numerator), Decimal(number.denominator))
    return f"{number} (about {decimal:g})" if context.flags[Inexact] else f"{decimal:f}"


_OPERATIONS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction | int]] = {
    **{ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Pow: _power},
    **{ast.Div: operator.truediv, ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod},
}
