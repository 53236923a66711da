"""The reward `remote`: a service of your own that answers a rollout with {"reward": number}."""

from __future__ import annotations

from typing import Any

from rlpipe.rewards.http import Concurrency, Endpoint, HttpScorer, checked_url, key_of
from rlpipe.rewards.score import InvalidReward
from rlpipe.types import JsonDict


def remote(weight: float, timeout_s: float, /, *, url: str, key_env: str = "", concurrency: Concurrency = 16) -> HttpScorer:
    """POSTs {"prompt", "completion", "rollout"} to `url`; the answer is {"reward": number, or several by name}.

    `url` may be `$NAME`, and `key_env` names, the environment variable that holds it. ValueError when one is not set.
    """
    return HttpScorer(
        Endpoint("remote", checked_url(url), url, key_of(key_env), concurrency, _question, _reading), weight, timeout_s
    )


def _question(item: JsonDict) -> JsonDict:
    return item


def _reading(answer: Any) -> Any:
    if not isinstance(answer, dict) or "reward" not in answer:
        raise InvalidReward(f"it answered {str(answer)[:200]!r}, not {{'reward': number}}")
    return answer["reward"]
