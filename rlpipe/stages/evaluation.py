"""The stage evaluate: greedy and sampled completions of prompts that training never saw."""

from __future__ import annotations

import asyncio
from collections import Counter

from rlpipe.engines.client import NOTHING_YET
from rlpipe.engines.pool import GroupRequest
from rlpipe.passes import set_metrics
from rlpipe.rollouts import SCORES, prompt_of
from rlpipe.stages.commit import Attempt, Produced, StageKey, run_stage
from rlpipe.stages.rows import check_lengths, prompt_rows, rollout_rows
from rlpipe.stages.sampling import sample, sampling_params
from rlpipe.stages.scoring import score_rows
from rlpipe.stages.seeds import rollout_seed
from rlpipe.stages.session import Session
from rlpipe.stages.turns import environment_metrics
from rlpipe.types import ArtifactRef, JsonDict, StageResult


def evaluation_key(session: Session, version: int) -> StageKey:
    """Where the evaluation of a weight version lives: beside the policy."""
    if version > 0:
        return StageKey("rl", version - 1, "evaluation")
    segment, _ = session.run.sft_result()
    return StageKey("sft", segment, "evaluation") if segment >= 0 else StageKey("base", 0, "evaluation")


async def evaluate(session: Session, policy: ArtifactRef, version: int) -> StageResult:
    """The metrics of every evaluation set (rlpipe/passes.py): greedy, pass@k and the majority's answer at temperature 1."""

    async def produce(attempt: Attempt) -> Produced:
        await session.serve(policy, version)
        prompt_rows, rows = await _sample(session, version)
        prompts = {row["prompt_id"]: prompt_of(row) for row in prompt_rows}
        source = {row["prompt_id"]: row["source"] for row in prompt_rows}
        scored = await asyncio.to_thread(score_rows, session, prompts, rows)
        record = await asyncio.to_thread(attempt.write_rows, "evaluation.parquet", scored, SCORES)
        metrics = await asyncio.to_thread(_metrics, session, scored, source)
        return Produced([record], metrics, weight_version=version)

    return await run_stage(session, evaluation_key(session, version), {"policy": policy}, produce)


def _metrics(session: Session, scored: list[JsonDict], source: dict[str, str]) -> JsonDict:
    """Of all sets; `source`: prompt id -> set. Rollouts that could not be scored count as `<set>_fault_<reason>`."""
    metrics: JsonDict = {}
    for data in session.config.sets("evaluation"):
        rows = [row for row in scored if source[row["prompt_id"]] == data.name]
        faults = Counter(row["reward_fault"] for row in rows if row["reward_fault"])
        told = {**_environment_metrics(rows), **{f"fault_{reason}": count for reason, count in faults.items()}}
        metrics |= set_metrics(data.name, rows, session.config.evaluation.pass_threshold)
        metrics |= {f"{data.name}_{name}": value for name, value in told.items()}
    return metrics


def _environment_metrics(rows: list[JsonDict]) -> JsonDict:
    """What the environment says of sampled rollouts, and what it says of greedy ones."""
    sampled, greedy = ([row for row in rows if (row["rollout_index"] == 0) == first] for first in (False, True))
    return {
        **environment_metrics(sampled, names_from=rows),
        **{f"greedy_{name}": value for name, value in environment_metrics(greedy, names_from=rows).items()},
    }


async def _sample(session: Session, version: int) -> tuple[list[JsonDict], list[JsonDict]]:
    """(prompt rows, rollouts): per prompt rollout 0 is greedy, the others are sampled at temperature 1."""
    config = session.config.evaluation
    await asyncio.to_thread(check_lengths, session, "evaluation")
    sets = await asyncio.to_thread(session.prompts, "evaluation")
    prompts = [prompt for rows in sets for prompt in rows[: config.prompts_max]]
    rows = await prompt_rows(session, prompts)
    requests = [_request(session, row, version, config.num_completions) for row in rows]
    groups = await sample(session, requests, rows)
    told = enumerate(zip(rows, requests, groups, strict=True))
    return rows, [
        rollout
        for index, (row, request, group) in told
        for rollout in rollout_rows(session, row, index, request, group, version)
    ]


def _request(session: Session, row: JsonDict, version: int, num_completions: int) -> GroupRequest:
    seeds = [
        rollout_seed(session.config.seed, "evaluation", version, row["prompt_id"], index) for index in range(num_completions)
    ]
    params = [sampling_params(session, 0.0, 0)] + [sampling_params(session, 1.0, seed) for seed in seeds]
    return GroupRequest(row["prompt_id"], row["prompt_tokens"], params, [NOTHING_YET] * len(params))
