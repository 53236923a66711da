"""The sampling settings of a request, in the fields of OpenAI's API; what engines cannot do is
refused by name.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from rlpipe.base.seeds import rollout_seed
from rlpipe.chat_api.chat import CHOICES_MAX, TOKENS_MAX, ChatRefused, invalid, whole_number
from rlpipe.engines.client import Sampling
from rlpipe.extras.serve.policy import ServedPolicy
from rlpipe.records.prompt import is_text

STOPS_MAX = 4  # as OpenAI
TEMPERATURE_MAX = 2.0
ABOVE_0 = math.nextafter(0, 1)
UNABLE = "engines sample from the policy's own distribution, and have no such constraint"
# refused unless they are absent, null, empty, 0 or false
REFUSED = (
    "logit_bias", "functions", "function_call", "audio", "prediction", "frequency_penalty", "presence_penalty",
    "suffix", "echo", "min_p", "repetition_penalty",
)  # fmt: skip


@dataclass(frozen=True)
class Settings:
    """How the choices of one prompt are sampled. `tokens_max`: None for all that the context has
    room for.
    """

    params: Sampling
    stops: tuple[str, ...]
    num_choices: int
    tokens_max: int | None

    def of_choice(self, index: int, room: int) -> Sampling:
        """The parameters of one choice of a prompt that leaves `room` for so many tokens."""
        tokens_max = room if self.tokens_max is None else min(room, self.tokens_max)
        return replace(self.params, max_new_tokens=tokens_max, seed=rollout_seed("serve", self.params.seed, index))


def too_long(policy: ServedPolicy) -> ChatRefused:
    """The refusal of a prompt that leaves no token for a reply."""
    tokens_max = policy.config.model.context_tokens_max
    message = f"the prompt leaves no token for a reply: prompt and reply may have {tokens_max} tokens together"
    return ChatRefused(400, message, "context_length_exceeded")


def check_model(body: Any, policy: ServedPolicy) -> None:
    """ChatRefused when a request is for another model than the one that is served. "policy": as
    agents call what they are trained with.
    """
    model, run = body.get("model"), policy.name.rpartition("@")[0]
    if model not in (None, "", "policy", policy.name, run):
        name = f"{model!r:.100}"
        raise ChatRefused(404, f"model: {name} is not served here; this is {policy.name}", "model_not_found", "model")


def read_settings(body: Any, tokens_max: int | None, policy: ServedPolicy) -> Settings:
    """The settings in a body; ChatRefused with the field. `tokens_max`: as in the body."""
    stop = body.get("stop") or ()
    stops = (stop,) if isinstance(stop, str) else stop
    if not isinstance(stops, list | tuple) or len(stops) > STOPS_MAX or not all(is_text(one) and one for one in stops):
        raise invalid("stop", f"must be a text, or a list of at most {STOPS_MAX} texts, none of them empty")
    params = Sampling(
        max_new_tokens=1,  # set for each prompt
        temperature=_number(body, "temperature", 1.0, 0.0, TEMPERATURE_MAX),
        top_p=_number(body, "top_p", 1.0, ABOVE_0, 1.0),
        top_k=-1 if body.get("top_k") in (None, 0, -1) else whole_number("top_k", body["top_k"], TOKENS_MAX - 1),
        seed=_seed(body.get("seed"), policy),
    )
    num_choices = whole_number("n", 1 if body.get("n") is None else body["n"], CHOICES_MAX)
    return Settings(params, tuple(stops), num_choices, tokens_max)


def _seed(seed: Any, policy: ServedPolicy) -> int:
    if seed is None:
        return policy.new_seed()
    if not isinstance(seed, int) or isinstance(seed, bool) or not -(1 << 63) <= seed < 1 << 63:
        raise invalid("seed", "must be a whole number of 64 bits")
    return seed


def _number(body: Any, name: str, default: float, least: float, most: float) -> float:
    value = default if body.get(name) is None else body[name]
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise invalid(name, f"must be a number {'above 0' if least == ABOVE_0 else f'from {least:g}'} to {most:g}")
    return float(value)
