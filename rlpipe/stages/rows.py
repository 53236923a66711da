"""Prompts and rollouts as the rows that are stored."""

from __future__ import annotations

import asyncio
import json

from rlpipe.data.prompt import Message, Prompt
from rlpipe.engines.client import Completion
from rlpipe.engines.pool import GroupRequest
from rlpipe.rollouts import prompt_row
from rlpipe.stages.carrying import loss_mask
from rlpipe.stages.session import Session
from rlpipe.stages.turns import Played, asked_by_environment, policy_only
from rlpipe.types import JsonDict, UserError


def check_lengths(session: Session, use: str) -> None:
    """UserError naming the first prompt that leaves no room for a completion; an environment's are known when they are drawn."""
    if not session.config.rl.environment:
        for prompt in (prompt for rows in session.prompts(use) for prompt in rows):
            _check_room(session, prompt, len(session.tokenizer.encode_prompt(prompt.messages)))


def _check_room(session: Session, prompt: Prompt, num_tokens: int) -> None:
    """UserError for a prompt that no engine would take."""
    room = session.config.model.context_tokens_max - session.config.rl.completion_tokens_max
    if num_tokens > room:
        raise UserError(
            f"data set {prompt.source}: prompt {prompt.prompt_id} has {num_tokens} tokens; model.context_tokens_max less "
            f"rl.completion_tokens_max leaves {room}: start a run without it, or with a larger context"
        )


async def prompt_rows(session: Session, prompts: list[Prompt]) -> list[JsonDict]:
    """Prompts as they are stored, with the tokens of what the policy is asked: where there is an environment, what that asks."""
    asked = [prompt.messages for prompt in prompts]
    if session.config.rl.environment:
        asked = await asked_by_environment(session, [prompt.for_reward() for prompt in prompts])

    def rows() -> list[JsonDict]:
        return [_prompt_row(session, prompt, messages) for prompt, messages in zip(prompts, asked, strict=True)]

    return await asyncio.to_thread(rows)


def _prompt_row(session: Session, prompt: Prompt, asked: list[Message]) -> JsonDict:
    tokens = session.tokenizer.encode_prompt(asked)
    _check_room(session, prompt, len(tokens))
    return prompt_row(prompt, tokens)


def rollout_rows(
    session: Session, row: JsonDict, group_index: int, request: GroupRequest, group: list[Completion], version: int
) -> list[JsonDict]:
    """The rollouts of one prompt as they are stored, but for the reward; `version` is that of the iteration."""
    assert len(group) == len(request.params), f"{row['prompt_id']}: a completion was lost or came twice"
    for prior, completion in zip(request.prior, group, strict=True):
        assert completion.tokens[: len(prior.tokens)] == prior.tokens, f"{row['prompt_id']}: a rollout did not go on as it was"
    train_stale_tokens = session.config.rl.train_stale_tokens
    return [
        {
            "prompt_id": row["prompt_id"],
            "group_index": group_index,
            "rollout_index": index,
            "prompt": json.loads(row["messages"])[-1]["content"],
            "prompt_tokens": row["prompt_tokens"],
            "completion": session.tokenizer.decode(completion.tokens),
            "completion_tokens": completion.tokens,
            "loss_mask": policy_only(completion, loss_mask(completion.spans, version, train_stale_tokens)),
            "rollout_logprobs": completion.rollout_logprobs,
            "weight_version": completion.spans[-1][0] if completion.spans else version,
            "weight_versions": [{"version": span, "num_tokens": count} for span, count in completion.spans],
            "finish_reason": completion.finish_reason,
            "seed": params.seed,
            "engine": completion.engine,
            "environment": json.dumps(completion.record, sort_keys=True) if isinstance(completion, Played) else "",
        }
        for index, (params, completion) in enumerate(zip(request.params, group, strict=True))
    ]
