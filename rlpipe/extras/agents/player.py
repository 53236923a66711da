"""The player of agents with a loop of their own (`rl.agent`): the agent's requests to the endpoint
become the rollout, and its final answer becomes the outcome.

The tokens of a rollout are those of its last branch: the prompt that it began with, then what was
sampled (mask 1) and what the agent inserted between (mask 0, logprob 0). The other branches are
stored beside the rollouts.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from rlpipe.config.training import RlConfig
from rlpipe.engines.client import NOTHING_YET, Completion
from rlpipe.engines.pool import GroupRequest
from rlpipe.extras.agents.conversation import Node, masks_of_each_reply_once
from rlpipe.extras.agents.log import CallLog
from rlpipe.extras.agents.pool import AgentFault, AgentOutcome, Agents, check_agent
from rlpipe.extras.agents.rollout import AgentRollout, CallKey, Terms
from rlpipe.loop.player import Hooks, PlayedRollout, Player, PlayerKind, PlayerParts, check_faults
from rlpipe.loop.stage import all_ended
from rlpipe.records.prompt import Prompt
from rlpipe.records.rollout import OUT_OF_TURNS, TRUNCATED, Branch, EnvironmentOutcome, PromptGroup

log = logging.getLogger(__name__)
LIMITS = {OUT_OF_TURNS: "limit_calls", TRUNCATED: "limit_tokens"}  # finish reason -> the metric that counts it


@dataclass(frozen=True)
class AgentPlayer(Player):
    """Has each rollout played by its agent."""

    parts: PlayerParts
    agents: Agents

    async def play(
        self, requests: list[GroupRequest], groups: list[PromptGroup], hooks: Hooks
    ) -> list[list[PlayedRollout]]:
        """As `Player.play`; without `hooks.replies` no replies are kept, as for an evaluation."""
        parts, rl = self.parts, self.parts.rl
        calls = await asyncio.to_thread(CallLog, parts.store, hooks.replies) if hooks.replies else None
        started = []
        for place, request in enumerate(requests):
            group = groups[place]
            for index, params in enumerate(request.params):
                at = place, index
                terms = Terms(group.prompt.prompt_id, params, rl.turns_max, parts.config.model.context_tokens_max)
                kept = ({}, _keep_nothing) if calls is None else (calls.replies[at], partial(calls.keep, at))
                rollout = AgentRollout(parts.pool, parts.tokenizer, terms, *kept)
                started.append(self._played(rollout, group.prompt, (group.group_index, index)))
        ended = iter(await all_ended(started))
        played = [[next(ended) for _ in request.params] for request in requests]
        check_faults(rl, played)
        return played

    async def _played(self, rollout: AgentRollout, prompt: Prompt, place: tuple[int, int]) -> PlayedRollout:
        """One rollout, from the start of its agent to its end. `place`: the index of its group, and
        its own in the group.
        """
        outcome, fault, num_lost = AgentOutcome(), "", self.parts.pool.num_lost
        try:
            outcome = await self.agents.run(rollout, prompt.for_reward())
            if outcome.reward is None and not rollout.limit and "environment" in self.parts.rl.rewards:
                raise AgentFault("agent_invalid", "rl.rewards has 'environment', and it gave no reward")
            if rollout.conversation.last is None and not rollout.limit:
                raise AgentFault("agent_error", "it ended before a call of it was answered")
        except AgentFault as error:
            if not (rollout.limit and error.reason == "agent_error"):  # a refused call may be why it failed
                fault = _reason_of(error, rollout, self.parts.pool.num_lost > num_lost)
                log.warning("rl.agent, prompt %s: %s: %s", prompt.prompt_id, fault, error)
        if rollout.failure is not None:
            raise rollout.failure
        return played_by(rollout, outcome, fault, prompt, place, self.parts.rl)

    async def close(self) -> None:
        await self.agents.close()


def _reason_of(fault: AgentFault, rollout: AgentRollout, engine_was_lost: bool) -> str:
    """The reason of a fault: agent_silent where the policy was asked nothing, and agent_unavailable
    where it ran out of time while an engine was lost.
    """
    if not rollout.was_asked and not rollout.limit:
        return "agent_silent"
    return "agent_unavailable" if fault.reason == "agent_timeout" and engine_was_lost else fault.reason


def played_by(
    rollout: AgentRollout, outcome: AgentOutcome, fault: str, prompt: Prompt, place: tuple[int, int], rl: RlConfig
) -> PlayedRollout:
    """The record of a finished rollout: its last branch, or nothing where no call was answered.
    `place`: the index of its group, and its own in the group.
    """
    last = rollout.conversation.last
    nodes = sorted(rollout.conversation.branches, key=lambda node: node is not last)
    assert nodes[:1] == ([last] if last else []), "nothing goes on from the newest reply"
    reason = "fault" if fault else rollout.finish_reason
    metrics = {**outcome.metrics, "branches": float(len(nodes))}
    if not fault and reason in LIMITS:
        metrics[LIMITS[reason]] = 1.0
    num_turns, added = (last.num_turns, last.added) if last else (0, [])
    return PlayedRollout(
        last.prompt_tokens if last else prompt.prompt_tokens.tolist(),
        replace(last.completion if last else NOTHING_YET, finish_reason=reason),
        last.policy_mask if last else b"",
        EnvironmentOutcome(outcome.reward or 0.0, num_turns, fault, metrics, added),
        branch_rows(*place, nodes, rl),
    )


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


class AgentKind(PlayerKind):
    """Agents: commands and functions of users."""

    def player(self, parts: PlayerParts) -> AgentPlayer:
        return AgentPlayer(parts, Agents(parts.rl, parts.tokenizer))

    def check(self, rl: RlConfig) -> list[str]:
        check_agent(rl)
        return []


AGENT = AgentKind()
