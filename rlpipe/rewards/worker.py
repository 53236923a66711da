"""The process that scores with functions: `python -m rlpipe.rewards.worker`.

First line in: {"rewards": {name: weight}, "args": {name: arguments}}. Then {"items": [{"prompt", "completion", "rollout"}]}, out:
{"scores": [the fields of a Score]}.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict

from rlpipe.child import Answer, describe, serve
from rlpipe.rewards.arguments import wants_rollout
from rlpipe.rewards.registry import Reward, resolve
from rlpipe.rewards.score import InvalidReward, Score, combined, score_of
from rlpipe.types import JsonDict


def load(hello: JsonDict) -> tuple[JsonDict, Answer]:
    """What answers with the scores of rollouts; UserError for a reward that cannot be loaded."""
    rewards = [_scorer(name, resolve(name, hello["args"].get(name, {})), weight) for name, weight in hello["rewards"].items()]
    return {}, lambda request: {"scores": [asdict(combined([score(item) for score in rewards])) for item in request["items"]]}


def _scorer(name: str, reward: Reward, weight: float) -> Callable[[JsonDict], Score]:
    facts = ["rollout"] if wants_rollout(reward) else []

    def score(item: JsonDict) -> Score:
        try:
            value = reward(item["prompt"], item["completion"], **{fact: item[fact] for fact in facts})
            return score_of(name, value, weight)
        except InvalidReward as error:
            return Score(None, {}, "reward_invalid", str(error))
        except Exception as error:  # a user's function may raise anything; the rollout gets a counted reason
            return Score(None, {}, "reward_error", f"reward {name!r} raised {describe(error)}")

    return score


if __name__ == "__main__":
    serve(load)
