"""The messages between a program and its tests, JSON lines of plain values, and the comparison of
such values with expected ones.

A value that is not plain stays in the program's process; the tests hold a `RemoteObject`, which can
be called and inspected. Where even that is not enough to tell right from wrong, the tests are
`Unsupported`.
"""

from __future__ import annotations

import builtins
import json
import math
import operator
import os
import re
import types
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, ClassVar, NoReturn

PROGRAM = "solution"  # the program's module, where its functions are called
FLOAT_TOLERANCE = 1e-6  # relative, where the expected number has a fraction
ZERO_TOLERANCE = 1e-9  # absolute, where it is 0: what rounding leaves
ITERATED_MAX = 1_000_000  # values of an iterator that are sent
# a word with six decimals or more was written to so many
ROUNDED = re.compile(r"[+-]?\d*\.(\d{6,})")
MUTABLE = (list, dict, set, bytearray)
PARTS: dict[str, Any] = {kind.__name__: kind for kind in (tuple, set, frozenset, bytes, bytearray, dict)}
VIEWS = (Iterator, type({}.keys()), type({}.values()), type({}.items()), range)
# what the tests do with an object of the program is done where that is
OPERATIONS: dict[str, Callable[..., Any]] = {
    "__len__": len, "__iter__": iter, "__bool__": bool, "__str__": str, "__repr__": repr,
    "__int__": int, "__float__": float,
    "__instancecheck__": lambda kind, value: isinstance(value, kind), "__setattr__": setattr,
    "__enter__": lambda value: value.__enter__(), "__exit__": lambda value, *error: value.__exit__(*error),
} | {f"__{name}__": getattr(operator, name) for name in ("neg", "abs", "getitem", "setitem", "delitem")}  # fmt: skip
# only between the program's own: an object that is told the expected value,
# and asked, could say yes to all
OPERATORS = [
    "eq",
    "lt",
    "le",
    "gt",
    "ge",
    "add",
    "sub",
    "mul",
    "truediv",
    "floordiv",
    "mod",
    "pow",
    "matmul",
    "and",
    "or",
    "xor",
]
BINARY = {f"__{name}__": getattr(operator, f"__{name}__") for name in OPERATORS} | {"__contains__": operator.contains}
REFLECTED = [f"__r{name}__" for name in OPERATORS[5:]]


class Unsupported(BaseException):
    """Raised when the tests need more than the wire can send.

    An `except` in the tests cannot hide it: `messages` are checked when they end.
    """

    messages: ClassVar[list[str]] = []

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.messages.append(message)


class Wire:
    """The tests' end."""

    def __init__(self, calls: int, replies: int) -> None:
        self._calls = os.fdopen(calls, "wb")
        self._replies = os.fdopen(replies, "rb")
        self._exceptions: dict[str, type[Exception]] = {}
        self._objects: dict[int, RemoteObject] = {}

    def evaluate(self, expression: str) -> Any:
        """The value of an expression of rlpipe among the program's names."""
        return self.ask({"do": "evaluate", "text": expression})

    def ask(self, request: dict[str, Any], mutable: tuple[Any, ...] = ()) -> Any:
        """The program's answer; arguments that it changed in place are changed here too; its
        exceptions are raised here.
        """
        try:
            self._calls.write(json.dumps(request).encode() + b"\n")
            self._calls.flush()
            reply = json.loads(self._replies.readline())
            if "unsupported" in reply:
                raise Unsupported(str(reply["unsupported"]))
            if "raised" in reply:
                raise self.exception(reply["raised"])(reply["message"])
            for ours, theirs in zip(mutable, reply.get("arguments", []), strict=True):
                _update(ours, decode(theirs, self))
            return decode(reply["value"], self)
        except (BrokenPipeError, json.JSONDecodeError):
            raise RuntimeError("the program has ended") from None
        except RecursionError:
            raise Unsupported("a result of the program is nested too deeply to be read") from None

    def exception(self, names: list[str]) -> type[Exception]:
        """The exception class with these names, its own and its bases'; one that the program
        defines is made here once, so that tests can catch it.
        """
        kind = getattr(builtins, names[0], None)
        if isinstance(kind, type) and issubclass(kind, Exception):
            return kind
        if names[0] not in self._exceptions:
            bases = (self.exception(names[1:]) if names[1:] else RuntimeError,)
            self._exceptions[names[0]] = types.new_class(names[0], bases)
        return self._exceptions[names[0]]

    def object(self, number: int, is_opaque: bool) -> RemoteObject:
        """The RemoteObject of the program's object with this number; the same number gives the same
        object.
        """
        return self._objects.setdefault(number, RemoteObject(self, number, is_opaque))


class RemoteObject:
    """An object of the program, by number.

    `is_opaque`: True when it cannot be compared with a plain value here.
    """

    def __init__(self, wire: Wire, number: int, is_opaque: bool) -> None:
        self.__dict__.update(_wire=wire, _number=number, _is_opaque=is_opaque)

    def __call__(self, *args: Any, **named: Any) -> Any:
        request = {"do": "call", "on": self._number, "args": encode(args), "named": encode(named)}
        return self._wire.ask(request, tuple(value for value in args if isinstance(value, MUTABLE)))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._wire.ask({"do": "attribute", "on": self._number, "text": name})

    def __mro_entries__(self, bases: Any) -> NoReturn:
        raise Unsupported("the tests derive a class from one of the program's")

    def __hash__(self) -> int:
        return self._number

    def _operate(self, name: str, *args: Any) -> Any:
        if name in OPERATIONS or (name in BINARY and isinstance(args[0], RemoteObject)):
            value = self._wire.ask({"do": name, "on": self._number, "args": encode(args)})
            return iter(value) if name == "__iter__" else value
        if name == "__eq__" and not self._is_opaque:
            return False  # by identity, or by what the program says of itself
        raise Unsupported(
            f"the tests need {name} between an object of the program and a plain value, and only plain values are"
            " compared"
        )


