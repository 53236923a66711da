"""The stage evaluate: greedy and sampled completions of prompts that training never saw."""

from __future__ import annotations

import asyncio
from collections import Counter

from rlpipe.algorithms.answers import set_metrics
from rlpipe.base.references import ArtifactRef
from rlpipe.base.seeds import rollout_seed
from rlpipe.base.values import Metrics
from rlpipe.config.passing import passing_reward
from rlpipe.engines.client import NOTHING_YET
from rlpipe.engines.pool import GroupRequest
from rlpipe.loop.player import Hooks
from rlpipe.loop.session import Session
from rlpipe.loop.stage import Attempt, Produced, stage
from rlpipe.records.prompt import Prompt
from rlpipe.records.rollout import SCORES, PromptGroup, Rollout
from rlpipe.stages.generation import sampling_params
from rlpipe.stages.rollouts import environment_metrics, rollouts_of
from rlpipe.stages.sampling import check_lengths, encoded_prompts
from rlpipe.stages.scoring import score_rollouts


@stage("", "evaluation")
async def evaluate(session: Session, attempt: Attempt, *, policy: ArtifactRef, version: int) -> Produced:
    """The metrics of every evaluation set: greedy, pass@k and the majority's answer.

    The artifact is stored beside the policy.
    """
    await session.serve(policy, version)
    prompts, rollouts = await _sample(session, version)
    return await asyncio.to_thread(_scored, session, attempt, prompts, rollouts, version)


def _scored(
    session: Session, attempt: Attempt, prompts: list[Prompt], rollouts: list[Rollout], version: int
) -> Produced:
    by_id = {prompt.prompt_id: prompt for prompt in prompts}
    scored = score_rollouts(session, by_id, rollouts, {}, use="evaluation")
    assert len(scored) == len(prompts) * (1 + session.config.evaluation.num_completions), "a rollout was lost"
    metrics: Metrics = {}
    for index, data in enumerate(session.config.sets("evaluation")):
        own = [rollout for rollout in scored if by_id[rollout.prompt_id].source == data.name]
        faults = Counter(rollout.reward_fault for rollout in own if rollout.reward_fault)
        counted = [rollout for rollout in own if not session.config.rl.says_nothing(rollout.reward_fault)]
        metrics |= set_metrics(data.name, counted, passing_reward(session.config, "evaluation"))
        metrics |= {f"{data.name}_{name}": value for name, value in _environment_metrics(own).items()}
        if data.on_too_long == "drop":
            rows, fit = session.data.prompts("evaluation")[index], session.data.fitting("evaluation")[index]
            metrics[f"{data.name}_prompts_too_long"] = len(rows) - len(fit)
        metrics |= {f"{data.name}_fault_{reason}": count for reason, count in faults.items()}
    return Produced([attempt.write("evaluation.parquet", scored, Rollout, SCORES)], metrics, weight_version=version)


def _environment_metrics(rollouts: list[Rollout]) -> Metrics:
    """The environment's metrics of the sampled rollouts, and of the greedy ones with the prefix
    `greedy_`.
    """
    sampled, greedy = (
        [rollout for rollout in rollouts if (rollout.rollout_index == 0) == first] for first in (False, True)
    )
    return {
        **environment_metrics(sampled, names_from=rollouts),
        **{f"greedy_{name}": value for name, value in environment_metrics(greedy, names_from=rollouts).items()},
    }


async def _sample(session: Session, version: int) -> tuple[list[Prompt], list[Rollout]]:
    """The prompts and their rollouts: per prompt, rollout 0 is greedy, the others are sampled."""
    await asyncio.to_thread(check_lengths, session, "evaluation")
    sets = await asyncio.to_thread(session.data.fitting, "evaluation")
    prompts = [prompt for rows in sets for prompt in rows[: session.config.evaluation.prompts_max]]
    prompts = await encoded_prompts(session, "evaluation", prompts)
    requests = [_request(session, prompt, version) for prompt in prompts]
    groups = [PromptGroup(index, index, prompt) for index, prompt in enumerate(prompts)]
    played = await session.player.play(requests, groups, Hooks())
    return prompts, [
        rollout
        for group, request, ended in zip(groups, requests, played, strict=True)
        for rollout in rollouts_of(session, group, request, ended, version)
    ]


def _request(session: Session, prompt: Prompt, version: int) -> GroupRequest:
    evaluation, seed = session.config.evaluation, session.config.seed
    seeds = [
        rollout_seed(seed, "evaluation", version, prompt.prompt_id, index)
        for index in range(evaluation.num_completions)
    ]
    params = [sampling_params(session, "evaluation", 0.0, 0)]
    params += [sampling_params(session, "evaluation", evaluation.temperature, seed) for seed in seeds]
    return GroupRequest(prompt.prompt_id, prompt.prompt_tokens.tolist(), params, [NOTHING_YET] * len(params))
