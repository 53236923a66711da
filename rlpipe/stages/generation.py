"""The stage generate: the rollouts of one shard of a round's prompts, on the pool of engines."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial

from rlpipe.base.errors import EngineError, UserError
from rlpipe.base.references import ArtifactRef
from rlpipe.base.seeds import rollout_seed
from rlpipe.config.training import RlConfig
from rlpipe.engines.client import NOTHING_YET, Sampling
from rlpipe.engines.pool import GroupRequest
from rlpipe.loop.player import Hooks, PlayedRollout
from rlpipe.loop.sampling_round import SamplingRound, Scores
from rlpipe.loop.session import Session
from rlpipe.loop.stage import Attempt, Produced, StageKey, stage
from rlpipe.records.prompt import Prompt
from rlpipe.records.rollout import ROLLOUTS, Group, PromptGroup, Rollout, grouped
from rlpipe.stages.filtering import survives
from rlpipe.stages.rollouts import ShardGroups, prior_of, write_branches
from rlpipe.stages.sampling import carried_groups
from rlpipe.stages.scoring import rewarded
from rlpipe.store.artifacts import read_manifest, read_records
from rlpipe.store.facts import PromptsFacts, facts_of

log = logging.getLogger(__name__)
POLL_S = 2.0


@stage("rl", "rollouts/round-{round_index}/shard-{shard:03d}")
async def generate(
    session: Session,
    attempt: Attempt,
    *,
    iteration: int,
    round_index: int,
    shard: int,
    prompts: ArtifactRef,
    policy: ArtifactRef,
    num_kept: int = 0,
) -> Produced:
    """The rollouts of one shard of a round's prompts, sampled by `policy`: the weight version that
    `rl.overlap` says.

    `num_kept`: groups that survived the earlier rounds. In an over-sampled round, rollouts in
    progress are cut when enough groups have survived; the partial rollouts are committed too.
    """
    groups = await asyncio.to_thread(prompt_groups, session, prompts)
    shards = shard_places(session.config.rl, len(groups))
    keys = [
        generate.key(session, iteration=iteration, round_index=round_index, shard=index) for index in range(len(shards))
    ]
    sampling_round = round_at_work(session, (iteration, round_index), num_kept)
    sampling_round.answers.pop(keys[shard], None)
    shard_groups = groups[shards[shard].start : shards[shard].stop]
    requests = [_request(session, group, iteration, round_index) for group in shard_groups]
    version = session.config.rl.sampled_by(iteration)
    await session.serve(policy, version)
    made = ShardGroups(session, sampling_round, shard_groups, requests, version)
    if session.config.rl.oversampling > 1:
        await sampling_round.count_committed(partial(_committed_of_round, session, groups, keys))
        played = await _until_enough(made)
    else:
        hooks = Hooks(made.score, replies=session.run.folder(*keys[shard]))
        played = await session.player.play(requests, shard_groups, hooks)
    rollouts = [rollout for index, group in enumerate(played) for rollout in await made.rollouts(index, group)]
    await _check_answered(session, sampling_round, keys, shard, rollouts)
    files = [await asyncio.to_thread(attempt.write, "rollouts.parquet", rollouts, Rollout, ROLLOUTS)]
    files += await asyncio.to_thread(write_branches, attempt, played)
    num_tokens = sum(rollout.num_sampled_by(version) for rollout in rollouts)
    return Produced(files, {"num_rollouts": len(rollouts), "num_tokens": num_tokens}, weight_version=version)


def num_shards(session: Session, num_prompts: int) -> int:
    """The number of shards of a sampling round."""
    return len(shard_places(session.config.rl, num_prompts))


def shard_places(rl: RlConfig, num_groups: int) -> list[range]:
    """The places of the groups of each shard of a sampling round, 0 .. num_groups - 1 in order."""
    return [range(num_groups)[first : first + rl.shard_prompts] for first in range(0, num_groups, rl.shard_prompts)]


def prompt_groups(session: Session, prompts: ArtifactRef) -> list[PromptGroup]:
    """The groups of a round, those of partial rollouts first."""
    store = session.run.store
    metrics = read_manifest(store, prompts.folder, prompts.sha256).metrics
    first = facts_of(metrics, PromptsFacts, prompts.folder).first_group
    carried = dict(enumerate(carried_groups(store, prompts)))
    drawn = read_records(store, prompts, "prompts.parquet", Prompt)
    return [PromptGroup(slot, first + slot, prompt, carried.get(slot, [])) for slot, prompt in enumerate(drawn)]


def _request(session: Session, group: PromptGroup, iteration: int, round_index: int) -> GroupRequest:
    """The request to the pool for one group.

    A group that an earlier iteration began keeps its size. A partial rollout goes on with a seed of
    this iteration.
    """
    rl, prompt_id = session.config.rl, group.prompt.prompt_id
    priors = [prior_of(rollout, rl.completion_tokens_max) for rollout in group.carried] or [NOTHING_YET] * rl.group_size
    seeds = [
        group.carried[index].seed
        if completion.finished
        else rollout_seed(session.config.seed, iteration, round_index, group.slot, prompt_id, index)
        for index, completion in enumerate(priors)
    ]
    params = [sampling_params(session, "rl", rl.temperature, seed) for seed in seeds]
    return GroupRequest(prompt_id, group.prompt.prompt_tokens.tolist(), params, priors)


def sampling_params(session: Session, use: str, temperature: float, seed: int) -> Sampling:
    """The sampling parameters of one completion of use rl or evaluation."""
    config, own = session.config, session.config.evaluation.top_p if use == "evaluation" else None
    top_p, stops = config.rl.top_p if own is None else own, tuple(session.data.tokenizer.stop_token_ids)
    return Sampling(config.completion_tokens_max(use), temperature, top_p, seed=seed, stop_token_ids=stops)


def round_at_work(session: Session, key: tuple[int, int], num_kept: int = 0) -> SamplingRound:
    """The state of this round (iteration, round), shared by its shards.

    `num_kept`: groups that survived the earlier rounds.
    """
    if session.sampling_round is None or session.sampling_round.key != key:

        def score(prompts: dict[str, Prompt], rollouts: list[Rollout], known: Scores) -> list[Rollout]:
            return rewarded(session, prompts, rollouts, known, session.rewards())

        wanted = session.config.rl.batch_groups - num_kept
        session.sampling_round = SamplingRound(key, score, partial(survives, session), wanted)
    return session.sampling_round


def _committed_of_round(
    session: Session, groups: list[PromptGroup], keys: list[StageKey]
) -> Iterator[tuple[Prompt, Group]]:
    """The committed groups of a round, with their prompts."""
    prompts = {group.group_index: group.prompt for group in groups}
    for key in keys:
        yield from ((prompts[group[0].group_index], group) for group in committed_groups(session, key))


def committed_groups(session: Session, key: StageKey) -> list[Group]:
    """The groups of a shard; none where it is not committed."""
    artifact = session.run.artifact(*key)
    return (
        grouped(read_records(session.run.store, artifact[0], "rollouts.parquet", Rollout, ROLLOUTS)) if artifact else []
    )


async def _until_enough(made: ShardGroups) -> list[list[PlayedRollout]]:
    """The played rollouts of a shard; sampling stops once enough groups of the round have
    survived.
    """
    enough = made.sampling_round.begin(group.group_index for group in made.groups)

    async def on_group(index: int, played: list[PlayedRollout]) -> None:
        if not enough.is_set():
            await made.sampling_round.judge(made.groups[index].prompt, await made.rollouts(index, played))

    return await made.session.player.play(made.requests, made.groups, Hooks(on_group, enough))


async def _check_answered(
    session: Session, sampling_round: SamplingRound, keys: list[StageKey], shard: int, rollouts: Group
) -> None:
    """Returns when the rollouts of a shard may be committed (committed rollouts are not sampled
    again).

    `keys`: all shards of the round.

    A shard in which the environment failed some rollouts and answered none waits until another
    shard of its round, with a rollout that the environment answered, is committed. So each
    committed round has a rollout that can be scored, and while the environment works for no
    rollout, none is committed. UserError when it has answered no rollout of the round. EngineError
    when the other shards do not end: none reports within `rl.turns_max` times
    `engines.progress_timeout_s` after the last token of any engine, or after the last report.
    """
    key, faults = keys[shard], Counter(rollout.environment.fault for rollout in rollouts if rollout.environment)
    sampling_round.answers[key] = _any_answered(rollouts)
    del faults[""]
    if not faults or sampling_round.answers[key]:
        return
    log.warning(
        "%s: the environment has failed in every rollout that it answered, %s; waiting for the other shards",
        key.stage,
        dict(faults),
    )
    answers = sampling_round.answers
    for other in keys:  # an earlier process may have committed it
        if other not in answers and (groups := await asyncio.to_thread(committed_groups, session, other)):
            answers.setdefault(other, any(map(_any_answered, groups)))
    patience_s = session.config.rl.turns_max * session.config.engines.progress_timeout_s
    since, num_answers = time.monotonic(), len(answers)
    while not await _any_committed(session, [other for other, is_answered in answers.items() if is_answered]):
        session.check_open()
        if len(answers) == len(keys) and not any(answers.values()):
            raise UserError(
                f"{session.config.rl.world} has answered no rollout of iteration {key.iteration} without a fault;"
                f" {key.stage}: {faults.total()} of {len(rollouts)} rollouts had one ({dict(faults)}; the log says"
                " which). These rollouts are not committed. Mend the environment or agent and start again: they are"
                " sampled again"
            )
        if len(answers) != num_answers:
            since, num_answers = time.monotonic(), len(answers)
        if time.monotonic() > max(since, session.pool.heard_at) + patience_s:
            raise EngineError(
                f"{key.stage}: the environment has failed in every rollout that it answered, and no other shard ended"
                f" in {patience_s:g} s"
            )
        await asyncio.sleep(POLL_S)
    session.check_open()


async def _any_committed(session: Session, keys: list[tuple[str, int, str]]) -> bool:
    """True when one of these shards is committed."""
    for key in keys:
        if await asyncio.to_thread(session.run.artifact, *key):
            return True
    return False


def _any_answered(rollouts: Group) -> bool:
    """True when the environment took part in one of these rollouts to its end.

    The environment does not see the last turn of a rollout that ended without a stop token.
    """
    outcomes = (rollout.environment for rollout in rollouts if rollout.environment)
    return any(outcome.messages and not outcome.fault for outcome in outcomes)
