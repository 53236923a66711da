"""The reward `code`: does the completion's program pass the prompt's tests, run in a sandbox where
it can do no harm. See docs/rewards-code.md.
"""

from __future__ import annotations

import ast
import builtins
import json
import logging
import re
import symtable
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from typing import Annotated, Any, NamedTuple

from pydantic import Field

from rlpipe.base.errors import PromptFault, UserError
from rlpipe.extras.code_sandbox import runner
from rlpipe.extras.code_sandbox.confinement import ProgramLimits
from rlpipe.extras.code_sandbox.fences import blocks
from rlpipe.extras.code_sandbox.wire import PROGRAM, encode, same_output
from rlpipe.records.prompt import RewardPrompt
from rlpipe.rewards.registry import ExtraReward

logger = logging.getLogger(__name__)
TOTAL_S = 8.0  # of all tests of a prompt together, by default
# of the metadata; else the answer
FIELDS = ("input_output", "test_cases", "tests", "unit_tests", "verification_info", "test")
FORMS = (
    '{"inputs": [...], "outputs": [...], "fn_name": optional} (APPS, TACO, PRIME), [{"input": ..., "output": ...}]'
    ' (DeepCoder), a list of asserts or "test_list" (MBPP), "test" with "entry_point" (HumanEval), test_* functions and'
    " TestCases (KodCode)"
)


UNREADABLE = (KeyError, TypeError, ValueError, AttributeError, SyntaxError, StopIteration, RecursionError, MemoryError)
MODULE_NAMES = {"__file__"}  # what every module has beside Python's own names
# of a person at a prompt: a test that uses one means the program's own
SITE_TEXTS = {"copyright", "credits", "help", "license"}
INTEGER = re.compile(r"-?\d+")
DEFINITION = re.compile(r"^def +(\w+) *\(", re.MULTILINE)


class CodeTest(NamedTuple):
    """One test: the input with which the sandbox starts the program, and the stdout that it must
    write (None: the run itself says if it passed).
    """

    start: tuple[str, Any]  # see `runner.run`
    expected: str | None
    size: int  # of its input, characters


def code(
    *,
    time_s: Annotated[float, Field(ge=0.1)] = 4.0,
    total_s: float = TOTAL_S,
    memory_mb: Annotated[int, Field(ge=64)] = 512,
    processes: Annotated[int, Field(ge=1)] = 4,
    files_mb: Annotated[int, Field(ge=1)] = 16,
    tests_max: Annotated[int, Field(ge=1)] = 15,
    partial: bool = False,
    python: str = "",
) -> Callable[[RewardPrompt, str], float]:
    """A reward that runs the last ```python block of a completion against the prompt's tests.

    1.0 when all pass, else 0.0; with `partial` the fraction that passes. No block, or one that does
    not compile: 0.0. Each test has `time_s`, all together `total_s`, which must be below
    rl.reward_timeout_s. `memory_mb` is for each process, `processes` counts threads too, `files_mb`
    bounds what is written. Of more than `tests_max` tests, those with the longest inputs are made.
    `python`: the interpreter, with the packages that programs may import; rlpipe's own by default.
    ValueError when total_s makes no sense, or no program can be run here. The reward raises
    PromptFault for a prompt without tests.
    """
    if total_s < time_s:
        raise ValueError(f"total_s={total_s:g} is below time_s={time_s:g}; one test may take time_s")
    interpreter = python or sys.executable
    runner.check_interpreter(interpreter)
    limits = ProgramLimits(time_s, total_s, memory_mb, processes, files_mb)

    def reward(prompt: RewardPrompt, completion: str) -> float:
        tests = pick(read_tests(prompt), tests_max)
        source = last_program(completion)
        if source is None:
            return 0.0
        passed = 0
        ends_s = time.monotonic() + total_s
        with closing(runner.run(interpreter, limits, source, [test.start for test in tests])) as outcomes:
            for test, outcome in zip(tests, outcomes, strict=True):
                passes = _passes(test, outcome, prompt)
                passed += passes
                if not (passes or partial) or time.monotonic() > ends_s:
                    break
        return passed / len(tests) if partial else float(passed == len(tests))

    return reward


def last_program(completion: str) -> str | None:
    """The text of the last closed block fenced as Python; None without one."""
    return next((block.text for block in reversed(list(blocks(completion))) if block.is_python), None)


