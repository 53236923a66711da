"""A deadline of a test finds what hangs: it is made of the constants of
tests/deadlines.py, and no test asserts a time."""

from __future__ import annotations

import ast
import asyncio
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from itertools import chain, pairwise

import pytest

from tests.deadlines import DEADLINE_S, until, until_async
from tests.paths import ROOT

HERE = ROOT / "tests"
KEYWORDS = re.compile(r"(.*_)?(timeout|deadline|within)(_s|_seconds)?|(time|total)_s")
CONSTANTS = re.compile(r"(.*_)?(TIMEOUT|DEADLINE|WITHIN)(_S)?")
# calls whose numbers are deadlines, positional or not
WAITS = {
    "wait",
    "join",
    "timeout",
    "wait_for",
    "wait_procs",
    "result",
    "exception",
    "ClientTimeout",
    "settimeout",
}
CLOCKS = {"monotonic", "perf_counter", "time"}
SHORT = "# short:"  # and why: shortness is what is tested, or what waits is given up


def number(node: ast.AST | None) -> bool:
    """A bare number that bounds something: 0 is "do not wait"."""
    return isinstance(node, ast.Constant) and type(node.value) in (int, float) and node.value != 0


def name_of(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def clock(node: ast.AST) -> bool:
    return any(isinstance(each, ast.Call) and name_of(each.func) in CLOCKS for each in ast.walk(node))


def bounded(node: ast.AST) -> bool:
    """A comparison that says that a time is short; that something took long
    is true on a busy machine too."""
    if not isinstance(node, ast.Compare):
        return False
    sides = [node.left, *node.comparators]
    smaller = [
        pair[:: 1 if isinstance(op, (ast.Lt, ast.LtE)) else -1][0]
        for op, pair in zip(node.ops, pairwise(sides), strict=True)
    ]
    return any(map(clock, smaller))


def bare(tree: ast.AST) -> Iterator[ast.expr | ast.stmt]:
    """The deadlines of a module that are numbers, the times that it
    asserts, and its loops until a time."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield from (
                each.value for each in node.keywords if KEYWORDS.fullmatch(each.arg or "") and number(each.value)
            )
            yield from (each for each in node.args if name_of(node.func) in WAITS and number(each))
        elif isinstance(node, ast.arguments):
            places = zip(reversed(node.posonlyargs + node.args), reversed(node.defaults), strict=False)
            for name, value in chain(places, zip(node.kwonlyargs, node.kw_defaults, strict=True)):
                if value and KEYWORDS.fullmatch(name.arg) and number(value):
                    yield value
        elif (
            isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add) and clock(node.left) and number(node.right)
        ) or (
            isinstance(node, ast.Assign)
            and number(node.value)
            and any(CONSTANTS.fullmatch(name_of(each)) for each in node.targets)
        ):
            yield node
        elif isinstance(node, (ast.Assert, ast.While)) and any(map(bounded, ast.walk(node.test))):
            yield node.test


def faults_of(source: str) -> list[str]:
    lines = source.splitlines()
    faulty = [
        node for node in bare(ast.parse(source)) if SHORT not in "\n".join(lines[node.lineno - 1 : node.end_lineno])
    ]
    return [f"{node.lineno}: {lines[node.lineno - 1].strip()}" for node in faulty]


def test_deadlines_are_made_of_the_constants() -> None:
    faults = [
        f"{path.relative_to(HERE)}:{fault}"
        for path in sorted(HERE.rglob("*.py"))
        for fault in faults_of(path.read_text())
    ]
    assert faults == [], f"tests/deadlines.py has DEADLINE_S and until(); what has to be short says so: {SHORT} WHY"


RACES = re.compile(r"pid_exists\(.*\) (and|or) |\.cmdline\(\)|\.status\(\) [!=]= psutil")


def test_a_look_at_a_process_that_may_end_is_one_that_knows_it() -> None:
    """`pid_exists(pid) and Process(pid)` failed in CI: the process ended in between."""
    faults = [
        f"{path.relative_to(HERE)}: {line.strip()}"
        for path in sorted(HERE.rglob("*.py"))
        for line in path.read_text().splitlines()
        if RACES.search(line) and path.name not in ("living.py", "test_deadlines.py")
    ]
    assert faults == [], "tests/living.py has is_alive(), words_of() and descendants()"


@pytest.mark.parametrize(
    ("line", "is_faulty"),
    [
        ("process.wait(timeout=30)", True), ("process.wait(30)", True), ("await asyncio.wait_for(call, 5)", True),
        ("async with asyncio.timeout(30): ...", True), ("thread.join(9.5)", True),
        ("end = time.monotonic() + 60", True),
        ("def until_there(key, timeout_s=60): ...", True), ("def until_there(*, deadline_s=60): ...", True),
        ("START_TIMEOUT_S = 60", True),
        ("pool = RewardPool(rewards, timeout_s=1.0)", True), ("assert time.monotonic() - began < 60", True),
        ("while time.monotonic() < end and not there(): ...", True), ("@settings(deadline=200)\ndef test(): ...", True),
        ("process.wait(timeout=DEADLINE_S)", False), ("thread.join(2 * DEADLINE_S)", False),
        ("end = time.monotonic() + DEADLINE_S", False),
        ("def until_there(key, timeout_s=DEADLINE_S): ...", False),
        ("process.wait(timeout=30)  # short: it hangs", False),
        ("ProgramLimits(time_s=30.0)", True), ("assert time.monotonic() - began > 3", False), ("event.wait()", False),
        ("', '.join(words)", False), ("@settings(deadline=None)\ndef test(): ...", False),
        ("threads.wait(timeout=0)", False), ("await asyncio.sleep(0.1)", False), ("until(there, look_s=0.5)", False),
    ],
)  # fmt: skip
def test_what_is_a_bare_deadline(line: str, is_faulty: bool) -> None:
    assert bool(faults_of(line)) is is_faulty


# the waits themselves


def test_what_is_so_is_returned_and_asked_no_more() -> None:
    answers = iter([[], 0, "there", "never asked"])
    assert until(lambda: next(answers)) == "there" and next(answers) == "never asked"


async def test_a_condition_may_have_to_be_awaited() -> None:
    answers = iter([False, None, "there"])

    async def answer() -> object:
        return next(answers)

    assert await until_async(answer) == "there"
    assert await until_async(lambda: "at once") == "at once"


async def test_what_never_is_so_says_what_it_is() -> None:
    said: list[str] = []
    with pytest.raises(AssertionError, match=r"it hangs \(the engine's log\)"):
        until(lambda: said.append("asked"), lambda: "the engine's log", within_s=0.05)  # short: it hangs
    assert len(said) >= 2
    with pytest.raises(AssertionError, match=r"it hangs \(line \d+\)"):
        await until_async(lambda: False, within_s=0.05)  # short: it hangs

    async def never() -> bool:
        await asyncio.sleep(DEADLINE_S)
        return True

    with pytest.raises(TimeoutError):
        await until_async(never, within_s=0.05)  # short: it hangs


async def test_a_process_that_has_ended_is_not_waited_for_and_what_it_did_last_counts() -> None:
    process = subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"])
    assert process.wait(timeout=DEADLINE_S) == 3
    for wait in (
        lambda: until(lambda: False, "a log", running=process),
        lambda: asyncio.run(until_async(lambda: False, "a log", running=process)),
    ):
        with pytest.raises(AssertionError, match=r"it ended first, with 3 \(a log\)"):
            await asyncio.to_thread(wait)
    assert until(lambda: True, running=process)


@pytest.mark.parametrize(("patience", "deadline_s"), [("", "300.0"), ("3", "900.0")])
def test_a_variable_makes_all_of_them_longer(patience: str, deadline_s: str) -> None:
    environment = {**os.environ, "RLPIPE_TEST_PATIENCE": patience or "1"}
    program = "from tests import deadlines as d; print(d.DEADLINE_S, d.PIPELINE_S / d.DEADLINE_S, d.SHORT_S > 0)"
    run = [sys.executable, "-c", program]
    told = subprocess.run(
        run, cwd=HERE.parent, env=environment, capture_output=True, text=True, timeout=DEADLINE_S, check=True
    )
    assert told.stdout.split() == [deadline_s, "10.0", "True"]
