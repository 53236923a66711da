"""The stages sample_prompts and generate."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from rlpipe.data.cursor import PromptCursor
from rlpipe.data.prompt import Prompt
from rlpipe.engines.client import NOTHING_YET, Completion, SamplingParams
from rlpipe.engines.pool import GroupRequest
from rlpipe.rollouts import CARRIED, PROMPTS, ROLLOUTS, grouped, read_rows, read_rows_if_any
from rlpipe.stages.carrying import num_sampled_of, prior_of
from rlpipe.stages.commit import Attempt, Produced, StageKey, run_stage
from rlpipe.stages.curriculum import draw_prompts
from rlpipe.stages.faulted import check_answered
from rlpipe.stages.rows import check_lengths, prompt_rows, rollout_rows
from rlpipe.stages.scoring import judge
from rlpipe.stages.seeds import rollout_seed
from rlpipe.stages.session import Session
from rlpipe.stages.survivors import Survivors
from rlpipe.stages.turns import play
from rlpipe.store.artifacts import read_manifest
from rlpipe.store.backend import Store
from rlpipe.store.run import Run
from rlpipe.types import ArtifactRef, JsonDict, StageResult, UserError


async def sample_prompts(
    session: Session,
    iteration: int,
    round_index: int,
    before: ArtifactRef | None,
    carried: ArtifactRef | None = None,
    pass_rates: ArtifactRef | None = None,
) -> StageResult:
    """The prompts of one sampling round: first those of the groups that `carried` (the batch of the iteration before) hands on.

    `before` is the previous round's artifact: the cursor goes on from there. `pass_rates`, for a curriculum, is the batch of the
    iteration before too, in every round.
    """

    async def produce(attempt: Attempt) -> Produced:
        handed, prompts, metrics = await asyncio.to_thread(_draw, session, iteration, round_index, before, carried, pass_rates)
        rows = [{name: group[0][name] for name in PROMPTS.names} for group in handed] + await prompt_rows(session, prompts)
        assert len(rows) == max(session.config.rl.round_groups, len(handed)), (
            "the cursor drew another number of prompts than asked"
        )
        files = [await asyncio.to_thread(attempt.write_rows, "prompts.parquet", rows, PROMPTS)]
        if handed:
            carried_rows = [row for group in handed for row in group]
            files.append(await asyncio.to_thread(attempt.write_rows, "carried.parquet", carried_rows, CARRIED))
        return Produced(files, metrics | {"num_prompts": len(rows)})

    given = {"before": before, "carried": carried, "pass_rates": pass_rates}
    inputs = {name: ref for name, ref in given.items() if ref is not None}
    return await run_stage(session, StageKey("rl", iteration, f"prompts/round-{round_index}"), inputs, produce)


def _draw(
    session: Session,
    iteration: int,
    round_index: int,
    before: ArtifactRef | None,
    carried: ArtifactRef | None,
    pass_rates: ArtifactRef | None,
) -> tuple[list[list[JsonDict]], list[Prompt], JsonDict]:
    """The groups that are handed on, the prompts drawn beside them, and the metrics of the draw."""
    sets, data = session.prompts("rl"), session.config.sets("rl")
    cursor = PromptCursor([len(rows) for rows in sets], [entry.weight for entry in data], session.config.seed)
    position, digest, first_group, skipped = cursor.start(), session.data_sha256, 0, {}
    if before is not None:
        told = read_manifest(session.run.store, before.folder, before.sha256).metrics
        if told["data_sha256"] != digest:
            raise UserError(
                f"the rl data sets have changed since {before.folder} was drawn: restore them, or start another run"
            )
        position = told["cursor"]
        if round_index:
            first_group, skipped = told["first_group"] + told["num_prompts"], told
    if before is None:
        check_lengths(session, "rl")
    handed = _carried_groups(session.run.store, carried) if carried else []
    wanted = max(0, session.config.rl.round_groups - len(handed))
    drawn, after, counts = draw_prompts(session, iteration, cursor, position, wanted, pass_rates)
    metrics = {"cursor": after, "data_sha256": digest, "first_group": first_group}
    metrics |= {name: skipped.get(name, 0) + count for name, count in counts.items()}
    return handed, [sets[set_index][row_index] for set_index, row_index in drawn], metrics


def _carried_groups(store: Store, ref: ArtifactRef) -> list[list[JsonDict]]:
    """The groups of an artifact's carried.parquet, which it has when there are any."""
    return grouped(read_rows_if_any(store, ref, "carried.parquet", CARRIED))


