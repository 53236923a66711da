"""The rollouts of a shard, which are made of the played ones."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import numpy as np

from rlpipe.base.references import FileRecord
from rlpipe.base.values import Metrics
from rlpipe.engines.client import Completion, logprobs_of, tokens_of
from rlpipe.engines.pool import GroupRequest
from rlpipe.loop.player import PlayedRollout
from rlpipe.loop.sampling_round import SamplingRound
from rlpipe.loop.session import Session
from rlpipe.loop.stage import Attempt
from rlpipe.records.kinds import Span
from rlpipe.records.messages import content_text
from rlpipe.records.rollout import (
    BRANCHES_FILE,
    CUT_SHORT,
    OUT_OF_TURNS,
    TRUNCATED,
    Branch,
    CarriedRollout,
    Group,
    PromptGroup,
    Rollout,
)


@dataclass(frozen=True, eq=False)
class ShardGroups:
    """The rollouts of a shard, made from the played ones of each group as soon as the group has
    finished.
    """

    session: Session
    sampling_round: SamplingRound
    groups: list[PromptGroup]
    requests: list[GroupRequest]
    version: int
    finished: dict[int, Group] = field(default_factory=dict)

    async def rollouts(self, index: int, played: list[PlayedRollout]) -> Group:
        """The rollouts of one group.

        Made in a thread: to decode millions of tokens would block the event loop, and so other
        requests.
        """
        if index not in self.finished:
            group = self.groups[index], self.requests[index], played
            self.finished[index] = await asyncio.to_thread(rollouts_of, self.session, *group, self.version)
        return self.finished[index]

    async def score(self, index: int, played: list[PlayedRollout]) -> None:
        """Starts to score a finished group while others are sampled, without waiting: rollouts are
        committed before their rewards.
        """
        self.sampling_round.add(self.groups[index].prompt, await self.rollouts(index, played))


def rollouts_of(
    session: Session, group: PromptGroup, request: GroupRequest, played: list[PlayedRollout], version: int
) -> Group:
    """The played rollouts of one group as rollouts; `version` is the newest that sampled them."""
    prompt_id = group.prompt.prompt_id
    assert len(played) == len(request.params), f"{prompt_id}: a rollout was lost or came twice"
    for prior, rollout in zip(request.prior, played, strict=True):
        assert rollout.completion.tokens[: len(prior.tokens)] == prior.tokens, (
            f"{prompt_id}: a rollout did not go on as it was"
        )
    return [
        _rollout_of(session, group, index, params.seed, rollout, version)
        for index, (params, rollout) in enumerate(zip(request.params, played, strict=True))
    ]


def _rollout_of(
    session: Session, group: PromptGroup, index: int, seed: int, played: PlayedRollout, version: int
) -> Rollout:
    """One played rollout as a rollout; `index`: in its group."""
    completion = played.completion
    mask = loss_mask(completion.spans, version, session.config.rl.train_stale_tokens)
    if played.policy_mask is not None:
        mask = mask * np.frombuffer(played.policy_mask, dtype=np.int8)
    return Rollout(
        prompt_id=group.prompt.prompt_id,
        group_index=group.group_index,
        rollout_index=index,
        prompt=content_text(group.prompt.messages[-1]),
        prompt_tokens=np.array(played.prompt_tokens, dtype=np.int32),
        completion=session.data.tokenizer.decode(completion.tokens.tolist()),
        completion_tokens=np.array(completion.tokens, dtype=np.int32),
        loss_mask=mask,
        rollout_logprobs=np.array(completion.rollout_logprobs, dtype=np.float32),
        weight_version=completion.spans[-1][0] if completion.spans else version,
        weight_versions=tuple(Span(*span) for span in completion.spans),
        finish_reason=completion.finish_reason,
        seed=seed,
        engine=completion.engine,
        environment=played.outcome,
    )


def loss_mask(spans: list[tuple[int, int]], version: int, train_stale_tokens: bool) -> np.ndarray:
    """The loss mask of a completion's tokens, int8 [L], where `version` is the one that samples."""
    assert all(sampled_by <= version for sampled_by, _ in spans), f"spans {spans} of a rollout of version {version}"
    trained = [train_stale_tokens or sampled_by == version for sampled_by, _ in spans]
    return np.repeat(np.array(trained, dtype=np.int8), [num_tokens for _, num_tokens in spans])


def prior_of(carried: CarriedRollout, tokens_max: int) -> Completion:
    """The completion of a partial rollout so far.

    It is finished when it has all its tokens already (a fork may allow fewer).
    """
    tokens, reason = tokens_of(carried.completion_tokens), carried.finish_reason
    if reason == CUT_SHORT and len(tokens) >= tokens_max:
        reason = TRUNCATED
    spans = [(span.version, span.num_tokens) for span in carried.weight_versions]
    return Completion(tokens, logprobs_of(carried.rollout_logprobs), reason, spans, carried.engine)


def write_branches(attempt: Attempt, played: list[list[PlayedRollout]]) -> list[FileRecord]:
    """Writes the branches that are not the rollouts' own as one file; no file where there are
    none.
    """
    branches = [branch for group in played for rollout in group for branch in rollout.branches]
    return [attempt.write(BRANCHES_FILE, branches, Branch)] if branches else []


def environment_metrics(rollouts: list[Rollout], names_from: list[Rollout] | None = None) -> Metrics:
    """Means over rollouts of their turns, the environment's reward and its own metrics, and the
    fraction of rollouts that were out of turns; empty where there is no environment.

    A metric that a rollout lacks is 0 for it. `names_from`: the rollouts whose metrics give the
    names, where `rollouts` are a part of them.
    """
    played = [(rollout, rollout.environment) for rollout in rollouts if rollout.environment]
    if not played:
        return {}
    outcomes = [outcome for _, outcome in played]
    names = {name for rollout in names_from or rollouts if rollout.environment for name in rollout.environment.metrics}
    values = {
        "turns_mean": [float(outcome.num_turns) for outcome in outcomes],
        "environment_reward_mean": [outcome.reward for outcome in outcomes],
        "out_of_turns_fraction": [float(rollout.finish_reason == OUT_OF_TURNS) for rollout, _ in played],
    }
    values |= {
        f"environment_{name}_mean": [outcome.metrics.get(name, 0.0) for outcome in outcomes] for name in sorted(names)
    }
    return {name: float(np.mean(entries)) for name, entries in values.items()}
