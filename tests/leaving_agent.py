"""The example agent, which for some prompts ends while a thread of its own waits for a call: for one of them well, for one with an exit code."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import urllib.error
import urllib.request
from contextlib import suppress
from typing import Any

from examples.calculator_agent import agent

NUM_CHOICES = 128  # with two places of an engine they take seconds, and much longer than SENT_S
SENT_S = 0.3  # an agent does not hear that its call is being sampled
LEAVES = {"5": 0, "3": 3}  # last digit of a prompt's number -> exit code


def ask(messages: list[Any]) -> None:
    """A call that nobody waits for."""
    body = json.dumps({"messages": messages, "n": NUM_CHOICES}).encode()
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
    with suppress(urllib.error.URLError):
        urllib.request.urlopen(urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers))


if __name__ == "__main__":
    prompt = json.load(sys.stdin)
    print(json.dumps(agent(prompt, {})), flush=True)
    code = LEAVES.get(prompt["prompt_id"][-1])
    if code is not None:
        threading.Thread(target=ask, args=[prompt["messages"]], daemon=True).start()
        time.sleep(SENT_S)
        sys.exit(code)