def check_carried(run: Run) -> None:
    """UserError when a fork could not go on with the groups that its parent handed on: they were sampled otherwise."""
    at, now = run.fork_at, run.config.rl
    record = run.iteration_record(at) if run.parent is not None and at >= 0 else None
    if record is None or run.redo or now.rollouts_from:
        return
    num_groups = len(_carried_groups(run.store, ArtifactRef.from_json(record["artifacts"]["batch"])))
    before = run.owner("rl", at, "rollouts").config.rl
    differ = [name for name in ("temperature", "top_p", "top_k") if getattr(before, name) != getattr(now, name)]
    if num_groups and now.environment:
        raise UserError(
            f"rl.environment={now.environment!r}: {num_groups} groups that iteration {at} carried were begun without it, and a "
            f"rollout does not go on in it. Two ways out: fork with rl.oversampling = 1 and rl.num_iterations = {at + 2}, which "
            f"finishes them, and then fork that run at {at + 1}; or fork at an iteration whose rollout/groups_carried is 0"
        )
    if num_groups and differ and now.train_stale_tokens:
        raise UserError(
            f"rl.{differ[0]} differs from that of the rollouts that iteration {at} carried: keep it, or set "
            "rl.train_stale_tokens = false, so that their logprobs are not trained on"
        )


