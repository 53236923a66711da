"""The stages sample_prompts and generate."""

from __future__ import annotations

import asyncio
import hashlib
import json
from typing import Any

from rlpipe.data.cursor import PromptCursor
from rlpipe.data.prompt import Prompt
from rlpipe.engines.pool import Completion, GroupRequest
from rlpipe.rollouts import PROMPTS, ROLLOUTS, read_rows, to_parquet
from rlpipe.stages.commit import Produced, StageKey, run_stage
from rlpipe.stages.session import Session
from rlpipe.store.artifacts import read_manifest, write_bytes
from rlpipe.types import ArtifactRef, JsonDict, StageResult, UserError


def rollout_seed(*parts: Any) -> int:
    """A 31-bit seed from the run's seed, iteration, round, prompt id and rollout index: the same on any machine."""
    digest = hashlib.sha256(json.dumps(parts).encode()).digest()
    return int.from_bytes(digest[:4], "big") & 0x7FFFFFFF


async def sample_prompts(session: Session, iteration: int, round_index: int, before: ArtifactRef | None) -> StageResult:
    """The prompts of one sampling round. `before` is the previous round's artifact: the cursor goes on from there."""

    def produce_sync(folder: str, attempt: str) -> Produced:
        sets, data = session.prompts("rl"), session.config.sets("rl")
        cursor = PromptCursor([len(rows) for rows in sets], [entry.weight for entry in data], session.config.seed)
        store = session.run.store
        position, digest = cursor.start(), session.data_sha256("rl")
        if before is not None:
            told = read_manifest(store, before.folder, before.sha256).metrics
            if told["data_sha256"] != digest:
                raise UserError(
                    f"the rl data sets have changed since {before.folder} was drawn: restore them, or start another run"
                )
            position = told["cursor"]
        drawn, after = cursor.take(position, session.config.rl.num_prompts)
        rows = [prompt_row(session, sets[set_index][row_index]) for set_index, row_index in drawn]
        assert len(rows) == session.config.rl.num_prompts, "the cursor drew another number of prompts than asked"
        record = write_bytes(store, folder, attempt, "prompts.parquet", to_parquet(rows, PROMPTS))
        return Produced([record], {"cursor": after, "num_prompts": len(rows), "data_sha256": digest})

    async def produce(folder: str, attempt: str) -> Produced:
        return await asyncio.to_thread(produce_sync, folder, attempt)

    inputs = {"before": before} if before else {}
    return await run_stage(session, StageKey("rl", iteration, f"prompts/round-{round_index}"), inputs, produce)


def prompt_row(session: Session, prompt: Prompt) -> JsonDict:
    """A prompt as it is stored, tokens included."""
    return {
        "prompt_id": prompt.prompt_id,
        "source": prompt.source,
        "messages": json.dumps(prompt.messages),
        "answer": prompt.answer,
        "metadata": json.dumps(prompt.metadata),
        "prompt_tokens": session.tokenizer().encode_prompt(prompt.messages),
    }


def num_shards(session: Session) -> int:
    """Shards of a sampling round."""
    return -(-session.config.rl.num_prompts // session.config.rl.shard_prompts)


async def generate(
    session: Session, iteration: int, round_index: int, shard: int, prompts: ArtifactRef, policy: ArtifactRef
) -> StageResult:
    """The rollouts of one shard of a round's prompts, sampled with weight version `iteration`."""
    run, rl = session.run, session.config.rl

    async def produce(folder: str, attempt: str) -> Produced:
        manifest = await asyncio.to_thread(read_manifest, run.store, prompts.folder, prompts.sha256)
        rows = await asyncio.to_thread(read_rows, run.store, prompts.folder, manifest, PROMPTS)
        first = shard * rl.shard_prompts
        mine = rows[first : first + rl.shard_prompts]
        requests = [_group_request(session, row, iteration, round_index, slot) for slot, row in enumerate(mine, first)]
        await session.serve(policy, iteration)
        groups = await session.pool.generate(requests)
        told = enumerate(zip(mine, requests, groups, strict=True), first + round_index * rl.num_prompts)
        rollouts = [
            rollout for index, (row, request, group) in told for rollout in rollout_rows(session, row, index, request, group)
        ]
        data = await asyncio.to_thread(to_parquet, rollouts, ROLLOUTS)
        record = await asyncio.to_thread(write_bytes, run.store, folder, attempt, "rollouts.parquet", data)
        tokens = sum(len(row["completion_tokens"]) for row in rollouts)
        return Produced([record], {"num_rollouts": len(rollouts), "num_tokens": tokens}, weight_version=iteration)

    key = StageKey("rl", iteration, f"rollouts/round-{round_index}/shard-{shard:03d}")
    return await run_stage(session, key, {"prompts": prompts, "policy": policy}, produce)


def _group_request(session: Session, row: JsonDict, iteration: int, round_index: int, slot: int) -> GroupRequest:
    seed = session.config.seed
    seeds = [
        rollout_seed(seed, iteration, round_index, slot, row["prompt_id"], index)
        for index in range(session.config.rl.group_size)
    ]
    temperature = session.config.rl.temperature
    return GroupRequest(row["prompt_id"], row["prompt_tokens"], [sampling_params(session, temperature, seed) for seed in seeds])


def sampling_params(session: Session, temperature: float, seed: int) -> JsonDict:
    """What an engine is told for one completion."""
    rl = session.config.rl
    return {
        "max_new_tokens": rl.completion_tokens_max,
        "temperature": temperature,
        "top_p": rl.top_p,
        "top_k": rl.top_k,
        "sampling_seed": seed,
    }


def rollout_rows(
    session: Session, row: JsonDict, group_index: int, request: GroupRequest, group: list[Completion]
) -> list[JsonDict]:
    """The rollouts of one prompt as they are stored, but for the reward."""
    assert len(group) == len(request.sampling_params), f"{row['prompt_id']}: a completion was lost or came twice"
    return [
        {
            "prompt_id": row["prompt_id"],
            "group_index": group_index,
            "rollout_index": index,
            "prompt": json.loads(row["messages"])[-1]["content"],
            "prompt_tokens": row["prompt_tokens"],
            "completion": session.tokenizer().decode(completion.tokens),
            "completion_tokens": completion.tokens,
            "loss_mask": [1] * len(completion.tokens),
            "rollout_logprobs": completion.rollout_logprobs,
            "weight_version": completion.weight_version,
            "finish_reason": completion.finish_reason,
            "seed": params["sampling_seed"],
            "engine": completion.engine,
        }
        for index, (params, completion) in enumerate(zip(request.sampling_params, group, strict=True))
    ]


def previous_prompts(session: Session, iteration: int) -> ArtifactRef | None:
    """The prompts artifact that the cursor goes on from: the last round of the iteration before."""
    if iteration == 0:
        return None
    record = session.run.iteration_record(iteration - 1)
    if record is None:
        raise UserError(
            f"iteration {iteration - 1} of run {session.run.name} is not committed: run it before iteration {iteration}"
        )
    return ArtifactRef.from_json(record["artifacts"]["prompts"])
