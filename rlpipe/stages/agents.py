"""Rollouts of agents with a loop of their own: the agent's requests to the endpoint become the
rollout, and its final answer becomes the outcome.

The tokens of a rollout are those of its last branch: the prompt that it began with, then what was
sampled (mask 1) and what the agent inserted between (mask 0, logprob 0). The other branches are
stored beside the rollouts.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from dataclasses import replace
from functools import partial

import numpy as np

from rlpipe.agents.conversation import Node, masks_of_each_reply_once
from rlpipe.agents.log import CallLog
from rlpipe.agents.pool import AgentFault, AgentOutcome
from rlpipe.agents.rollout import AgentRollout, CallKey, Terms
from rlpipe.base.errors import UserError
from rlpipe.base.references import FileRecord
from rlpipe.config.training import RlConfig
from rlpipe.engines.client import NOTHING_YET, Completion
from rlpipe.engines.pool import GroupRequest
from rlpipe.loop.session import Session
from rlpipe.loop.stage import Attempt, StageKey, all_ended
from rlpipe.records.prompt import Prompt
from rlpipe.records.rollout import BRANCHES_FILE, OUT_OF_TURNS, TRUNCATED, Branch, EnvironmentOutcome
from rlpipe.stages.turns import PlayedCompletion

log = logging.getLogger(__name__)
LIMITS = {OUT_OF_TURNS: "limit_calls", TRUNCATED: "limit_tokens"}  # finish reason -> the metric that counts it


async def act(
    session: Session, requests: list[GroupRequest], prompts: list[Prompt], shard: StageKey | None
) -> list[list[Completion]]:
    """The rollouts (`PlayedCompletion`) of groups, each played by its agent.

    `shard`: the key beside which replies are kept; None for an evaluation, which keeps none.

    UserError when a rollout had a fault and there is no `rl.reward_fallback`.
    """
    calls = None if shard is None else await asyncio.to_thread(CallLog, session.run.store, session.run.folder(*shard))
    started = []
    for group, (request, prompt) in enumerate(zip(requests, prompts, strict=True)):
        for index, params in enumerate(request.params):
            terms = Terms(
                prompt.prompt_id, params, session.config.rl.turns_max, session.config.model.context_tokens_max
            )
            place = group, index
            kept = ({}, _keep_nothing) if calls is None else (calls.replies[place], partial(calls.keep, place))
            started.append(_rollout(session, AgentRollout(session.pool, session.data.tokenizer, terms, *kept), prompt))
    rollouts = await all_ended(started)
    faults = Counter(rollout.outcome.fault for rollout in rollouts if rollout.outcome.fault)
    if faults and session.config.rl.reward_fallback is None:
        raise UserError(
            f"rl.agent={session.config.rl.agent!r}, rl.reward_fallback=none: {faults.total()} of {len(rollouts)}"
            f" rollouts had a fault ({dict(faults)}; the log says which); mend the agent and start again (what was"
            " committed is kept), or start a run or fork with a rl.reward_fallback"
        )
    ended = iter(rollouts)
    return [[next(ended) for _ in request.params] for request in requests]


async def _rollout(session: Session, rollout: AgentRollout, prompt: Prompt) -> PlayedCompletion:
    """One rollout, from the start of its agent to its end."""
    outcome, fault = AgentOutcome(), ""
    try:
        outcome = await session.agents.run(rollout, prompt.for_reward())
        if outcome.reward is None and not rollout.limit and "environment" in session.config.rl.rewards:
            raise AgentFault("agent_invalid", "rl.rewards has 'environment', and it gave no reward")
        if rollout.conversation.last is None and not rollout.limit:
            raise AgentFault("agent_silent", "it ended before a call of it was answered")
    except AgentFault as error:
        if not (rollout.limit and error.reason == "agent_error"):  # a refused call may be why it failed
            fault = error.reason
            log.warning("rl.agent, prompt %s: %s: %s", prompt.prompt_id, fault, error)
    if rollout.failure is not None:
        raise rollout.failure
    return _played(rollout, outcome, fault, prompt)


def _played(rollout: AgentRollout, outcome: AgentOutcome, fault: str, prompt: Prompt) -> PlayedCompletion:
    """The record of a finished rollout: its last branch, or nothing where no call was answered."""
    last = rollout.conversation.last
    branches = sorted(rollout.conversation.branches, key=lambda node: node is not last)
    assert branches[:1] == ([last] if last else []), "nothing goes on from the newest reply"
    reason = "fault" if fault else rollout.finish_reason
    metrics = {**outcome.metrics, "branches": float(len(branches))}
    if not fault and reason in LIMITS:
        metrics[LIMITS[reason]] = 1.0
    num_turns, added = (last.num_turns, last.added) if last else (0, [])
    return PlayedCompletion(
        **vars(replace(last.completion if last else NOTHING_YET, finish_reason=reason)),
        prompt_tokens=last.prompt_tokens if last else prompt.prompt_tokens.tolist(),
        policy_mask=[*last.policy_mask] if last else [],
        outcome=EnvironmentOutcome(outcome.reward or 0.0, num_turns, fault, metrics, added),
        branches=branches,
    )


def write_branches(attempt: Attempt, groups: list[tuple[int, list[Completion]]], rl: RlConfig) -> list[FileRecord]:
    """Writes the branches that are not the rollouts' own as one file; no file where there are none.

    `groups`: (index in the iteration, completions).
    """
    branches = [
        branch
        for group_index, completions in groups
        for rollout_index, completion in enumerate(completions)
        if isinstance(completion, PlayedCompletion)
        for branch in branch_rows(group_index, rollout_index, completion.branches, rl)
    ]
    return [attempt.write(BRANCHES_FILE, branches, Branch)] if branches else []


def branch_rows(group_index: int, rollout_index: int, nodes: list[Node], rl: RlConfig) -> list[Branch]:
    """The rows of a rollout's other branches; its own branch is the first of `nodes`.

    Where all branches are trained, the masks hold each reply once: a reply that the rollout or an
    earlier branch holds has mask 0.
    """
    masks = masks_of_each_reply_once(nodes) if rl.branches == "all" else [node.policy_mask for node in nodes]
    return [
        Branch(
            group_index,
            rollout_index,
            branch_index,
            np.array(node.prompt_tokens, dtype=np.int32),
            np.array(node.completion.tokens, dtype=np.int32),
            np.frombuffer(mask, dtype=np.int8),
            np.array(node.completion.rollout_logprobs, dtype=np.float32),
            node.completion.finish_reason,
        )
        for branch_index, (node, mask) in enumerate(list(zip(nodes, masks, strict=True))[1:])
    ]


async def _keep_nothing(call: CallKey, completions: list[Completion]) -> None:
    """Keeps no replies: an evaluation that is started again samples again."""
