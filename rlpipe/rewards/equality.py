"""The equality of two values that math-verify has read, for cases where its `verify` alone would
call too many values equal, or too few.
"""

from __future__ import annotations

import logging
from functools import lru_cache, partial
from typing import Any

from latex2sympy2_extended import is_expr_of_only_symbols
from latex2sympy2_extended.logic import And
from latex2sympy2_extended.sets import FiniteSet
from math_verify import verify
from mpmath import floor, log10
from sympy import (
    Add,
    Eq,
    Expr,
    Float,
    I,
    Integral,
    Intersection,
    Interval,
    Limit,
    Pow,
    Product,
    Sum,
    Tuple,
    Union,
    solve,
)
from sympy import And as SympyAnd
from sympy import FiniteSet as SympyFiniteSet
from sympy.core.relational import Relational

logging.getLogger("math_verify.grader").setLevel(logging.ERROR)  # it warns once that it has no timeout

DIGITS = 6  # of two numbers that are equal: significant ones, and decimals around an expected 0
PRECISION = 15  # the same of formulas whose difference has to be 0
FLOAT_NOISE = 3  # of these digits, where the numbers are small
EQUATIONS_MAX = 1024  # whose solutions are kept: a group of rollouts has one reference


def are_equal(reference: list[Any], values: list[Any], exponent: int) -> bool:
    """True when the values are equal; numbers to DIGITS significant digits, and from 1 on to as
    many decimals.

    Both are as math-verify's `parse` gives them, (value, its text); `exponent` is the reference's
    `smallest_exponent`.
    """
    if _is_side(reference[0], values[0]) or _is_set_of_list(reference, values) or _is_set_of_list(values, reference):
        return False
    rounding = max(DIGITS, DIGITS - 1 - exponent)
    precision = max(PRECISION, PRECISION - FLOAT_NOISE - exponent)
    alike = partial(
        verify, float_rounding=rounding, numeric_precision=precision, timeout_seconds=None, allow_set_relation_comp=True
    )
    expected, value = _each_sign(reference[0]), _each_sign(values[0])
    if _are_inequalities(expected) != _are_inequalities(value):
        expected, value = _joined(expected), _joined(value)
    if not (isinstance(expected, Eq) and isinstance(value, Eq)):
        return alike(_worked_out(expected), _worked_out(value))
    if _solutions(expected):
        return alike(expected, value)
    # math-verify takes two equations without solutions for the same
    sides = (
        expected.lhs - expected.rhs,  # pyright: ignore[reportOperatorIssue]
        value.lhs - value.rhs,  # pyright: ignore[reportOperatorIssue]
    )
    return alike(sides[0], sides[1]) or alike(sides[0], -sides[1])


def _worked_out(value: Any) -> Any:
    """The value with i, which math-verify takes for an ordinary letter, as the imaginary unit, and
    with 3^(2^10) as a number, for which verify takes seconds.
    """
    if isinstance(value, Pow) and value.is_number:
        return value.doit()
    if isinstance(value, Eq):
        return Eq(_worked_out(value.lhs), _worked_out(value.rhs), evaluate=False)
    letters = {letter: I for letter in getattr(value, "free_symbols", ()) if str(letter) == "i"}
    return value.subs(letters) if letters and isinstance(value, Expr) else value


def _is_set_of_list(one: list[Any], other: list[Any]) -> bool:
    """True when one is a set in braces, and the other a point or an interval, whose order counts,
    or 1 < x < 2."""
    return isinstance(one[0], SympyFiniteSet) and "\\{" in one[1] and isinstance(other[0], (Tuple, Interval, SympyAnd))


def _each_sign(value: Any) -> Any:
    """`y = \\pm 2x` as its two equations."""
    if isinstance(value, Eq) and isinstance(value.rhs, SympyFiniteSet):
        return FiniteSet(*(Eq(value.lhs, side, evaluate=False) for side in value.rhs.args))
    return value


def _are_inequalities(value: Any) -> bool:
    return isinstance(value, SympyFiniteSet) and all(
        isinstance(part, (Relational, And)) and not isinstance(part, Eq) for part in value.args
    )


def all_at_once(value: Any) -> Any:
    """The inequalities that hold together: x > 2 and x < 5.

    Without that word the parser returns the same for x < 2 or x > 5.
    """
    return And(*value.args) if _are_inequalities(value) else value


def _joined(value: Any) -> Any:
    """Bounds of a letter that never hold all at once, x < 2 or x > 5, as the set of their
    solutions.
    """
    if not (_are_inequalities(value) and len(value.free_symbols) == 1 and all(map(_is_bound, value.args))):
        return value
    parts = [part.as_set() for part in value.args]
    return Union(*parts) if Intersection(*parts).is_empty else value


def _is_bound(part: Any) -> bool:
    """True for x < 2 and 1 < x < 2, not for x < i."""
    if isinstance(part, SympyAnd):
        return all(map(_is_bound, part.args))
    return any(
        one.is_Symbol and other.is_extended_real and other.is_number for one, other in (part.args, part.args[::-1])
    )


@lru_cache(EQUATIONS_MAX)
def _solutions(equation: Eq) -> list[Any]:
    try:
        return list(solve(equation, equation.free_symbols))
    except Exception:  # any error of sympy where it finds no solution
        return []


def _is_side(expected: Any, value: Any) -> bool:
    """True when one is an equation such as `y'' + y = 0` and the other is not: math-verify would
    compare with its right side alone.
    """
    if isinstance(expected, Eq):
        return isinstance(expected.lhs, Add) and not isinstance(value, (Relational, And))
    unsolved = isinstance(value, Eq) and isinstance(value.lhs, Add) and value.lhs.free_symbols
    return bool(expected == 0 and unsolved and not is_expr_of_only_symbols(value.lhs))


def smallest_exponent(value: Any) -> int:
    """The exponent of the smallest number in a value that is neither 0 nor above 1: 10 ** exponent
    is at most that number."""
    smallest, parts = 0, [value]
    while parts:
        part = parts.pop()
        if not getattr(part, "is_number", False):
            parts += getattr(part, "args", ())
        elif (
            not part.has(Integral, Limit, Product, Sum)
            and isinstance(number := abs(part.evalf(PRECISION)), Float)
            and number
        ):
            smallest = min(smallest, int(floor(log10(number.num))))
    return smallest
