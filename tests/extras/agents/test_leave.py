"""Agents, as processes, that end while calls of their own are in flight, in every way: engines may
sleep once the rollout has ended."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from rlpipe.config.training import RlConfig
from rlpipe.data.chat import ChatTokenizer
from rlpipe.extras.agents.pool import AgentFault, AgentOutcome, Agents
from rlpipe.records.prompt import RewardPrompt
from tests.agents_in_flight import FOR_EVER, check_idle, keep_nothing, reached, rollout_in_flight
from tests.agents_in_flight import engine as engine
from tests.agents_in_flight import tokenizer as tokenizer
from tests.deadlines import DEADLINE_S
from tests.slow_engine import SlowEngine, slow_pool

TIMEOUT_S = 10.0  # short: of an agent whose timeout is tested


AGENT = '''
import json, os, pathlib, signal, sys, threading, time, urllib.request

def ask(url, key, text):
    body = json.dumps({"messages": [{"role": "user", "content": text}], "n": 2}).encode()
    request = urllib.request.Request(url + "/chat/completions", body, {"Authorization": "Bearer " + key})
    try:
        urllib.request.urlopen(request).read()
    except OSError:
        pass

def agent(prompt, client):
    """Ends, in the way that the prompt says, while a thread of its own waits for a call; or waits for it itself."""
    call, what = (client["base_url"], client["api_key"], "tell me"), prompt["answer"]
    if what == "timeout":
        ask(*call)
    threading.Thread(target=ask, args=call, daemon=True).start()
    while not pathlib.Path("sampling").exists():
        time.sleep(0.01)
    if what == "raise":
        raise KeyError("gone")
    if what == "kill":
        pathlib.Path("sampling").unlink()
        os.kill(os.getpid(), signal.SIGKILL)
    return {"reward": 0.5}

if __name__ == "__main__":
    client = {"base_url": os.environ["OPENAI_BASE_URL"], "api_key": os.environ["OPENAI_API_KEY"]}
    print(json.dumps(agent(json.load(sys.stdin), client)))
'''


@pytest.mark.slow
@pytest.mark.parametrize("agent", ["python lasting.py", "lasting:agent"])
@pytest.mark.parametrize(
    ("what", "fault", "num_tries"),
    [("well", "", 1), ("raise", "agent_error", 1), ("timeout", "agent_timeout", 1), ("kill", "agent_crash", 2)]
)  # fmt: skip
async def test_whatever_ends_an_agent_engines_may_sleep_once_its_rollout_has_ended(
    agent: str,
    what: str,
    fault: str,
    num_tries: int,
    engine: SlowEngine,
    tokenizer: ChatTokenizer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "lasting.py").write_text(AGENT)
    monkeypatch.chdir(tmp_path)
    prompt: RewardPrompt = {"prompt_id": "x/0", "messages": [], "answer": what, "metadata": {}}
    timeout_s = TIMEOUT_S if what == "timeout" else DEADLINE_S
    agents = Agents(RlConfig(agent=agent, agents_max=1, agent_timeout_s=timeout_s), tokenizer)
    async with slow_pool(engine, progress_timeout_s=DEADLINE_S) as pool:
        rollout = rollout_in_flight(pool, tokenizer, {}, keep_nothing, FOR_EVER)
        running = asyncio.create_task(agents.run(rollout, prompt))
        for number in range(num_tries):
            await reached(engine, 2 * (number + 1))
            (tmp_path / "sampling").touch()
        if fault:
            with pytest.raises(AgentFault) as raised:
                await running
            assert raised.value.reason == fault
        else:
            assert await running == AgentOutcome(0.5)
        await check_idle(engine, pool, 2 * num_tries)
    await agents.close()
    assert not rollout.conversation.nodes and rollout.failure is None


async def test_a_rollout_that_is_cancelled_leaves_nothing_on_an_engine(
    engine: SlowEngine, tokenizer: ChatTokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when the stage of the agents is cancelled."""
    (tmp_path / "lasting.py").write_text(AGENT)
    monkeypatch.chdir(tmp_path)
    agents = Agents(RlConfig(agent="lasting:agent", agents_max=1, agent_timeout_s=DEADLINE_S), tokenizer)
    async with slow_pool(engine, progress_timeout_s=DEADLINE_S) as pool:
        rollout = rollout_in_flight(pool, tokenizer, {}, keep_nothing, FOR_EVER)
        running = asyncio.create_task(
            agents.run(rollout, {"prompt_id": "x/0", "messages": [], "answer": "well", "metadata": {}})
        )
        await reached(engine, 2)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        await check_idle(engine, pool, 2)
    await agents.close()
