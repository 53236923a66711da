"""The size of a formula that sympy would compute: `9^{9^{9^9}}` has more digits than there is
memory. Pure.
"""

from __future__ import annotations

import math
import re
from collections import deque

DIGITS_MAX = 20_000  # of a number that is worked out: `2023^{2023}` has 6,690
TERMS_MAX = 300  # of a power of a sum that is multiplied out: (x + 1)^200 takes a second
PRODUCT_MAX = 500  # of such terms, of all powers in a formula
STEPS_OF_A_TERM = 20  # of a sum over k, in the time of such a term
# of a formula: the time of math-verify's grammar grows faster than the text
FORMULA_CHARS_MAX = 400
_LETTER = math.log10(2)  # digits of what has no value
_POWER_MAX = 300.0  # a float ends at 10 ** 308
_TIMES_MAX = 1000  # that a sum is multiplied, more is as much
_TOKEN = re.compile(r"\d[\d,]*(?:\.\d+)?|\.\d+|\\[{}]|\\?[a-zA-Z]+|\*\*|[\^!{}()\[\]+\-=<>,;]")
_POWERS = {"^", "**", "!"}
_BETWEEN = set("+-=<>,;")
_CLOSING = {")", "]", "}"}


def is_too_long(formula: str) -> bool:
    """True when it is longer than FORMULA_CHARS_MAX, has a number of more than DIGITS_MAX digits,
    or powers of sums with more than TERMS_MAX terms, or PRODUCT_MAX multiplied."""
    if len(formula) > FORMULA_CHARS_MAX:
        return True
    terms: list[float] = []
    digits, _ = _of_group(deque(_TOKEN.findall(formula)), terms)
    return digits > DIGITS_MAX or max(terms, default=0) > TERMS_MAX or math.prod(terms) > PRODUCT_MAX


def _of_group(tokens: deque[str], terms: list[float]) -> tuple[float, int]:
    """The most digits of the value of a group, which ends at a closing bracket; and the number of
    its terms, if it is a sum with letters.

    The digits are the sum over the factors of its longest term. The index of a sum, k=1, has no
    terms. `terms` gets those of the powers within.
    """
    parts, seen, before = [0.0], {""}, [*tokens]
    while tokens and tokens[0] not in _CLOSING:
        seen.add(tokens[0])
        if tokens[0] in _BETWEEN:
            parts.append(0.0)
        if tokens[0] in _BETWEEN | _POWERS | {"\\{", "\\}"}:
            tokens.popleft()
        else:
            parts[-1] += _of_factor(tokens, terms)
    if tokens:
        tokens.popleft()
    is_sum = seen & {"+", "-"} and any(map(str.isalpha, before[: len(before) - len(tokens)]))
    return max(parts) + math.log10(len(parts)), len(parts) if is_sum else 0 if "=" in seen else 1


def _of_factor(tokens: deque[str], terms: list[float]) -> float:
    """The digits of a number, letter or group, with the powers and factorials after it."""
    token, summed = tokens.popleft(), 1
    if token in {"(", "[", "{"}:
        digits, summed = _of_group(tokens, terms)
    elif token[0] in ".0123456789":
        number = float(token.replace(",", ""))
        digits = abs(math.log10(number)) if 0 < number < math.inf else float(len(token))
    else:
        digits = _LETTER
    while tokens and tokens[0] in _POWERS:
        if tokens.popleft() == "!":
            digits *= _value(digits)
            continue
        while tokens and tokens[0] in {"-", "+"}:
            tokens.popleft()
        power = _value(_of_factor(tokens, terms)) if tokens and tokens[0] not in _CLOSING else 1.0
        digits *= power
        times = int(min(power, _TIMES_MAX))
        multiplied = math.comb(times + summed - 1, times) if summed else int(power) // STEPS_OF_A_TERM
        terms.append(float(min(max(multiplied, 1), 10**6)))
    if token in {"\\binom", "\\dbinom", "\\tbinom"} and tokens and tokens[0] == "{":
        digits = _LETTER * _value(_of_factor(tokens, terms))  # at most 2 ** n
    return digits


def _value(digits: float) -> float:
    return 10 ** min(digits, _POWER_MAX)
