"""An agent's rollout in front of a pool that says what it is given to say, with the
tokenizer of the preset `agent`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from examples.calculator_data import problems
from rlpipe.data.chat import ChatTokenizer
from rlpipe.data.new_tokenizer import build_tokenizer
from rlpipe.engines.client import Completion, Sampling, logprobs_of, tokens_of
from rlpipe.engines.pool import GroupRequest
from rlpipe.extras.agents.endpoint import AgentEndpoint, Door
from rlpipe.extras.agents.rollout import AgentRollout, CallKey, Replies, Terms

TOOL: Any = {"type": "function", "function": {"name": "calculator", "parameters": {"type": "object", "properties": {}}}}
CALL = '<tool_call>{"name": "calculator", "arguments": {"expression": "3*4"}}</tool_call>'
ANSWER = "<answer>12</answer>"


def tokenizer_in(folder: Path) -> ChatTokenizer:
    build_tokenizer([problem["prompt"] for problem in problems(0, 100)], folder)
    return ChatTokenizer.from_folder(folder)


@dataclass
class SpokenPool:
    """Says one text after the other, each with its end, cut to the tokens that are allowed;
    remembers what was asked."""

    tokenizer: ChatTokenizer
    texts: list[str] = field(default_factory=list)
    groups: list[GroupRequest] = field(default_factory=list)

    async def generate(self, groups: list[GroupRequest], enough: asyncio.Event) -> list[list[Completion]]:
        [group] = groups
        self.groups.append(group)
        return [[self._say(group, index) for index in range(len(group.params))]]

    def _say(self, group: GroupRequest, index: int) -> Completion:
        prior = group.prior[index]
        text = f"{self.texts.pop(0)}<|end|>"
        tokens = self.tokenizer._encoder.encode(text)[: group.params[index].max_new_tokens - len(prior.tokens)]
        assert tokens, "nothing over the limit is sent"
        reason = "stop" if tokens[-1] == self.tokenizer.eos_token_id else "length"
        logprobs = logprobs_of([-0.25 * (place + 1) for place in range(len(tokens))])
        return prior.then(Completion(tokens_of(tokens), logprobs, reason, [(3, len(tokens))], "e"))


def rollout_of(
    pool: SpokenPool,
    kept: Replies | None = None,
    keep: Callable[..., Any] | None = None,
    *,
    tokens: int = 200,
    calls: int = 10,
    context: int = 400,
) -> AgentRollout:
    """A rollout of that pool, with limits: tokens after the prompt,
    calls, tokens with the prompt."""
    terms = Terms("products/0", Sampling(tokens, seed=7), calls, context)

    async def keep_nothing(call: CallKey, completions: list[Completion]) -> None: ...

    return AgentRollout(pool, pool.tokenizer, terms, {} if kept is None else kept, keep or keep_nothing)  # type: ignore[arg-type]


@asynccontextmanager
async def door_of(rollout: AgentRollout) -> AsyncIterator[Door]:
    """The rollout's door at an endpoint of its own."""
    endpoint = AgentEndpoint(rollout.conversation.tokenizer)
    await endpoint.start("127.0.0.1")
    try:
        with endpoint.open(rollout) as door:
            yield door
    finally:
        await endpoint.close()
