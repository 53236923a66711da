"""The processes of agents: whatever one does, its rollout ends with a reason, the others go on, and
nothing hangs or is left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio

from rlpipe.base.errors import EngineError, UserError
from rlpipe.config.training import RlConfig
from rlpipe.data.chat import ChatTokenizer
from rlpipe.extras.agents.pool import AgentFault, AgentOutcome, Agents, check_agent
from rlpipe.processes.kernel import LANDLOCK_SIGNALS, landlock_version
from rlpipe.records.prompt import RewardPrompt
from tests.agent_world import SpokenPool, rollout_of, tokenizer_in
from tests.deadlines import DEADLINE_S, SHORT_S, until, until_async
from tests.living import is_alive, until_all_gone
from tests.paths import ROOT

# no openai here: it takes a second to import
AGENT = '''
import contextlib, json, os, pathlib, signal, subprocess, sys, time, urllib.error, urllib.request

def ask(text, base_url=None, api_key=None):
    """What the model says to a text."""
    url = (base_url or os.environ["OPENAI_BASE_URL"]) + "/chat/completions"
    headers = {"Authorization": "Bearer " + (api_key or os.environ["OPENAI_API_KEY"])}
    body = json.dumps({"messages": [{"role": "user", "content": text}]}).encode()
    return json.load(urllib.request.urlopen(urllib.request.Request(url, body, headers)))["choices"][0]["message"]["content"]

def behave(what):
    if what == "raise": raise KeyError("gone")
    if what == "exit": sys.exit(3)
    if what == "away": raise ConnectionRefusedError("the search is down")
    if what == "sleep": pathlib.Path("asleep").touch(); time.sleep(600)
    while what == "refused":
        with contextlib.suppress(urllib.error.HTTPError):
            ask("1" * 2000)
    if what == "kill": os.kill(os.getpid(), signal.SIGKILL)
    if what == "child": pathlib.Path("child.pid").write_text(str(subprocess.Popen(["sleep", "600"]).pid)); time.sleep(600)
    if what == "once" and not pathlib.Path("once").exists():
        pathlib.Path("once").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return {"nan": {"reward": float("nan")}, "text": {"reward": "1"}, "metric": {"metrics": {"a/b": 1}}, "none": None}.get(
        what, {"reward": 0.5, "metrics": {"length": 2}})

async def agent(prompt, client):
    ask(prompt["prompt_id"], **client)
    return behave(prompt["answer"])

if __name__ == "__main__":
    prompt = json.load(sys.stdin)
    print("said", ask(prompt["prompt_id"]))
    try:
        outcome = behave(prompt["answer"])
    except ConnectionError:
        sys.exit(os.EX_TEMPFAIL)
    if outcome is not None:
        print(json.dumps(outcome))
'''  # noqa: E501
SLEPT_S = 3 * SHORT_S  # what an agent gets that sleeps: an interpreter starts in it
COMMAND, FUNCTION = "python an_agent.py", "an_agent:agent"
BAD = {"raise": "agent_error", "exit": "agent_error", "sleep": "agent_timeout",
       "away": "agent_unavailable", "kill": "agent_crash", "nan": "agent_invalid",
       "text": "agent_invalid", "metric": "agent_invalid"}  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    return tokenizer_in(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "an_agent.py").write_text(AGENT)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest_asyncio.fixture(params=[COMMAND, FUNCTION])
async def agents(request: Any, folder: Path, tokenizer: ChatTokenizer) -> AsyncIterator[Agents]:
    timeout_s = SLEPT_S if "timeout" in request.node.name else DEADLINE_S
    made = Agents(RlConfig(agent=request.param, agents_max=2, agent_timeout_s=timeout_s), tokenizer)
    yield made
    await made.close()


def prompt_of(what: str) -> RewardPrompt:
    return {"prompt_id": f"x/{what}", "messages": [{"role": "user", "content": what}], "answer": what, "metadata": {}}


@pytest.mark.slow
async def test_what_an_agent_says_at_its_end_is_its_outcome(agents: Agents, tokenizer: ChatTokenizer) -> None:
    pool = SpokenPool(tokenizer, ["one", "two", "three"])
    calls = [agents.run(rollout_of(pool), prompt_of(what)) for what in ("well", "well", "none")]
    assert await asyncio.gather(*calls) == [AgentOutcome(0.5, {"length": 2.0})] * 2 + [AgentOutcome()]
    asked = [tokenizer.decode(group.prompt_tokens) for group in pool.groups]
    assert sorted(asked) == [f"<|user|>{what}<|assistant|>" for what in ("x/none", "x/well", "x/well")]


@pytest.mark.slow
@pytest.mark.parametrize(("what", "reason"), BAD.items())
async def test_a_fault_is_a_reason(what: str, reason: str, agents: Agents, tokenizer: ChatTokenizer) -> None:
    pool = SpokenPool(tokenizer, ["one", "two"])
    rollout = rollout_of(pool)
    with pytest.raises(AgentFault) as fault:
        await agents.run(rollout, prompt_of(what))
    assert fault.value.reason == reason
    # the second try of one that was killed is answered with what the first one got
    assert len(pool.groups) == 1 and len(rollout.conversation.nodes) == 1
    pool.texts = ["again"]
    assert await agents.run(rollout_of(pool), prompt_of("well")) == AgentOutcome(0.5, {"length": 2.0})


async def test_one_that_was_killed_is_run_again_with_the_same_replies(agents: Agents, tokenizer: ChatTokenizer) -> None:
    pool = SpokenPool(tokenizer, ["one"])
    rollout = rollout_of(pool)
    assert await agents.run(rollout, prompt_of("once")) == AgentOutcome(0.5, {"length": 2.0})
    assert len(pool.groups) == len(rollout.conversation.nodes) == 1


@pytest.mark.slow
async def test_one_that_is_refused_for_ever_ends_by_its_timeout(agents: Agents, tokenizer: ChatTokenizer) -> None:
    """A refused call counts for nothing, so no other limit ends it."""
    rollout = rollout_of(SpokenPool(tokenizer, ["one"]), calls=2)
    with pytest.raises(AgentFault) as fault:
        await agents.run(rollout, prompt_of("refused"))
    assert fault.value.reason == "agent_timeout" and rollout.limit == "length" and rollout._num_refused > 2
    assert len(rollout.conversation.nodes) == 1


@pytest.mark.slow
async def test_a_timeout_and_a_close_leave_no_process(agents: Agents, tokenizer: ChatTokenizer, folder: Path) -> None:
    with pytest.raises(AgentFault):
        await agents.run(rollout_of(SpokenPool(tokenizer, ["one"])), prompt_of("child"))
    running = asyncio.create_task(agents.run(rollout_of(SpokenPool(tokenizer, ["one"])), prompt_of("sleep")))
    await until_async((folder / "asleep").exists)
    await agents.close()
    with pytest.raises(EngineError):
        await running
    child = int((folder / "child.pid").read_text())
    assert not is_alive(child)


def test_an_agent_ends_with_its_owner(folder: Path) -> None:
    """Its worker and the command that it runs, when the owner is killed."""
    owner = psutil.Popen(["python", "-c", OWNER], cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT)})
    pid = folder / "child.pid"
    until(lambda: pid.exists() and pid.read_text(), running=owner)
    owned = owner.children(recursive=True)
    assert len(owned) >= 2
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    until_all_gone(owned)


LEAVES = '''
import json, os, subprocess, sys, time
def left(*words, **more):
    """A child in a session of its own, whose parent has ended: as a daemon is."""
    subprocess.run(["sh", "-c", 'setsid "$@" & echo $! >> left.pid', "sh", *words], **more)
left("sh", "-c", "trap '' TERM; while true; do sleep 600; done")
left("sleep", "600", stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
what = json.load(sys.stdin)["answer"]
if what == "hang": time.sleep(600)
line = b"x" * (1 << 20)
for _ in range(int(what)):
    os.write(2, line)
    os.write(1, line)
try:
    os.kill(os.getppid(), 9)
except PermissionError:
    print()
print(json.dumps({"reward": 0.25}))
'''


def left_alive(folder: Path) -> list[int]:
    pids = [int(line) for line in (folder / "left.pid").read_text().split()]
    assert len(pids) >= 2
    return [pid for pid in pids if is_alive(pid)]


@pytest.mark.skipif(landlock_version() < LANDLOCK_SIGNALS, reason="it would kill its worker")
async def test_a_command_ends_when_it_ends_and_what_it_leaves_and_prints_costs_nothing(
    folder: Path, tokenizer: ChatTokenizer
) -> None:
    """Daemons that hold its pipes made each rollout an agent_timeout, and lived on; what it printed
    was all kept in memory."""
    (folder / "leaves.py").write_text(LEAVES)
    agents = Agents(RlConfig(agent="python leaves.py", agents_max=1, agent_timeout_s=DEADLINE_S), tokenizer)
    try:
        for num_mb in ("0", "100"):
            assert await agents.run(rollout_of(SpokenPool(tokenizer)), prompt_of(num_mb)) == AgentOutcome(0.25)
            assert left_alive(folder) == []
        [process] = [worker._process for worker in agents._workers]
        assert process and psutil.Process(process.keeper.pid).children()[0].memory_info().rss < 150 << 20
        hanging = asyncio.create_task(agents.run(rollout_of(SpokenPool(tokenizer)), prompt_of("hang")))
        num_left = len((folder / "left.pid").read_text().split())
        await until_async(lambda: len((folder / "left.pid").read_text().split()) == num_left + 2)
        assert len(left_alive(folder)) == 2
    finally:
        await agents.close()
    with pytest.raises(EngineError):
        await hanging
    assert left_alive(folder) == []


def test_daemons_of_an_agent_end_when_the_run_is_killed(folder: Path) -> None:
    (folder / "leaves.py").write_text(LEAVES)
    script = OWNER.replace("sh -c 'sleep 600 & echo $! > child.pid; wait'", "python leaves.py").replace(
        '"prompt": {}', '"prompt": {"answer": "hang"}'
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, "-c", script], cwd=folder, env=environment) as owner:
        left = folder / "left.pid"
        until(lambda: left.exists() and len(left.read_text().split()) == 2, running=owner)
        assert len(left_alive(folder)) == 2
        owner.kill()
    until(lambda: left_alive(folder) == [], lambda: left_alive(folder))


OWNER = """
from rlpipe.processes.pool import WorkerPool
pool = WorkerPool("x", "rlpipe.extras.agents.worker", {"agent": "sh -c 'sleep 600 & echo $! > child.pid; wait'"})
pool.ask({"prompt": {}, "base_url": "x", "api_key": "x"}, 100.0)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("agent", "said"),
    [
        ("no-such-program --x", "no-such-program"),
        ("nowhere:agent", "nowhere"),
        ("an_agent:none", "an_agent"),
        ("  ", "rl.agent"),
    ],
)
def test_what_cannot_be_loaded_is_said_before_a_run(agent: str, said: str, folder: Path) -> None:
    with pytest.raises(UserError, match=said):
        check_agent(RlConfig(agent=agent))
    check_agent(RlConfig(agent=COMMAND))
    check_agent(RlConfig(agent=FUNCTION))
