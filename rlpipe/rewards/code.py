"""The reward `code`: does the completion's program pass the prompt's tests, run where it can do no harm. See docs/rewards-code.md."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import closing
from typing import Annotated

from pydantic import Field

from rlpipe.rewards.code_tests import CodeTest, pick, read_tests, same_output
from rlpipe.rewards.sandbox import runner
from rlpipe.rewards.sandbox.jail import Limits
from rlpipe.types import JsonDict, UserError

LANGUAGES = ("python", "python3", "py")
TOTAL_S = 8.0  # of all tests of a prompt together, by default


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
) -> Callable[[JsonDict, str], float]:
    """A reward that runs the last ```python block of a completion against the prompt's tests.

    1.0 when all pass, else 0.0; with `partial` the fraction that passes. No block, or one that does not compile: 0.0.
    Each test has `time_s`, all together `total_s`, which must be below rl.reward_timeout_s. `memory_mb` is for each process,
    `processes` counts threads too, `files_mb` bounds what is written. Of more than `tests_max` tests, those with the longest
    inputs are made. `python`: the interpreter, with the packages that programs may import; rlpipe's own by default.
    ValueError when total_s makes no sense, or no program can be run here; the reward raises it for a prompt without tests.
    """
    if total_s < time_s:
        raise ValueError(f"total_s={total_s:g} is below time_s={time_s:g}; one test may take time_s")
    interpreter = python or sys.executable
    plan = runner.strongest_plan(interpreter)
    limits = Limits(time_s, total_s, memory_mb, processes, files_mb)

    def reward(prompt: JsonDict, completion: str) -> float:
        tests = pick(read_tests(prompt), tests_max)
        source = last_program(completion)
        if source is None:
            return 0.0
        passed = 0
        ends_s = time.monotonic() + total_s
        with closing(runner.run(interpreter, plan, limits, source, [test.run for test in tests])) as outcomes:
            for test, outcome in zip(tests, outcomes, strict=True):
                passes = _passes(test, outcome, prompt)
                passed += passes
                if not (passes or partial) or time.monotonic() > ends_s:
                    break
        return passed / len(tests) if partial else float(passed == len(tests))

    return reward


def check_time(args: JsonDict, timeout_s: float) -> None:
    """UserError when the tests of a rollout may take longer than scoring it: a slow program would be a fault, not a 0.0."""
    total_s = args.get("total_s", TOTAL_S)
    if not total_s < timeout_s:  # also a nan
        raise UserError(
            f"rl.reward_args.code.total_s={total_s:g} is not below rl.reward_timeout_s={timeout_s:g}: a program that is too slow "
            f"would be a fault, reward_timeout, and not a 0.0; set rl.reward_timeout_s above {total_s:g}, or a smaller total_s"
        )


def last_program(completion: str) -> str | None:
    """The text of the last closed block fenced as Python; None without one."""
    found: str | None = None
    language: str | None = None  # of the block we are in
    lines: list[str] = []
    for line in completion.split("\n"):
        mark = line.strip()
        if language is None and mark.startswith("```"):
            language, lines = mark[3:].strip().lower(), []
        elif language is not None and mark == "```":
            found = "\n".join(lines) + "\n" if language in LANGUAGES else found
            language = None
        elif language is not None:
            lines.append(line)
    return found


def _passes(test: CodeTest, outcome: runner.Outcome, prompt: JsonDict) -> bool:
    if outcome.status == "unsupported":
        raise ValueError(f"prompt {prompt['prompt_id']}: {outcome.output.strip()}")
    return outcome.status == "ok" and (test.expected is None or same_output(outcome.output, test.expected))
