"""Async environments: all that is asked is under way at once in one process, no thread waits for
it, and a lost process costs nobody else."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

from rlpipe.extras.environments.pool import EnvironmentFault, EnvironmentPool, RemoteEnvironment
from rlpipe.extras.environments.protocol import Step
from tests.deadlines import DEADLINE_S, SHORT_S, until_async

MANY = 1000
ENVIRONMENT = '''
import asyncio, os, pathlib, signal, time
from rlpipe.extras.environments.protocol import Step

class Meets:
    """Answers a `meet N` when N environments wait at once; counts its turns."""
    waiting, met = 0, asyncio.Event()

    def __init__(self):
        self.turns = 0

    async def start(self, prompt):
        return prompt["messages"]

    async def close(self):
        with open("closed", "a") as file: file.write(f"{self.turns} ")
        raise KeyError("a fault of nobody's rollout")

    async def step(self, completion):
        self.turns += 1
        kind, _, rest = completion.partition(" ")
        if kind == "meet":
            Meets.waiting += 1
            if Meets.waiting == int(rest): Meets.met.set()
            await Meets.met.wait()
        if kind == "hold":
            while not pathlib.Path(rest).exists(): await asyncio.sleep(0.01)
        if kind == "note":
            try:
                pathlib.Path("begun").touch()
                await asyncio.sleep(600)
            except asyncio.CancelledError:
                pathlib.Path(rest).touch()
                raise
        if kind == "stubborn":
            while True:
                try: await asyncio.sleep(600)
                except asyncio.CancelledError: print("not now")
        if kind == "block": time.sleep(600)
        if kind == "kill": os.kill(os.getpid(), signal.SIGKILL)
        if kind == "cancelled": raise asyncio.CancelledError
        if kind == "pid": return Step(done=True, metrics={"pid": os.getpid()})
        return Step([{"role": "user", "content": str(self.turns)}])
'''


@pytest_asyncio.fixture
async def pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[EnvironmentPool]:
    (tmp_path / "meets.py").write_text(ENVIRONMENT)
    monkeypatch.chdir(tmp_path)
    opened = EnvironmentPool("meets:Meets", {}, workers=1, timeout_s=DEADLINE_S)
    yield opened
    await opened.close()


def opened(pool: EnvironmentPool, count: int) -> list[RemoteEnvironment]:
    messages = [{"role": "user", "content": "go"}]
    return [pool.open({"prompt_id": "p/0", "messages": messages, "answer": None, "metadata": {}}) for _ in range(count)]


async def told(environments: list[RemoteEnvironment], *completions: str) -> list[Step | str]:
    """What each is answered, or the reason of its fault."""
    steps = await asyncio.gather(*map(RemoteEnvironment.step, environments, completions), return_exceptions=True)
    for step in steps:
        assert isinstance(step, (Step, EnvironmentFault)), step
    return [step if isinstance(step, Step) else step.reason for step in steps]  # pyright: ignore[reportAttributeAccessIssue]


def turn(number: int) -> Step:
    return Step([{"role": "user", "content": str(number)}])


def hasty(pool: EnvironmentPool) -> None:
    """From here on a call is given up soon."""
    pool.timeout_s = SHORT_S
    for worker in pool._workers:
        worker.silent_s = SHORT_S


async def pid_of(pool: EnvironmentPool) -> int:
    (environment,) = opened(pool, 1)
    pid = int((await environment.step("pid")).metrics["pid"])
    environment.drop()
    return pid


async def test_all_are_under_way_at_once_in_one_process_and_no_thread_waits(pool: EnvironmentPool) -> None:
    threads: set[int] = set()

    async def look() -> None:
        while True:
            threads.add(threading.active_count())
            await asyncio.sleep(0.01)

    looking, before = asyncio.create_task(look()), threading.active_count()
    assert await told(opened(pool, MANY), *[f"meet {MANY}"] * MANY) == [turn(1)] * MANY
    looking.cancel()
    assert max(threads) <= before + 1 and pool._workers[0].num_started == 1  # it reads what the process prints


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "reason"),
    [("note noted", "timeout"), ("stubborn", "timeout"), ("cancelled", "error"), ("block", "timeout")],
)
async def test_a_call_that_takes_too_long_or_fails_ends_its_own_rollout_only(
    pool: EnvironmentPool, kind: str, reason: str
) -> None:
    environments, pid = opened(pool, 6), await pid_of(pool)
    hasty(pool)
    await told(environments, *"abcdef")
    answers = await told(environments, "x", "x", "x", kind, "x", "x")
    assert answers == [turn(2), turn(2), turn(2), f"environment_{reason}", turn(2), turn(2)]
    assert Path("noted").exists() == (kind == "note noted"), "it was cancelled"
    assert (await pid_of(pool) == pid) == (kind != "block"), "the process stays, unless it answers nothing"


@pytest.mark.slow
async def test_a_process_that_is_killed_with_many_under_way_is_made_again_once(pool: EnvironmentPool) -> None:
    (process,) = pool._workers
    environments, pid = opened(pool, MANY), await pid_of(pool)
    assert await told(environments, *["a"] * MANY) == [turn(1)] * MANY
    holding = asyncio.create_task(told(environments, *["hold file"] * MANY))
    await until_async(lambda: len(process._in_flight) == MANY)
    os.kill(pid, signal.SIGKILL)
    await until_async(lambda: process.num_started == 2)
    Path("file").touch()
    assert await holding == [turn(2)] * MANY, "they were told again what they had been told"
    assert process.num_started == 2


@pytest.mark.slow
async def test_what_kills_a_process_is_known_and_no_other_pays(pool: EnvironmentPool) -> None:
    environments, (process,) = opened(pool, 40), pool._workers
    await told(environments, *["a"] * 40)
    completions = ["kill" if index in (7, 30) else "b" for index in range(40)]
    answers = await told(environments, *completions)
    assert answers == ["environment_crash" if completion == "kill" else turn(2) for completion in completions]
    assert process.num_started < 1 + 2 * 12, "it is found by halves"
    assert await told(opened(pool, 40), *["a"] * 40) == [turn(1)] * 40


@pytest.mark.slow
async def test_calls_that_all_kill_are_each_found(pool: EnvironmentPool) -> None:
    assert await told(opened(pool, 8), *["kill"] * 8) == ["environment_crash"] * 8


async def test_a_rollout_that_waits_no_more_has_its_call_cancelled(pool: EnvironmentPool) -> None:
    environment, other = opened(pool, 2)
    await told([environment, other], "a", "a")
    stepping = asyncio.create_task(environment.step("note noted"))
    await until_async(Path("begun").exists)
    stepping.cancel()
    await asyncio.wait({stepping})
    environment.drop()
    assert await told([other], "b") == [turn(2)] and pool._workers[0].num_started == 1
    await until_async(Path("noted").exists)


@pytest.mark.slow
async def test_a_process_ends_when_its_owner_is_gone(pool: EnvironmentPool) -> None:
    """Though a call of it never ends: the owner's end of the pipe is closed as the kernel does it
    for a process that was killed."""
    environments, pid, (process,) = opened(pool, 2), await pid_of(pool), pool._workers
    hasty(pool)  # it has twice that
    steps = [
        asyncio.create_task(each.step(kind)) for each, kind in zip(environments, ("hold x", "stubborn"), strict=True)
    ]
    await until_async(lambda: len(process._in_flight) == 2)
    assert process._process is not None
    process._process._writing.close()
    await until_async(lambda: not psutil.pid_exists(pid))
    for step in steps:
        step.cancel()
    await asyncio.gather(*steps, return_exceptions=True)


async def test_all_steps_of_a_rollout_together_have_a_limit_of_their_own(pool: EnvironmentPool) -> None:
    pool.total_s = DEADLINE_S
    slow, quick = opened(pool, 2)
    assert await told([slow], "hold meets.py") == [turn(1)]
    slow._took_s = DEADLINE_S - 0.1  # as after a step that took so long
    assert await told([slow, quick], "note noted", "a") == ["environment_total_timeout", turn(1)]
    assert Path("noted").exists() and 0 < quick._took_s < DEADLINE_S and pool._workers[0].num_started == 1


async def test_an_environment_is_closed_when_its_rollout_is_over(pool: EnvironmentPool) -> None:
    one, other, unused = opened(pool, 3)
    await told([one, other], "a", "a")
    await one.step("b")
    for environment in (one, one, other, unused):
        environment.drop()
    await until_async(lambda: Path("closed").exists() and len(Path("closed").read_text().split()) == 2)
    assert Path("closed").read_text() == "2 1 "
    assert await told(opened(pool, 1), "a") == [turn(1)] and pool._workers[0].num_started == 1