for _name in [*OPERATIONS, *BINARY, *REFLECTED]:
    setattr(RemoteObject, _name, lambda self, *args, _name=_name: self._operate(_name, *args))


class Iterated(list[Any]):
    """The values that an iterator of the program has yielded; also an iterator itself."""

    def __next__(self) -> Any:
        if not self:
            raise StopIteration
        return self.pop(0)


def encode(value: Any, objects: list[Any] | None = None) -> Any:
    """`value` as JSON.

    Other objects are put into `objects`; without that list (in the tests' process) they are
    Unsupported.
    """
    if value is None or isinstance(value, (bool, str)):
        return value
    for number in (int, float):
        if isinstance(value, number):
            return number(value)
    if isinstance(value, Iterator):
        return {"iterator": [encode(part, objects) for part in _values(value)]}
    if type(value) in (list, Iterated):
        return [encode(part, objects) for part in value]
    for name, kind in PARTS.items():
        if isinstance(value, kind):
            return {name: [encode(part, objects) for part in (value.items() if kind is dict else value)]}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, RemoteObject):
        return {"object": [value._number, False]}
    if objects is None:
        raise Unsupported(f"the tests hand the program a {type(value).__name__}, and only plain values can be sent")
    if hasattr(value, "tolist"):  # numpy
        return encode(value.tolist(), objects)
    if isinstance(value, VIEWS):
        return [encode(part, objects) for part in _values(value)]
    if isinstance(value, type) and issubclass(value, Exception):
        return {"exception": [kind.__name__ for kind in value.__mro__]}
    number = next((index for index, known in enumerate(objects) if known is value), len(objects))
    if number == len(objects):
        objects.append(value)
    kinds: Any = type(value)
    comparing = next(kind for kind in kinds.__mro__ if "__eq__" in vars(kind))
    return {"object": [number, comparing is not object and comparing.__module__ != PROGRAM]}


def _values(iterator: Iterable[Any]) -> list[Any]:
    values = list(islice(iterator, ITERATED_MAX + 1))
    if len(values) > ITERATED_MAX:
        raise Unsupported(f"a result of the program gives more than {ITERATED_MAX} values, or never ends")
    return values


def decode(value: Any, other: Wire | list[Any]) -> Any:
    """The value that was encoded. An object is itself in the program's process (`other` lists
    them), a RemoteObject in the tests'.
    """
    if isinstance(value, list):
        return [decode(part, other) for part in value]
    if not isinstance(value, dict):
        return value
    ((kind, parts),) = value.items()
    if kind == "object":
        number, is_opaque = parts
        return other[number] if isinstance(other, list) else other.object(number, is_opaque)
    if kind == "exception":
        assert not isinstance(other, list), "the tests send no exceptions"
        return other.exception(parts)
    if kind == "iterator":
        return Iterated(decode(part, other) for part in parts)
    if kind == "complex":
        return complex(*parts)
    return PARTS[kind](decode(part, other) for part in parts)


def same(value: Any, expected: Any) -> bool:
    """True when a result equals the expected JSON value. Tuples count as lists; an expected list
    with one value may also be that value alone (APPS writes both).
    """
    plain = _as_json(value)
    return _equal(plain, expected) or (isinstance(expected, list) and len(expected) == 1 and _equal(plain, expected[0]))


def _equal(value: Any, expected: Any) -> bool:
    if isinstance(value, list) and isinstance(expected, list):
        return len(value) == len(expected) and all(map(_equal, value, expected))
    if isinstance(value, dict) and isinstance(expected, dict):
        return value.keys() == expected.keys() and all(_equal(value[key], expected[key]) for key in expected)
    return value == expected or (
        isinstance(value, (int, float)) and isinstance(expected, float) and close(value, expected)
    )


def close(number: float, expected: float, rounded_by: float = 0.0) -> bool:
    """True when a number is within FLOAT_TOLERANCE of the expected one, within ZERO_TOLERANCE of 0,
    or within `rounded_by`.
    """
    absolute = max(rounded_by, 0.0 if expected else ZERO_TOLERANCE)
    try:
        return math.isfinite(expected) and math.isclose(number, expected, rel_tol=FLOAT_TOLERANCE, abs_tol=absolute)
    except OverflowError:  # an integer that no float can hold
        return False


def _as_json(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_as_json(part) for part in value]
    if isinstance(value, dict):
        return {str(key): _as_json(part) for key, part in value.items()}
    return value


def _update(ours: Any, theirs: Any) -> None:
    if ours == theirs:
        return
    if isinstance(ours, (list, bytearray)):
        ours[:] = theirs
    else:
        ours.clear()
        ours.update(theirs)


def same_output(output: str, expected: str) -> bool:
    """True when two texts are equal line by line and word by word; white space at the end of lines
    and of the text does not count.
    """
    ours, theirs = (_lines(text) for text in (output, expected))
    return len(ours) == len(theirs) and all(
        len(our) == len(their) and all(map(_same_word, our, their)) for our, their in zip(ours, theirs, strict=True)
    )


def _lines(text: str) -> list[list[str]]:
    return [line.split() for line in text.rstrip().split("\n")]


def _same_word(ours: str, theirs: str) -> bool:
    if ours == theirs:
        return True
    try:
        wanted, got = float(theirs), float(ours)
    except ValueError:
        return False
    rounded = ROUNDED.fullmatch(theirs)
    return not theirs.lstrip("+-").isdigit() and close(got, wanted, 0.5 * 10.0 ** -len(rounded[1]) if rounded else 0.0)