def _passes(test: CodeTest, outcome: runner.Outcome, prompt: RewardPrompt) -> bool:
    if outcome.status == "unsupported":
        raise ValueError(f"prompt {prompt['prompt_id']}: {outcome.output.strip()}")
    return outcome.status == "ok" and (test.expected is None or same_output(outcome.output, test.expected))


def read_tests(prompt: RewardPrompt) -> list[CodeTest]:
    """The prompt's tests; PromptFault when it has none, or their form is not known."""
    metadata = prompt["metadata"]
    entry_point = metadata.get("entry_point") or _function_name(metadata) or _only_function(prompt)
    try:
        if metadata.get("test_list"):
            setup = "\n".join([*(metadata.get("test_imports") or []), metadata.get("test_setup_code") or ""])
            return _scripts(metadata["test_list"], entry_point, setup, metadata.get("code"))
        if metadata.get("test") and metadata.get("entry_point"):
            return _scripts([metadata["test"]], entry_point)
        raw = next((metadata[name] for name in FIELDS if metadata.get(name)), prompt["answer"])
        tests = _read(_parsed(raw), _function_name(metadata), entry_point)
    except runner.NoAssertion as error:
        raise PromptFault(f"prompt {prompt['prompt_id']}: {error}") from error
    except UNREADABLE as error:
        raise PromptFault(
            f"prompt {prompt['prompt_id']}: its tests cannot be read ({error!r}); known forms: {FORMS}"
        ) from error
    if not tests:
        raise PromptFault(
            f"prompt {prompt['prompt_id']} has no tests; they belong into its answer or metadata, as {FORMS}"
        )
    return tests


def pick(tests: list[CodeTest], tests_max: int) -> list[CodeTest]:
    """At most `tests_max` of the tests, those with the longest inputs, in their order."""
    chosen = sorted(range(len(tests)), key=lambda index: -tests[index].size)[:tests_max]
    return [tests[index] for index in sorted(chosen)]


def _read(raw: Any, function: str | None, entry_point: str | None) -> list[CodeTest]:
    """Tests in any form.

    `function` is called with inputs; `entry_point`, which may be guessed, with a `check`.
    """
    if isinstance(raw, str):
        return _scripts([raw], entry_point) if raw.strip() else []
    if isinstance(raw, dict):
        if raw.get("assert_case"):  # AceCode, as verl stores it
            return _read(raw["assert_case"], None, entry_point)
        if "inputs" in raw:
            pairs = zip(raw["inputs"], raw["outputs"], strict=True)
            return [_pair(given, expected, raw.get("fn_name") or function) for given, expected in pairs]
        nested = next(raw[name] for name in (*FIELDS, "answer") if raw.get(name))
        return _read(_parsed(nested), _function_name(raw) or function, entry_point)
    if raw and all(isinstance(entry, str) for entry in raw):
        return _scripts(raw, entry_point)
    return [_case(entry, function) for entry in raw or []]


def _case(entry: Mapping[str, Any], function: str | None) -> CodeTest:
    """One {"input", "output"}, of stdin and stdout or of a function."""
    kind = str(entry.get("type") or entry.get("testtype") or "")
    own = None if kind.startswith("stdin") else _function_name(entry) or function
    if kind.startswith("func") and own is None:
        raise ValueError(f"a test is {kind!r}, and nothing names the function: add fn_name")
    return _pair(entry["input"], entry["output"], own)


def _scripts(
    codes: Sequence[str], entry_point: str | None, setup: str = "", reference: str | None = None
) -> list[CodeTest]:
    """Tests written in Python; code without an assertion belongs to the next test that has one.

    NoAssertion when none has one.
    """
    tests: list[CodeTest] = []
    before = ""
    for index, code in enumerate(codes):
        try:
            tests.append(_script(before + code, setup, reference, entry_point))
        except runner.NoAssertion:
            if index == len(codes) - 1 and not tests:
                raise
            before += f"{code}\n"
    return tests


def _parsed(raw: Any) -> Any:
    """The value of a JSON text; other texts are Python and returned as they are."""
    if not isinstance(raw, str):
        return raw
    try:
        return json.loads(raw)
    except json.JSONDecodeError:
        return raw


