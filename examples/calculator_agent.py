"""An agent with a loop of its own: it asks a model for products of two
numbers, and gives it a calculator.

It knows nothing of rlpipe. As a command, the prompt comes as JSON on stdin, the address and the key
of the model from OPENAI_BASE_URL and OPENAI_API_KEY, as with any other server, and the reward goes
as JSON to the last line of stdout. `agent` is the same as a function.
"""

from __future__ import annotations

import json
import math
import re
import sys
from typing import Any

from openai import OpenAI

CALCULATOR: Any = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "The product of whole numbers, for example 37*4",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
    },
}


def calculate(arguments: str) -> str:
    """What the tool says to arguments as JSON."""
    expression = str(json.loads(arguments).get("expression"))
    if re.fullmatch(r"\d{1,9}(\*\d{1,9}){0,9}", expression) is None:
        return "error"
    return str(math.prod(map(int, expression.split("*"))))


def solve(client: OpenAI, messages: list[Any]) -> tuple[str, int]:
    """What the model says at last, and how often it used the calculator."""
    num_calls = 0
    while True:
        completion = client.chat.completions.create(model="policy", messages=messages, tools=[CALCULATOR])
        message = completion.choices[0].message
        messages = [*messages, message]
        if not message.tool_calls:
            return message.content or "", num_calls
        for call in message.tool_calls:
            num_calls += 1
            result = calculate(call.function.arguments) if call.type == "function" else "error"
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


def agent(prompt: Any, client: Any) -> Any:
    """The outcome of one prompt. `client`: what OpenAI's client is made with."""
    text, num_calls = solve(OpenAI(**client), prompt["messages"])
    answer = re.search(r"<answer>(.*?)</answer>", text)
    is_right = answer is not None and answer[1].strip() == prompt["answer"]
    return {"reward": float(is_right), "metrics": {"tool_used": float(num_calls > 0)}}


if __name__ == "__main__":
    print(json.dumps(agent(json.load(sys.stdin), {})))
