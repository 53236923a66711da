"""What rewards, environments, data functions and agents print: bounded in our memory and on our
stderr, its end kept, and no answer among it."""

from __future__ import annotations

import asyncio
import logging
import resource
from pathlib import Path
from typing import Any

import pytest

from rlpipe.base.errors import UserError
from rlpipe.extras.environments.pool import EnvironmentFault, EnvironmentPool
from rlpipe.extras.environments.protocol import Step
from rlpipe.processes.lines import LINE_BYTES_MAX
from rlpipe.processes.pool import WorkerPool
from rlpipe.processes.printed import PASSED_BYTES, TAIL_BYTES
from rlpipe.rewards.pool import RewardPool
from rlpipe.rewards.score import Score
from tests.deadlines import DEADLINE_S
from tests.rewards.test_pool import items as items_of

MEGABYTES = 300
GROWTH_MB = 100  # of this process while it reads that
CODE = f"""
import os, sys, subprocess
from rlpipe.extras.environments.protocol import Step

def loud(said):
    block = ("e" * 99 + chr(10)) * 10_486
    for _ in range(int(said.partition(" ")[2] or 0)):
        sys.stderr.write(block)
    print("to stdout")
    print("last words", file=sys.stderr)

def raw(what):
    for number in range(3, 20):
        try:
            os.readlink(f"/proc/self/fd/{{number}}").startswith("pipe:") and os.write(number, what)
        except OSError:
            pass

def do(said):
    if said.startswith("loud"): loud(said)
    if said == "child": subprocess.run(["sh", "-c", "echo a child; echo its fault >&2"])
    if said == "raw": raw(b"hello" + bytes([10]))
    if said == "half": raw(b"hello")
    if said == "list": raw(b"[1]" + bytes([10]))
    if said == "deep": raw(b"[" * 100_000 + bytes([10]))
    if said == "other": raw(b'{{"key": 77}}' + bytes([10]))
    if said == "endless":
        for _ in range({LINE_BYTES_MAX // 1_000_000 + 2}): raw(b"x" * 1_000_000)

def reward(prompt, completion):
    do(completion)
    return 1.0

class Told:
    def start(self, prompt): return prompt["messages"]
    def step(self, completion):
        do(completion)
        return Step(done=True, reward=1.0)

def rows(label):
    loud(f"loud {{label}}")
    yield {{"prompt": "p", "answer": "a"}}
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "printing.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def items(*completions: str) -> Any:
    return items_of(*completions)


def peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


async def told(*completions: str) -> list[Any]:
    pool, answers = EnvironmentPool("printing:Told", {}, workers=1, timeout_s=DEADLINE_S), []
    prompt: Any = {"prompt_id": "p", "messages": [{"role": "user", "content": "x"}], "answer": None, "metadata": {}}
    try:
        for completion in completions:
            environment = pool.open(prompt)
            await environment.start()
            try:
                answers.append(await environment.step(completion))
            except EnvironmentFault as fault:
                answers.append(fault.reason)
    finally:
        await pool.close()
    return answers


@pytest.mark.parametrize("kind", ["reward", "environment"])
def test_what_is_printed_is_bounded_and_its_end_kept(
    kind: str, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    before_mb, loud = peak_mb(), f"loud {MEGABYTES}"
    with caplog.at_level(logging.WARNING):
        if kind == "reward":
            with RewardPool({"printing:reward": 1.0}, workers=1, timeout_s=DEADLINE_S) as pool:
                assert [score.reward for score in pool.score(items(loud, "child", "x"))] == [1.0] * 3
        else:
            assert asyncio.run(told(loud, "child", "x")) == [Step(done=True, reward=1.0)] * 3
    out, err = capfd.readouterr()
    assert peak_mb() - before_mb < GROWTH_MB
    assert out == "" and PASSED_BYTES < len(err) < PASSED_BYTES + TAIL_BYTES + 1000
    assert "last words" in err[-200:] and "its fault" in err and "to stdout" in err and "a child" in err
    name = "rl.rewards=['printing:reward']" if kind == "reward" else "rl.environment='printing:Told'"
    assert f"[{name}: " in err and "bytes that it printed are left out here" in err
    assert [f"{name} has printed {PASSED_BYTES} bytes" in record.message for record in caplog.records].count(True) == 1


def test_what_is_little_is_shown_as_it_is(capfd: pytest.CaptureFixture[str]) -> None:
    with RewardPool({"printing:reward": 1.0}, workers=1, timeout_s=DEADLINE_S) as pool:
        pool.score(items("loud 0"))
    assert sorted(capfd.readouterr().err.split("\n")) == ["", "last words", "to stdout"]


@pytest.mark.slow
def test_what_code_writes_into_the_pipe_of_its_answers_costs_its_own_rollout() -> None:
    kinds = ("raw", "half", "list", "deep", "other", "endless")
    with RewardPool({"printing:reward": 1.0}, workers=1, timeout_s=DEADLINE_S) as pool:
        for said in kinds:
            scores = pool.score(items("1", "22", said, "longer than that"))
            assert [score.reward for score in scores] == [1.0, 1.0, scores[2].reward, 1.0], said
            assert scores[2] == Score(None, {}, "reward_crash", scores[2].message) and "\n" not in scores[2].message, (
                said
            )
    answers, right = (
        asyncio.run(told(*(each for said in kinds for each in ("1", said)), "2")),
        Step(done=True, reward=1.0),
    )
    assert answers == [each for _ in kinds for each in (right, "environment_crash")] + [right]


def test_what_a_process_printed_before_it_could_not_load_is_shown(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (folder / "dies.py").write_text("import os, sys\nprint('why it died', flush=True)\nos._exit(3)\n")
    pool = WorkerPool("rl.rewards", "rlpipe.rewards.worker", {"rewards": {"dies:reward": 1.0}, "args": {}})
    with pytest.raises(UserError, match="ended with code 3; its output is above"):
        pool.start()
    assert "why it died" in capfd.readouterr().err
    pool.close()