def _function_name(fields: Mapping[str, Any]) -> str | None:
    own = fields.get("fn_name") or fields.get("func_name")
    nested = fields.get("metadata")
    return own or (_function_name(nested) if isinstance(nested, dict) else None)


def _only_function(prompt: RewardPrompt) -> str | None:
    """The function that the prompt's last message begins, as in HumanEval, when it is the only one
    in it.
    """
    names = set(DEFINITION.findall(prompt["messages"][-1]["content"])) if prompt["messages"] else set()
    return names.pop() if len(names) == 1 else None


def _pair(given: Any, expected: Any, function: str | None) -> CodeTest:
    if function is None:
        stdin = _text(given)
        return CodeTest(("stdin", stdin), _text(expected), len(stdin))
    # one JSON value a line, and the result as JSON (PRIME, LiveCodeBench)
    if isinstance(given, str):
        given, expected = [json.loads(line) for line in given.split("\n") if line.strip()], _parsed(expected)
    elif isinstance(given, list) and given and isinstance(given[0], dict) and all(map(INTEGER.fullmatch, given[0])):
        given = [{int(key): value for key, value in given[0].items()}, *given[1:]]  # JSON made them texts (APPS)
    arguments = given if isinstance(given, list) else [given]
    check = {"function": function, "arguments": encode(arguments), "expected": expected}
    return CodeTest(("function", check), None, len(json.dumps(arguments)))


def _script(code: str, setup: str, reference: str | None, entry_point: str | None) -> CodeTest:
    """Tests as Python; NoAssertion when no program could fail them."""
    if "solution" in setup:  # it imports the program: run it where errors count as the program's
        code, setup = f"{setup}\n{code}", ""
    tree = ast.parse(code)
    plan = runner.planned(tree, entry_point)
    names = _names(f"{setup}\n{code}", reference)
    modules = {name for node in ast.walk(tree) for name in _imported(node)}
    if not (names or plan.entry_point or PROGRAM in modules):
        raise runner.NoAssertion("its tests take nothing from the program: whatever that is, they would say the same")
    imports = sorted({name for node in tree.body for name in _imported(node)} - {PROGRAM})
    check = {"code": code, "setup": setup, "names": names, "imports": imports, **plan._asdict()}
    return CodeTest(("asserts", check), None, len(code))


def _imported(node: ast.AST) -> list[str]:
    """The modules that a statement imports."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return [node.module or ""] if not node.level else [PROGRAM]
    return []


def _names(code: str, reference: str | None) -> list[str]:
    """The names that the tests take from the program: those that neither the tests nor Python
    define, and those of the reference.
    """
    tables = [symtable.symtable(code, "tests.py", "exec")]
    for table in tables:
        tables.extend(table.get_children())
    symbols = [symbol for table in tables for symbol in table.get_symbols() if symbol.is_global()]
    used = {symbol.get_name() for symbol in symbols if symbol.is_referenced()}
    defined = {symbol.get_name() for symbol in symbols if symbol.is_assigned() or symbol.is_imported()} | MODULE_NAMES
    wanted = {name for name in used if not hasattr(builtins, name) or name in SITE_TEXTS}
    if reference:  # some of MBPP's functions are called like Python's
        wanted |= {table.get_name() for table in symtable.symtable(reference, "", "exec").get_children()} & used
    return sorted(wanted - defined)


def _text(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def check_time(args: Mapping[str, Any], timeout_s: float) -> None:
    """UserError when the tests of a rollout may take longer than the timeout of scoring: a slow
    program would be a fault, not a 0.0.

    Logs the means that confine programs, as a warning where some are missing; UserError where
    programs cannot be confined.
    """
    total_s = args.get("total_s", TOTAL_S)
    if not total_s < timeout_s:  # also a nan
        raise UserError(
            f"rl.reward_args.code.total_s={total_s:g} is not below rl.reward_timeout_s={timeout_s:g}: a program that is"
            f" too slow would be a fault, reward_timeout, and not a 0.0; set rl.reward_timeout_s above {total_s:g}, or"
            " a smaller total_s"
        )
    name, is_full = runner.check_interpreter(str(args.get("python") or sys.executable))
    level, advice = (
        (logging.INFO, "") if is_full else (logging.WARNING, "; root who may mount has both (docs/rewards-code.md)")
    )
    logger.log(level, "reward code: programs are confined by %s%s", name, advice)


CODE = ExtraReward(code, check_time)
