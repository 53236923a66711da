"""The example agent, which for some prompts ends while a call of its own is in flight.

    python tests/leaving_agent.py [TIMEOUT_S]

For one prompt it ends well, for one with an exit code, or by its timeout where one is given: it
waits for its call then.
"""

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
LAST_S = 3.0  # before its timeout the call is sent


def ask(messages: list[Any]) -> None:
    """A call that nobody waits for."""
    body = json.dumps({"messages": messages, "n": NUM_CHOICES}).encode()
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
    with suppress(urllib.error.URLError):
        urllib.request.urlopen(
            urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
        )


if __name__ == "__main__":
    prompt = json.load(sys.stdin)
    print(json.dumps(agent(prompt, {})), flush=True)
    code = LEAVES.get(prompt["prompt_id"][-1])
    if code and sys.argv[1:]:
        time.sleep(float(sys.argv[1]) - LAST_S)
        ask(prompt["messages"])
    elif code is not None:
        threading.Thread(target=ask, args=[prompt["messages"]], daemon=True).start()
        time.sleep(SENT_S)
        sys.exit(code)
