"""The trusted side of the sandbox: plans the parts of tests that run, names what this system lacks,
starts the supervisor, reads its answers.
"""

from __future__ import annotations

import ast
import contextlib
import json
import os
import random
import select
import socket
import subprocess
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import rlpipe
from rlpipe.base.errors import UserError
from rlpipe.base.hashing import canonical_json
from rlpipe.extras.code_sandbox import confinement, supervisor
from rlpipe.extras.code_sandbox.confinement import ProgramLimits

ROOT = Path(rlpipe.__file__).parent.parent
START = "import sys; sys.path.insert(0, sys.argv[1]); from rlpipe.extras.code_sandbox.supervisor import main; main()"
# nothing of ours; the same hash seed always, so that a program scores the same again
ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8", "PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1",
    "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1",
}  # fmt: skip
STOP_S = supervisor.SWEEP_S + 1.0
GRACE_S = 30.0  # of the supervisor beyond a run's own time: busy machines are slow
UIDS_TRIED = 100
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
FAILING_CALLS = {"fail", "raises", "exit", "_exit", "quit"}
# who catches these has caught a failing assertion
HEARING = {"AssertionError", "Exception", "BaseException"}
SETUPS = ("setup_class", "setup_method")  # of pytest's classes


class SandboxError(ConnectionError):
    """Raised when the sandbox itself failed, which says nothing about the program: it is away."""


@dataclass(frozen=True)
class Outcome:
    """The end of one run, and its output (for a run of tests: the tests' message).

    `status`: "ok"; "error" (exit code not 0, or a signal; tests: one failed); "timeout"; "output"
    (wrote too much); "unsupported" (the tests themselves are at fault).
    """

    status: str
    output: str


class Confinement(NamedTuple):
    """The means that confine programs, as text; `is_full`: True when this system lacks none."""

    name: str
    is_full: bool


def run(python: str, limits: ProgramLimits, source: str, starts: list[tuple[str, Any]]) -> Generator[Outcome]:
    """Runs `source` once for each of `starts`; yields the outcomes as they come.

    Closing the generator ends the sandbox.

    A start is ("stdin", its input), or its tests as a JSON value: ("function", ...) or ("asserts",
    ...). ValueError for tests with a number that JSON lacks (NaN); SandboxError when the sandbox
    could not be set up or did not answer.
    """
    path, readable = _interpreter(python)
    with contextlib.ExitStack() as files:
        uid, claim = _claimed_uid(files)
        texts = [start.encode(errors="replace") if kind == "stdin" else canonical_json(start) for kind, start in starts]
        given = [_memory_file(files, text) for text in texts]
        runs = [(kind, fd) for (kind, _), fd in zip(starts, given, strict=True)]
        process = subprocess.Popen(
            [python, "-P", "-s", "-S", "-c", START, ROOT],
            stdin=_memory_file(files, canonical_json(supervisor.ProgramJob(limits, source, path, readable, uid, runs))),
            stdout=subprocess.PIPE,
            env=ENVIRONMENT,
            cwd="/",
            # a kill of our group leaves it the time to end what it has started
            start_new_session=True,
            pass_fds=[claim, *given],
        )
    assert process.stdout is not None
    try:
        for line in _lines(process.stdout.fileno(), limits.time_s + GRACE_S, len(starts)):
            outcome = Outcome(**json.loads(line))
            if outcome.status == "sandbox":
                raise SandboxError(outcome.output)
            yield outcome
    finally:
        process.stdout.close()  # it ends everything below it, and itself
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@lru_cache(maxsize=8)
def check_interpreter(python: str) -> Confinement:
    """Tries a program with this interpreter and returns its confinement; UserError when it did not
    run, or was not confined.
    """
    if reason := confinement.missing():
        raise UserError(
            f"reward code: this system cannot confine programs: {reason}. Run where it can, or score with a service of"
            " yours: rl.rewards = {remote = 1.0} (docs/rewards-code.md)"
        )
    try:
        (outcome,) = run(python, confinement.TRIAL_LIMITS, confinement.TRIAL, [("stdin", "")])
        if outcome.status != "ok" or outcome.output not in ("True\n", "False\n"):
            raise SandboxError(
                outcome.output.strip() or f"a program of the standard library ended with {outcome.status}"
            )
    except SandboxError as error:
        raise UserError(
            f"reward code: no program can be run with {python!r} ({error}). Its folder must be readable by every user,"
            " or the process allowed to make mount namespaces; or give another interpreter: rl.reward_args = {code ="
            " {python = ...}}"
        ) from error
    has_uid, has_namespace = bool(confinement.free_uids()), outcome.output == "True\n"
    extras = f"{'a' if has_uid else 'no'} uid of their own, {'a' if has_namespace else 'no'} process namespace"
    name = f"Landlock (version {confinement.landlock_version()}), seccomp, limits, {extras}"
    return Confinement(name, has_uid and has_namespace)


