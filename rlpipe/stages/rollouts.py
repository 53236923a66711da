"""The rollouts of a shard, which are made of completions."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import numpy as np

from rlpipe.engines.client import Completion, logprobs_of, tokens_of
from rlpipe.engines.pool import GroupRequest
from rlpipe.loop.sampling_round import SamplingRound
from rlpipe.loop.session import Session
from rlpipe.records.kinds import Span
from rlpipe.records.messages import content_text
from rlpipe.records.prompt import Prompt
from rlpipe.records.rollout import CUT_SHORT, TRUNCATED, CarriedRollout, Group, Rollout
from rlpipe.stages.turns import PlayedCompletion, played_before


@dataclass(frozen=True)
class PromptGroup:
    """One group of a sampling round: its prompt, and the rollouts that an earlier iteration
    began.
    """

    slot: int  # in the round
    group_index: int  # in the iteration
    prompt: Prompt
    carried: list[CarriedRollout]


@dataclass(frozen=True, eq=False)
class ShardGroups:
    """The rollouts of a shard, made from the completions of each group as soon as the group has
    finished.
    """

    session: Session
    sampling_round: SamplingRound
    groups: list[PromptGroup]
    requests: list[GroupRequest]
    version: int
    finished: dict[int, Group] = field(default_factory=dict)

    async def rollouts(self, index: int, completions: list[Completion]) -> Group:
        """The rollouts of one group.

        Made in a thread: to decode millions of tokens would block the event loop, and so other
        requests.
        """
        if index not in self.finished:
            group = self.groups[index], self.requests[index], completions
            self.finished[index] = await asyncio.to_thread(rollouts_of, self.session, *group, self.version)
        return self.finished[index]

    async def score(self, index: int, completions: list[Completion]) -> None:
        """Starts to score a finished group while others are sampled, without waiting: rollouts are
        committed before their rewards.
        """
        self.sampling_round.add(self.groups[index].prompt, await self.rollouts(index, completions))


def rollouts_of(
    session: Session, group: PromptGroup, request: GroupRequest, completions: list[Completion], version: int
) -> Group:
    """The completions of one group as rollouts; `version` is the newest that sampled them."""
    prompt, train_stale_tokens = group.prompt, session.config.rl.train_stale_tokens
    assert len(completions) == len(request.params), f"{prompt.prompt_id}: a completion was lost or came twice"
    for prior, completion in zip(request.prior, completions, strict=True):
        assert completion.tokens[: len(prior.tokens)] == prior.tokens, (
            f"{prompt.prompt_id}: a rollout did not go on as it was"
        )
    rollouts = []
    for index, (params, completion) in enumerate(zip(request.params, completions, strict=True)):
        mask = loss_mask(completion.spans, version, train_stale_tokens)
        prompt_tokens, outcome = prompt.prompt_tokens, None
        if isinstance(completion, PlayedCompletion):
            prompt_tokens = np.array(completion.prompt_tokens, dtype=np.int32)
            mask, outcome = mask * np.array(completion.policy_mask, dtype=np.int8), completion.outcome
        rollouts.append(
            Rollout(
                prompt_id=prompt.prompt_id,
                group_index=group.group_index,
                rollout_index=index,
                prompt=content_text(prompt.messages[-1]),
                prompt_tokens=prompt_tokens,
                completion=session.data.tokenizer.decode(completion.tokens.tolist()),
                completion_tokens=np.array(completion.tokens, dtype=np.int32),
                loss_mask=mask,
                rollout_logprobs=np.array(completion.rollout_logprobs, dtype=np.float32),
                weight_version=completion.spans[-1][0] if completion.spans else version,
                weight_versions=tuple(Span(*span) for span in completion.spans),
                finish_reason=completion.finish_reason,
                seed=params.seed,
                engine=completion.engine,
                environment=outcome,
            )
        )
    return rollouts


def loss_mask(spans: list[tuple[int, int]], version: int, train_stale_tokens: bool) -> np.ndarray:
    """The loss mask of a completion's tokens, int8 [L], where `version` is the one that samples."""
    assert all(sampled_by <= version for sampled_by, _ in spans), f"spans {spans} of a rollout of version {version}"
    trained = [train_stale_tokens or sampled_by == version for sampled_by, _ in spans]
    return np.repeat(np.array(trained, dtype=np.int8), [num_tokens for _, num_tokens in spans])


def prior(session: Session, carried: CarriedRollout) -> Completion:
    """The completion of a partial rollout so far, with the answers of its environment."""
    sampled = prior_of(carried, session.config.rl.completion_tokens_max)
    if carried.environment is None:
        return sampled
    return played_before(session.data.tokenizer, carried.prompt_tokens.tolist(), sampled, carried.environment)


def prior_of(carried: CarriedRollout, tokens_max: int) -> Completion:
    """The completion of a partial rollout so far.

    It is finished when it has all its tokens already (a fork may allow fewer).
    """
    tokens, reason = tokens_of(carried.completion_tokens), carried.finish_reason
    if reason == CUT_SHORT and len(tokens) >= tokens_max:
        reason = TRUNCATED
    spans = [(span.version, span.num_tokens) for span in carried.weight_versions]
    return Completion(tokens, logprobs_of(carried.rollout_logprobs), reason, spans, carried.engine)
