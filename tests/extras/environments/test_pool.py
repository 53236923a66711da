"""The processes of environments: whatever one does, its rollout ends with a reason, the others go
on, and nothing hangs."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from rlpipe.base.errors import EngineError, UserError
from rlpipe.extras.environments.pool import EnvironmentFault, EnvironmentPool, RemoteEnvironment, check_environment
from rlpipe.extras.environments.protocol import Step
from tests.deadlines import DEADLINE_S, SHORT_S, until_async
from tests.living import is_alive
from tests.paths import ROOT

BEHAVIOURS = '''
import asyncio, os, signal, sys, time
from rlpipe.extras.environments.protocol import Step

print("importing prints")

def say(content, role="user"):
    return Step([{"role": role, "content": content}])

class Behave:
    """Does what the completion says; otherwise says how often it was told something."""
    roles = ("user", "tool")

    def __init__(self, word="turn"):
        self.word, self.turns = word, 0

    def start(self, prompt):
        print("starting prints", flush=True)
        what = prompt["answer"]
        if what == "raise": raise KeyError("gone")
        if what == "sleep": time.sleep(600)
        if what == "kill": os.kill(os.getpid(), signal.SIGKILL)
        if what == "none": return None
        if what == "empty": return []
        if what == "assistant": return [{"role": "assistant", "content": "x"}]
        if what == "pid": return [{"role": "user", "content": str(os.getpid())}]
        return prompt["messages"]

    def step(self, completion):
        self.turns += 1
        if completion == "raise": raise KeyError("gone")
        if completion == "sleep": time.sleep(600)
        if completion == "spin":
            while True: pass
        if completion == "exit": sys.exit(3)
        if completion == "kill": os.kill(os.getpid(), signal.SIGKILL)
        if completion == "child": os.system("sleep 600 & echo $! > child.pid; sleep 600")
        if completion == "none": return None
        if completion == "dict": return {"messages": [], "done": True}
        if completion == "nothing": return Step()
        if completion == "nan": return Step(done=True, reward=float("nan"))
        if completion == "text": return Step(done=True, reward="1")
        if completion == "metric": return Step(done=True, metrics={"a/b": 1.0})
        if completion == "big": return say("x" * 1_000_001)
        if completion == "role": return say("x", "system")
        if completion == "surrogate": return say(chr(0xD800))
        if completion == "content": return say(None)
        if completion == "pid": return say(str(os.getpid()))
        if completion == "stdin": return say(str(len(sys.stdin.read())))
        if completion == "done": return Step(done=True, reward=0.5, metrics={"turns": self.turns})
        return say(f"{self.word} {self.turns}", "tool")

class Later(Behave):
    """The same, asynchronous."""
    async def start(self, prompt):
        if prompt["answer"] == "sleep": await asyncio.sleep(600)
        return super().start(prompt)

    async def step(self, completion):
        await asyncio.sleep(0.01)
        if completion in ("sleep", "spin"): await asyncio.sleep(600)  # what blocks: extras/environments/test_async.py
        return super().step(completion)

class Bare:
    def start(self, prompt): ...
'''
BAD = {
    "raise": "environment_error", "sleep": "environment_timeout", "spin": "environment_timeout",
    "exit": "environment_error",
    "kill": "environment_crash", **dict.fromkeys(
        ["none", "dict", "nothing", "nan", "text", "metric", "big", "role", "surrogate", "content"],
        "environment_invalid"),
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "behaviours.py").write_text(BEHAVIOURS)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest_asyncio.fixture(params=["Behave", "Later"])
async def pool(folder: Path, request: pytest.FixtureRequest) -> AsyncIterator[EnvironmentPool]:
    opened = EnvironmentPool(f"behaviours:{request.param}", {"word": "time"}, workers=2, timeout_s=DEADLINE_S)
    yield opened
    await opened.close()


def prompt(answer: str = "x") -> dict[str, Any]:
    return {"prompt_id": "set/0", "messages": [{"role": "user", "content": "go"}], "answer": answer, "metadata": {}}


async def reason(call: Awaitable[Any]) -> str:
    with pytest.raises(EnvironmentFault) as caught:
        await call
    return caught.value.reason


def hasty(pool: EnvironmentPool) -> None:
    """From here on a call is given up soon."""
    pool.timeout_s = SHORT_S
    for worker in pool._workers:
        worker.silent_s = SHORT_S


def say(content: str) -> Step:
    return Step([{"role": "tool", "content": content}])


async def test_a_rollout_has_an_environment_of_its_own(pool: EnvironmentPool) -> None:
    one, other = pool.open(prompt()), pool.open(prompt())
    assert await one.start() == prompt()["messages"] == one.start_messages and other.start_messages is None
    assert await one.step("hi") == say("time 1") and await one.step("hi") == say("time 2")
    assert await other.step("hi") == say("time 1") and other.start_messages == prompt()["messages"]
    assert await one.step("done") == Step(done=True, reward=0.5, metrics={"turns": 3.0})
    assert (await other.step("stdin")).messages[0]["content"] == "0"


async def play(environment: RemoteEnvironment, last: str) -> list[Step | str]:
    told: list[Step | str] = []
    for completion in ("a", "b", last):
        try:
            told.append(await environment.step(completion))
        except EnvironmentFault as fault:
            return [*told, fault.reason]
    return told


@pytest.mark.slow
async def test_every_misbehaviour_has_its_reason_and_harms_no_other(pool: EnvironmentPool) -> None:
    hasty(pool)
    lasts = [last for kind in BAD for last in (kind, "c")]
    told = await asyncio.gather(*(play(pool.open(prompt()), last) for last in lasts))
    good: list[Step | str] = [say("time 1"), say("time 2"), say("time 3")]
    assert dict(zip(lasts[::2], (each[-1] for each in told[::2]), strict=True)) == BAD
    assert all(each[:2] == good[:2] for each in told)
    assert all(each == good for each in told[1::2])


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "expected"), [(kind, BAD[kind]) for kind in ("raise", "sleep", "kill", "none")] + [
    ("empty", "environment_invalid"), ("assistant", "environment_invalid")])  # fmt: skip
async def test_a_start_that_fails(pool: EnvironmentPool, kind: str, expected: str) -> None:
    hasty(pool)
    assert await reason(pool.open(prompt(kind)).start()) == expected
    # it started when the prompt was sampled: a step is not to blame, if its process can say so
    again = await reason(pool.open(prompt(kind)).step("hi"))
    assert again == "environment_unavailable" or (kind in ("kill", "sleep") and again == expected)
    assert await pool.open(prompt()).step("hi") == say("time 1")


@pytest.mark.slow
async def test_a_process_that_is_killed_from_outside_costs_nothing(pool: EnvironmentPool) -> None:
    environments = [pool.open(prompt()) for _ in range(4)]
    for environment in environments:
        await environment.step("a")
    pids = {int((await environment.step("pid")).messages[0]["content"]) for environment in environments[2:]}
    assert len(pids) == 2, "they are spread over the processes"
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    assert [await environment.step("b") for environment in environments[:2]] == [say("time 2")] * 2
    # these had said their pid, and say another one when they are told it all again
    assert [await reason(environment.step("b")) for environment in environments[2:]] == ["environment_unavailable"] * 2


async def test_a_start_that_is_not_the_same_twice_is_caught(pool: EnvironmentPool) -> None:
    environment = pool.open(prompt("pid"))
    (message,) = await environment.start()
    os.kill(int(message["content"]), signal.SIGKILL)
    # else the step would be in the process when it ends, and might be to blame
    await until_async(lambda: environment._worker._process is None)
    assert await reason(environment.step("a")) == "environment_unavailable"


async def test_a_step_that_kills_is_at_fault_also_where_the_environment_is_not_made_again(
    pool: EnvironmentPool,
) -> None:
    environment = pool.open(prompt("pid"))
    await environment.start()
    assert await reason(environment.step("kill")) == "environment_crash"


@pytest.mark.slow
async def test_a_kill_takes_the_children_along(pool: EnvironmentPool, folder: Path) -> None:
    hasty(pool)
    assert await reason(pool.open(prompt()).step("child")) == "environment_timeout"
    child = int((folder / "child.pid").read_text())
    await until_async(lambda: not is_alive(child))


KILLED_WHILE_IT_LOADS = """
from pathlib import Path