def _lines(fd: int, timeout_s: float, count: int) -> Iterator[bytes]:
    """Yields `count` lines of a pipe; SandboxError when it ends before, or is silent for
    `timeout_s`.
    """
    parts: list[bytes] = []
    while count:
        if not select.select([fd], [], [], timeout_s)[0]:
            raise SandboxError(f"the supervisor did not answer in {timeout_s:.0f} s")
        if not (chunk := os.read(fd, supervisor.CHUNK_BYTES)):
            raise SandboxError("the supervisor has ended; what it said is on stderr")
        *ends, rest = chunk.split(b"\n")
        for end in ends:
            count -= 1
            yield b"".join([*parts, end])
            parts = []
        parts.append(rest)


@lru_cache(maxsize=8)
def _interpreter(python: str) -> tuple[list[str], list[str]]:
    """The places that programs import from, and the folders that they may read: the system's
    libraries and the interpreter's folders."""
    ask = "import json, sys; print(json.dumps([sys.path, [sys.prefix, sys.base_prefix]]))"
    try:
        answer = subprocess.run(
            [python, "-I", "-c", ask], capture_output=True, text=True, timeout=30, check=True, env=ENVIRONMENT
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise UserError(
            f"reward code: python = {python!r} does not start ({error}); give the path of a Python 3.11 or newer"
        ) from error
    path, prefixes = json.loads(answer.stdout)
    path = [entry for entry in path if os.path.exists(entry)]
    folders = {
        entry for entry in [*prefixes, *path, *map(os.path.realpath, [*prefixes, *path])] if os.path.isdir(entry)
    }
    return path, [*confinement.SYSTEM, *sorted(folders - {"/"})]


def _claimed_uid(files: contextlib.ExitStack) -> tuple[int, int]:
    """A uid that no other sandbox has while a socket is open, and that socket; for an ordinary user
    its own uid.
    """
    uids = confinement.free_uids()
    claim = files.enter_context(socket.socket(socket.AF_UNIX))
    for uid in random.Random().sample(uids, min(len(uids), UIDS_TRIED)):
        with contextlib.suppress(OSError):  # it is taken
            claim.bind(f"\0rlpipe-sandbox-{uid}")
            return uid, claim.fileno()
    if uids:
        raise SandboxError(f"of {UIDS_TRIED} uids none is free")
    return os.getuid(), claim.fileno()


def _memory_file(files: contextlib.ExitStack, content: bytes) -> int:
    """A file without a name, at its start."""
    file = files.enter_context(os.fdopen(os.memfd_create("rlpipe"), "w+b"))
    file.write(content)
    file.seek(0)
    return file.fileno()


class NoAssertion(ValueError):
    """Raised for tests that no program can fail."""


class Plan(NamedTuple):
    """The parts of tests in Python that run: the module `name`; then check(entry_point), the calls,
    unittest's cases.
    """

    name: str
    entry_point: str
    calls: str
    cases: list[str]


def planned(tree: ast.Module, entry_point: str | None) -> Plan:
    """The plan of tests that runs all their assertions, also those in functions that the module
    itself never calls.

    NoAssertion when none can run; ValueError for tests that need a larger test runner, such as one
    with pytest's fixtures.
    """
    definitions = _definitions(tree)
    guarded = [node for node in tree.body if isinstance(node, ast.If) and "__name__" in ast.dump(node.test)]
    asserts, reached = _reached([node for node in tree.body if node not in guarded], definitions)
    guarded_asserts, guarded_reached = _reached([part for node in guarded for part in node.body], definitions)
    if guarded_asserts:
        reached |= guarded_reached
    calls, cases, roots, entry = [], [], [], ""
    for node in tree.body:
        if isinstance(node, FUNCTIONS) and node.name.startswith("test") and node.name not in reached:
            calls.append(_call(node, 0))
            roots.append(node.name)
        elif isinstance(node, FUNCTIONS) and node.name == "check" and entry_point and "check" not in reached:
            entry = entry_point
            roots.append("check")
        elif isinstance(node, ast.ClassDef) and (node.name.startswith("Test") or _is_case(node, tree)):
            methods = [part for part in node.body if isinstance(part, FUNCTIONS) and part.name.startswith("test")]
            tests = [_call(method, 1) for method in methods]
            if tests and _is_case(node, tree):
                cases.append(node.name)
            elif tests and node.name not in reached:
                setups = [
                    f"_case.{part.name}()" for part in node.body if isinstance(part, FUNCTIONS) and part.name in SETUPS
                ]
                calls += ["\n".join([f"_case = {node.name}()", *setups, f"_case.{test}"]) for test in tests]
            roots += [node.name] if tests else []
    asserts |= guarded_asserts or _reached([part for name in roots for part in definitions[name]], definitions)[0]
    if not asserts and "check" in definitions and not entry_point:
        raise NoAssertion("nothing says which function its tests' `check` is for: name it in the row's entry_point")
    if not asserts:
        raise NoAssertion(
            "no assertion of its tests can run, so any program would pass; write asserts, test_* functions or TestCases"
        )
    return Plan("__main__" if guarded_asserts else "tests", entry, "\n".join(calls), cases)


def _definitions(tree: ast.Module) -> dict[str, list[ast.AST]]:
    """The code that may run when a name is used: a function's body, the methods of a class."""
    definitions: dict[str, list[ast.AST]] = {}
    for node in ast.walk(tree):
        if isinstance(node, FUNCTIONS):
            definitions.setdefault(node.name, []).extend(node.body)
        elif isinstance(node, ast.ClassDef):
            bodies = [line for part in node.body if isinstance(part, FUNCTIONS) for line in part.body]
            definitions.setdefault(node.name, []).extend([*bodies, *node.bases])
        elif isinstance(node, ast.ImportFrom) and node.level:
            raise ValueError("a relative import in its tests; they get the program by `from solution import ...`")
    return definitions


def _reached(roots: Sequence[ast.AST], definitions: dict[str, list[ast.AST]]) -> tuple[bool, set[str]]:
    """True when these nodes may run an assertion whose failure is seen; and the functions and
    classes that they may use.
    """
    asserts, seen = False, set[tuple[str, bool]]()
    pending = [(node, True) for node in roots]
    while pending:
        node, is_heard = pending.pop()
        asserts |= is_heard and _is_assertion(node)
        name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else None
        if name in definitions and (name, is_heard) not in seen:
            seen.add((name, is_heard))
            pending += [(part, is_heard) for part in definitions[name]]
        if isinstance(node, (ast.Try, ast.TryStar)):
            is_caught = any(map(_swallows, node.handlers))
            pending += [(part, is_heard and not is_caught) for part in node.body]
            parts: list[ast.AST] = [*node.handlers, *node.orelse, *node.finalbody]
        elif isinstance(node, FUNCTIONS):  # its body runs when it is used
            parts = [*node.decorator_list, *node.args.defaults]
        else:
            parts = (
                [*node.decorator_list, *node.body] if isinstance(node, ast.ClassDef) else [*ast.iter_child_nodes(node)]
            )
        pending += [(part, is_heard) for part in parts]
    return asserts, {name for name, _ in seen}


def _is_assertion(node: ast.AST) -> bool:
    if isinstance(node, ast.Assert):
        return not (
            isinstance(node.test, (ast.Constant, ast.Tuple))
            and ast.unparse(node.test) not in ("False", "0", "None", "()")
        )
    name = _last_name(node.func) if isinstance(node, ast.Call) else ""
    return isinstance(node, ast.Raise) or name.startswith("assert") or name in FAILING_CALLS


def _swallows(handler: ast.ExceptHandler) -> bool:
    """True when an `except` catches a failed assertion and goes on."""
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    catches = any(kind is None or _last_name(kind) in HEARING for kind in kinds)
    return catches and not any(_is_assertion(node) for part in handler.body for node in ast.walk(part))


def _last_name(node: ast.AST | None) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _is_case(node: ast.ClassDef, tree: ast.Module) -> bool:
    """True when a class is one of unittest's TestCases, by its name or that of a base."""
    names = {_last_name(base) for base in node.bases} - {node.name}
    bases = [
        part
        for part in tree.body
        if isinstance(part, ast.ClassDef) and part.name in names and part.lineno < node.lineno
    ]
    return any(name.endswith("TestCase") for name in names) or any(_is_case(part, tree) for part in bases)


def _call(function: ast.FunctionDef | ast.AsyncFunctionDef, num_given: int) -> str:
    """The call of a test function; ValueError where it needs more than that."""
    num_needed = len(function.args.posonlyargs) + len(function.args.args) - len(function.args.defaults) - num_given
    if num_needed > 0 or isinstance(function, ast.AsyncFunctionDef):
        raise ValueError(
            f"its test function {function.name} is async, or has parameters that only pytest fills: write it plainly"
        )
    return f"{function.name}()"
