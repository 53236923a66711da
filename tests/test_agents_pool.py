"""The processes of agents: whatever one does, its rollout ends with a reason, the others go on, and nothing hangs or is left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio

from rlpipe.agents.pool import AgentFault, AgentOutcome, Agents, check_agent
from rlpipe.config.training import RlConfig
from rlpipe.data.chat import ChatTokenizer
from rlpipe.records.prompt import RewardPrompt
from rlpipe.types import EngineError, UserError
from tests.agent_world import SpokenPool, rollout_of, tokenizer_in

# no openai here: it takes a second to import
AGENT = '''
import json, os, pathlib, signal, subprocess, sys, time, urllib.request

def ask(text, base_url=None, api_key=None):
    """What the model says to a text."""
    url = (base_url or os.environ["OPENAI_BASE_URL"]) + "/chat/completions"
    headers = {"Authorization": "Bearer " + (api_key or os.environ["OPENAI_API_KEY"])}
    body = json.dumps({"messages": [{"role": "user", "content": text}]}).encode()
    return json.load(urllib.request.urlopen(urllib.request.Request(url, body, headers)))["choices"][0]["message"]["content"]

def behave(what):
    if what == "raise": raise KeyError("gone")
    if what == "exit": sys.exit(3)
    if what == "sleep": time.sleep(600)
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
    outcome = behave(prompt["answer"])
    if outcome is not None:
        print(json.dumps(outcome))
'''
SLEPT_S, DEADLINE_S = 10.0, 100.0  # what an agent gets that sleeps, and any other
COMMAND, FUNCTION = "python an_agent.py", "an_agent:agent"
BAD = {"raise": "agent_error", "exit": "agent_error", "sleep": "agent_timeout", "kill": "agent_crash", "nan": "agent_invalid",
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


async def test_what_an_agent_says_at_its_end_is_its_outcome(agents: Agents, tokenizer: ChatTokenizer) -> None:
    pool = SpokenPool(tokenizer, ["one", "two", "three"])
    calls = [agents.run(rollout_of(pool), prompt_of(what)) for what in ("well", "well", "none")]
    assert await asyncio.gather(*calls) == [AgentOutcome(0.5, {"length": 2.0})] * 2 + [AgentOutcome()]
    asked = [tokenizer.decode(group.prompt_tokens) for group in pool.groups]
    assert sorted(asked) == [f"<|user|>{what}<|assistant|>" for what in ("x/none", "x/well", "x/well")]


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


async def test_a_timeout_and_a_close_leave_no_process(agents: Agents, tokenizer: ChatTokenizer, folder: Path) -> None:
    with pytest.raises(AgentFault):
        await agents.run(rollout_of(SpokenPool(tokenizer, ["one"])), prompt_of("child"))
    running = asyncio.create_task(agents.run(rollout_of(SpokenPool(tokenizer, ["one"])), prompt_of("sleep")))
    await asyncio.sleep(0.5)
    await agents.close()
    with pytest.raises(EngineError):
        await running
    child = int((folder / "child.pid").read_text())
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE


def test_an_agent_ends_with_its_owner(folder: Path) -> None:
    """Its worker and the command that it runs, when the owner is killed."""
    owner = psutil.Popen(
        ["python", "-c", OWNER], cwd=folder, env={**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
    )
    pid = folder / "child.pid"
    deadline = time.monotonic() + 60
    while not (pid.exists() and pid.read_text()):
        assert owner.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    owned = owner.children(recursive=True)
    assert len(owned) >= 2
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    assert psutil.wait_procs(owned, timeout=30)[1] == []


OWNER = """
from rlpipe.processes.pool import ChildPool
children = ChildPool("x", "rlpipe.agents.worker", {"agent": "sh -c 'sleep 600 & echo $! > child.pid; wait'"})
child = children.children[0]
child.start()
child.ask({"prompt": {}, "base_url": "x", "api_key": "x"}, 100.0)
"""


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
