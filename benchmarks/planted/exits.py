"""Agent, environment and reward of benchmarks/faults.py: a policy that says `wait` makes them hang,
which its SFT shows in a share of the conversations; and where the variable AWAY has a number, what
they need is away in that share of the rollouts, whatever the policy says.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import random
import re
import time
from typing import Any
from urllib.parse import urlsplit

from rlpipe.algorithms.answers import last_answer
from rlpipe.extras.environments import calculator
from rlpipe.extras.environments.protocol import Step

HANGS_S = 3600.0
WAIT = "wait"
TOOLS = [{"type": "function", "function": {"name": name}} for name in ("calculator", WAIT)]


def need() -> None:
    """ConnectionError where what is needed is away."""
    if random.random() < float(os.environ.get("AWAY", "0")):
        raise ConnectionError("planted: it is away")


def demonstrations(seed: int, rows_max: int, share: float = 0.2, as_calls: bool = False) -> list[dict[str, Any]]:
    """Those of the calculator, of which a share says `wait` first and is answered as by a tool.
    `as_calls`: tools are called as OpenAI's clients know it.
    """
    draw, rows = random.Random(seed), calculator.demonstrations(seed, rows_max, tool_share=0.5)
    for row in rows:
        if draw.random() < share:
            asked, *_, answer = row["messages"]
            waits = {"role": "assistant", "content": f"<tool>{WAIT}</tool>"}
            row["messages"] = [asked, waits, {"role": "tool", "content": "done"}, answer]
    return [_with_calls(row) for row in rows] if as_calls else rows


def problems(seed: int, rows_max: int) -> list[dict[str, str]]:
    """Prompts of the agent, as the demonstrations `as_calls` have them."""
    return [row | {"prompt": _called(row["prompt"])} for row in calculator.problems(seed, rows_max)]


def _with_calls(row: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [message | {"content": _called(message["content"])} for message in row["messages"]]}


def _called(text: str) -> str:
    def call(match: re.Match[str]) -> str:
        arguments = {} if match[1] == WAIT else {"expression": match[1] or "a*b"}
        name = WAIT if match[1] == WAIT else "calculator"
        return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"

    return re.sub("<tool>(.*?)</tool>", call, text)


class Environment(calculator.Calculator):
    """The calculator, whose tool `wait` never answers."""

    async def step(self, completion: str) -> Step:  # type: ignore[override]
        if f"<tool>{WAIT}</tool>" in completion:
            await asyncio.sleep(HANGS_S)
        step = super().step(completion)
        if step.done:
            need()
        return step


def agent(prompt: Any, client: Any) -> Any:
    """An agent with the calculator, and the tool `wait`, which never answers."""
    messages = prompt["messages"]
    while calls := (message := _reply(client, messages)).get("tool_calls"):
        messages = [*messages, message]
        for call in calls:
            if call["function"]["name"] == WAIT:
                time.sleep(HANGS_S)
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": _value(call["function"])})
    need()
    answer = last_answer(message.get("content") or "")
    return {"reward": float(answer is not None and answer.strip() == prompt["answer"])}


def _reply(client: Any, messages: list[Any]) -> Any:
    place = urlsplit(client["base_url"])
    connection = http.client.HTTPConnection(place.netloc)
    body = json.dumps({"model": "policy", "messages": messages, "tools": TOOLS})
    headers = {"Authorization": f"Bearer {client['api_key']}", "Content-Type": "application/json"}
    connection.request("POST", f"{place.path}/chat/completions", body, headers)
    reply = json.load(connection.getresponse())
    connection.close()
    if "choices" not in reply:
        raise ValueError(reply)
    return reply["choices"][0]["message"]


def _value(function: Any) -> str:
    try:
        return str(calculator.calculate(str(json.loads(function["arguments"]).get("expression"))))
    except ValueError:
        return "error"


def spelled(prompt: dict[str, Any], completion: str) -> float:
    """1 for the right answer; a completion that says `wait` makes it hang."""
    if WAIT in completion:
        time.sleep(HANGS_S)
    need()
    answer = last_answer(completion)
    return float(answer is not None and answer.strip().lower() == prompt["answer"].lower())