def num_shards(session: Session, num_prompts: int) -> int:
    """Shards of a sampling round."""
    return -(-num_prompts // session.config.rl.shard_prompts)


@dataclass(frozen=True)
class Place:
    """One group of a sampling round: its prompt, and what an earlier iteration sampled of it already."""

    slot: int  # in the round
    group_index: int  # in the iteration
    prompt: JsonDict
    carried: list[JsonDict]


def _rollouts_key(iteration: int, round_index: int, shard: int) -> StageKey:
    return StageKey("rl", iteration, f"rollouts/round-{round_index}/shard-{shard:03d}")


async def generate(
    session: Session, iteration: int, round_index: int, shard: int, prompts: ArtifactRef, policy: ArtifactRef, kept: int = 0
) -> StageResult:
    """The rollouts of one shard of a round's prompts, sampled with weight version `iteration`.

    `kept`: groups that survived the earlier rounds. When enough have survived of a round that is over-sampled, what runs is cut
    short; it is committed all the same.
    """
    rl, key = session.config.rl, _rollouts_key(iteration, round_index, shard)

    async def produce(attempt: Attempt) -> Produced:
        session.unanswered.discard((key.iteration, key.stage))
        places = await asyncio.to_thread(_places, session, prompts)
        mine = places[shard * rl.shard_prompts : (shard + 1) * rl.shard_prompts]
        requests = [_group_request(session, place, iteration, round_index) for place in mine]
        await session.serve(policy, iteration)
        if rl.oversampling > 1:
            survivors = _survivors(session, iteration, round_index, kept)
            await _recount(session, survivors, iteration, round_index, places)
            groups = await _until_enough(session, survivors, iteration, mine, requests)
        else:
            groups = await sample(session, requests, [place.prompt for place in mine])
        rollouts = [
            rollout
            for place, request, group in zip(mine, requests, groups, strict=True)
            for rollout in rollout_rows(session, place.prompt, place.group_index, request, group, iteration)
        ]
        shards = (_rollouts_key(iteration, round_index, each) for each in range(num_shards(session, len(places))))
        await check_answered(session, key, [other for other in shards if other != key], rollouts)
        record = await asyncio.to_thread(attempt.write_rows, "rollouts.parquet", rollouts, ROLLOUTS)
        tokens = sum(num_sampled_of(row, iteration) for row in rollouts)
        return Produced([record], {"num_rollouts": len(rollouts), "num_tokens": tokens}, weight_version=iteration)

    inputs = {"prompts": prompts, "policy": policy}
    return await run_stage(session, key, inputs, produce)


def _places(session: Session, prompts: ArtifactRef) -> list[Place]:
    """The groups of a round, the carried ones first."""
    first = read_manifest(session.run.store, prompts.folder, prompts.sha256).metrics["first_group"]
    handed = dict(enumerate(_carried_groups(session.run.store, prompts)))
    rows = read_rows(session.run.store, prompts, "prompts.parquet", PROMPTS)
    return [Place(slot, first + slot, row, handed.get(slot, [])) for slot, row in enumerate(rows)]


def _group_request(session: Session, place: Place, iteration: int, round_index: int) -> GroupRequest:
    """What is asked of the pool. A carried group keeps its size; a rollout that goes on does so with a seed of this iteration."""
    rl, prompt_id = session.config.rl, place.prompt["prompt_id"]
    prior = [prior_of(row, rl.completion_tokens_max) for row in place.carried] or [NOTHING_YET] * rl.group_size
    seeds = [
        place.carried[index]["seed"]
        if done.finished
        else rollout_seed(session.config.seed, iteration, round_index, place.slot, prompt_id, index)
        for index, done in enumerate(prior)
    ]
    params = [sampling_params(session, rl.temperature, seed) for seed in seeds]
    return GroupRequest(prompt_id, place.prompt["prompt_tokens"], params, prior)


def _survivors(session: Session, iteration: int, round_index: int, kept: int) -> Survivors:
    """Those of this round, shared by its shards; those of the round before are forgotten."""
    key, rl = (iteration, round_index), session.config.rl
    if key not in session.survivors:
        session.survivors.clear()
        session.survivors[key] = Survivors(max(rl.num_prompts, rl.groups_min) - kept)
    return session.survivors[key]


async def _recount(session: Session, survivors: Survivors, iteration: int, round_index: int, places: list[Place]) -> None:
    """Counts the shards of the round that an earlier process committed: once, by the shard that comes first."""
    async with survivors.recounting:
        if survivors.recounted:
            return
        prompts = {place.group_index: place.prompt for place in places}
        keys = [_rollouts_key(iteration, round_index, shard) for shard in range(num_shards(session, len(places)))]
        looks = (asyncio.to_thread(session.run.artifact, *key) for key in keys)
        for found in await asyncio.gather(*looks):
            if found is not None:
                rows = await asyncio.to_thread(read_rows, session.run.store, found[0], "rollouts.parquet", ROLLOUTS)
                for group in grouped(rows):
                    await judge(session, survivors, prompts[group[0]["group_index"]], group)
        survivors.recounted = True


async def _until_enough(
    session: Session, survivors: Survivors, iteration: int, places: list[Place], requests: list[GroupRequest]
) -> list[list[Completion]]:
    enough = survivors.begin(place.group_index for place in places)

    async def on_group(index: int, group: list[Completion]) -> None:
        if not enough.is_set():
            place = places[index]
            rows = rollout_rows(session, place.prompt, place.group_index, requests[index], group, iteration)
            await judge(session, survivors, place.prompt, rows)

    return await session.pool.generate(requests, on_group, enough)


async def sample(session: Session, requests: list[GroupRequest], prompts: list[JsonDict]) -> list[list[Completion]]:
    """The completions of every group, whole; in the environment where there is one. `prompts`: their stored rows."""
    return await (play(session, requests, prompts) if session.config.rl.environment else session.pool.generate(requests))


def sampling_params(session: Session, temperature: float, seed: int) -> SamplingParams:
    """How one completion is sampled."""
    rl = session.config.rl
    return SamplingParams(rl.completion_tokens_max, temperature, rl.top_p, rl.top_k, seed)


def previous_artifact(session: Session, iteration: int, name: str) -> ArtifactRef | None:
    """What the commit of the iteration before names: `prompts` (its last round, where the cursor goes on) or `batch`."""
    if iteration == 0:
        return None
    record = session.run.iteration_record(iteration - 1)
    if record is None:
        raise UserError(
            f"iteration {iteration - 1} of run {session.run.name} is not committed: run it before iteration {iteration}"
        )
    return ArtifactRef.from_json(record["artifacts"][name])
