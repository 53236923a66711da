"""An agent that rewrites its history: two of its calls go on from one reply, and the last has
forgotten all before it."""

from __future__ import annotations

import json
import urllib.request
from typing import Any


def agent(prompt: dict[str, Any], client: dict[str, str]) -> dict[str, Any]:
    """Its conversation has three branches, two of which share a reply
    (where that one was not cut off)."""

    def reply_to(messages: list[dict[str, Any]]) -> dict[str, Any]:
        headers = {"Authorization": f"Bearer {client['api_key']}"}
        request = urllib.request.Request(
            client["base_url"] + "/chat/completions",
            json.dumps({"messages": messages, "max_tokens": 40}).encode(),
            headers,
        )
        return json.load(urllib.request.urlopen(request))["choices"][0]["message"]

    first = reply_to(prompt["messages"])
    said = [*prompt["messages"], first]
    lengths = [
        len(reply_to([*said, {"role": "user", "content": way}])["content"]) for way in ("and 2 * 3?", "and 4 * 5?")
    ]
    last = reply_to([{"role": "user", "content": f"{sum(lengths)} * 2?"}])
    return {"reward": float((sum(lengths) + len(last["content"])) % 3)}
