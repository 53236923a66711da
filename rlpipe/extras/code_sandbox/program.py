"""The code that runs inside the confinement: the program under test, and in a second process the
tests that call it.

Calls cross between them as plain values only, so that a program cannot return an object whose `==`
is always true.
"""

from __future__ import annotations

import atexit
import importlib
import json
import os
import sys
import types
from collections.abc import Callable
from typing import Any, NoReturn

from rlpipe.extras.code_sandbox.wire import (
    BINARY,
    MUTABLE,
    OPERATIONS,
    PROGRAM,
    Unsupported,
    Wire,
    decode,
    encode,
    same,
)

UNSUPPORTED = 119  # exit code of the tests' process when the tests are at fault
FILE_NAME = "program.py"
# what solutions of LeetCode's style use without importing it
PRELUDE = """
import bisect, collections, functools, heapq, itertools, math, random, re, string
from collections import Counter, OrderedDict, defaultdict, deque
from functools import cache, cmp_to_key, lru_cache, reduce
from heapq import heapify, heappop, heappush, heappushpop, heapreplace, nlargest, nsmallest
from itertools import accumulate, combinations, permutations, product
from math import ceil, floor, gcd, inf, sqrt
from typing import *
"""


def leave(body: Callable[[], int | None]) -> NoReturn:
    """Runs `body` and ends this process with its result as exit code, as the interpreter does at
    its end, whatever happens.
    """
    code = 1
    try:
        sys.set_int_max_str_digits(0)  # big numbers are tested too; the limits bound what they cost
        # Python's own streams were opened by the supervisor, on other files
        sys.stdin = sys.__stdin__ = os.fdopen(0, "r", encoding="utf-8", closefd=False)
        sys.stdout = sys.__stdout__ = os.fdopen(1, "w", encoding="utf-8", closefd=False)
        sys.stderr = sys.__stderr__ = os.fdopen(2, "w", 1, encoding="utf-8", errors="backslashreplace", closefd=False)
        try:
            ended = body() or 0
        except SystemExit as error:
            ended = int.__and__(error.code, 0xFF) if isinstance(error.code, int) else int(error.code is not None)
        threading: Any = sys.modules.get("threading")
        if threading is not None:
            threading._shutdown()  # waits for the program's threads
        atexit._run_exitfuncs()
        sys.stdout.flush()
        code = ended
    finally:  # nothing of a hostile program may return to the supervisor's code below
        os._exit(code)


def run_main(source: str) -> None:
    """Runs the program as `python program.py`."""
    sys.argv = [FILE_NAME]
    _run(source, "__main__", "")


def serve(source: str, prelude: str, calls: int, replies: int) -> None:
    """Runs the program as a module whose functions the other process calls, until the tests are
    done.
    """
    names = _run(source, PROGRAM, prelude)
    objects: list[Any] = []
    with os.fdopen(calls, "rb") as requests, os.fdopen(replies, "wb") as answers:
        for line in requests:
            try:
                text = _answer(json.loads(line), names, objects)
            except Unsupported as error:
                text = json.dumps({"unsupported": str(error)})
            except Exception as error:
                kinds = [kind.__name__ for kind in type(error).__mro__]
                text = json.dumps({"raised": kinds, "message": str(error)[:1000]})
            answers.write(text.encode() + b"\n")
            answers.flush()


def run_tests(tests: int, replies: int, calls: int) -> int:
    """Runs the tests of a check of the reward `code`, against the program at the other end of the
    pipes. 0: passed; 1: failed.
    """
    with os.fdopen(tests, "rb") as file:
        check = json.load(file)
    wire = Wire(calls, replies)
    try:
        if "function" in check:
            name = check["function"]
            function = wire.evaluate(f"globals()[{name!r}] if {name!r} in globals() else Solution().{name}")
            return int(not same(function(*decode(check["arguments"], wire)), check["expected"]))
        _run_script(check, wire)
        return 0
    finally:
        if Unsupported.messages:  # the tests may have caught it
            print(Unsupported.messages[0], flush=True)
            raise SystemExit(UNSUPPORTED)


def _run(source: str, name: str, prelude: str) -> dict[str, Any]:
    """The names that a program has defined after it ran as the module `name`."""
    sys.modules[name] = module = types.ModuleType(name)
    exec(prelude, module.__dict__)
    exec(compile(source, FILE_NAME, "exec"), module.__dict__)
    return module.__dict__


def _run_script(check: dict[str, Any], wire: Wire) -> None:
    """Runs the tests as the module `check["name"]`, then the calls of its functions, then its
    TestCases.
    """
    sys.argv = ["tests.py"]
    sys.modules[PROGRAM] = program = Program(wire)
    sys.modules[check["name"]] = module = types.ModuleType(check["name"])
    names = module.__dict__
    names["__file__"] = "tests.py"
    try:
        code = compile(check["code"], "tests.py", "exec")
        for name in check["imports"]:
            importlib.import_module(name)
        exec(compile(check["setup"], "setup.py", "exec"), names)
    except Exception as error:  # the data set's fault: the program was not called yet
        raise Unsupported(f"the tests do not run: {type(error).__name__}: {error}") from error
    program.__dict__.update({name: wire.evaluate(name) for name in check["names"] if name not in names})
    names |= {name: program.__dict__[name] for name in check["names"] if name not in names}
    exec(code, names)
    if check["entry_point"]:
        names["check"](wire.evaluate(check["entry_point"]))
    exec(check["calls"], names)
    if check["cases"]:
        _run_cases([names[name] for name in check["cases"]])


def _run_cases(cases: list[Any]) -> None:
    """Runs unittest's TestCases; AssertionError when one fails."""
    import unittest  # takes its time

    for case in cases:
        result = unittest.TestResult()
        unittest.defaultTestLoader.loadTestsFromTestCase(case).run(result)
        assert result.wasSuccessful(), case.__name__
        if result.testsRun == len(result.skipped):
            raise Unsupported(f"no test of {case.__name__} runs")


class Program(types.ModuleType):
    """The module that the tests import as `solution`."""

    def __init__(self, wire: Wire) -> None:
        super().__init__(PROGRAM)
        self.__dict__["_wire"] = wire

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        try:
            return self._wire.evaluate(name)
        except NameError as error:
            raise AttributeError(str(error)) from error


def _answer(request: dict[str, Any], names: dict[str, Any], objects: list[Any]) -> str:
    if request["do"] == "evaluate":
        return _reply(eval(request["text"], names), [], objects)
    subject = objects[request["on"]]
    if request["do"] == "attribute":
        return _reply(getattr(subject, request["text"]), [], objects)
    args, named = decode(request["args"], objects), decode(request.get("named", {"dict": []}), objects)
    if operation := {**OPERATIONS, **BINARY}.get(request["do"]):
        return _reply(operation(subject, *args), [], objects)
    value = subject(*args, **named)
    return _reply(value, [argument for argument in args if isinstance(argument, MUTABLE)], objects)


def _reply(value: Any, arguments: list[Any], objects: list[Any]) -> str:
    try:
        return json.dumps({"value": encode(value, objects), "arguments": encode(arguments, objects)})
    except RecursionError:
        raise Unsupported("a result of the program is nested too deeply to be sent") from None