if len(list(Path(".").glob("load-*"))) < NUM_KILLS:
    Path(f"load-{os.getpid()}").touch()
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("num_kills", [1, 9])
async def test_one_that_is_killed_while_it_loads_is_loaded_once_more(folder: Path, num_kills: int) -> None:
    (folder / "killed.py").write_text(BEHAVIOURS + KILLED_WHILE_IT_LOADS.replace("NUM_KILLS", str(num_kills)))
    opened = EnvironmentPool("killed:Behave", {"word": "time"}, workers=1, timeout_s=DEADLINE_S)
    if num_kills == 1:
        assert await opened.open(prompt()).step("hi") == say("time 1")
    else:
        with pytest.raises(UserError, match="the process that loads it ended"):
            await opened.open(prompt()).step("hi")
    await opened.close()
    assert len(list(folder.glob("load-*"))) == min(num_kills, 2)


async def test_an_environment_that_only_dies_ends_the_run(pool: EnvironmentPool) -> None:
    pool._workers[0]._losses.in_a_row_max = 3
    assert await reason(pool.open(prompt()).step("kill")) == "environment_crash"
    with pytest.raises(UserError, match="3 processes in a row were lost"):
        await pool.open(prompt()).step("kill")


async def test_what_is_at_work_when_the_pool_closes_records_no_fault(pool: EnvironmentPool) -> None:
    stepping = [asyncio.create_task(pool.open(prompt()).step("sleep")) for _ in range(4)]
    await until_async(lambda: sum(len(worker._in_flight) for worker in pool._workers) >= 2)
    await pool.close()
    told = await asyncio.gather(*stepping, return_exceptions=True)
    assert [type(outcome) for outcome in told] == [EngineError] * 4


@pytest.mark.parametrize(
    ("name", "args", "said"),
    [
        ("nope", {}, "there is no environment 'nope'; use calculator"),
        ("no_such_module:X", {}, "does not import"),
        ("behaviours:Nope", {}, "has no 'Nope'"),
        ("behaviours:Bare", {}, "no method 'step'"),
        ("behaviours:Behave", {"colour": "red"}, "refuses rl.environment_args"),
    ],
)
async def test_what_cannot_be_loaded_is_said_before_a_run_starts(
    folder: Path, name: str, args: dict[str, Any], said: str
) -> None:
    with pytest.raises(UserError, match=said):
        check_environment(name, args)


async def test_what_can_be_loaded_names_its_roles(folder: Path) -> None:
    assert check_environment("behaviours:Behave", {}) == ["user", "tool"]
    assert check_environment("behaviours:Later", {}) == ["user", "tool"]
    assert check_environment("calculator", {}) == ["tool"]


async def test_the_example_of_the_docs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (ROOT / "docs" / "environments.md").read_text()
    (tmp_path / "guessing.py").write_text(text.partition("```python\n")[2].partition("```")[0])
    monkeypatch.chdir(tmp_path)
    pool = EnvironmentPool("guessing:Guess", {"tries": 2}, workers=1, timeout_s=DEADLINE_S)
    environment = pool.open(prompt("7"))
    assert await environment.start() == prompt()["messages"]
    assert await environment.step("6") == Step([{"role": "user", "content": "no"}], metrics={"wrong": 1.0})
    assert await environment.step(" 7") == Step(done=True, reward=1.0, metrics={"guessed": 1.0})
    await pool.close()
