"""The stage sample_prompts: the prompts of a sampling round. Groups of partial rollouts come first,
then prompts that a cursor draws from the data sets.

A curriculum takes prompts by the running pass rate of each. The rates are stored beside the batch
of each iteration; the next iteration draws by them. All draws come from the cursor, so its position
alone says where to go on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import NamedTuple

import numpy as np

from rlpipe.base.errors import UserError
from rlpipe.base.references import ArtifactRef, FileRecord
from rlpipe.base.seeds import uniform
from rlpipe.base.values import JsonDict, Metrics
from rlpipe.config.faults import rule_for_all
from rlpipe.config.passing import passing_reward
from rlpipe.config.pipeline import PipelineConfig
from rlpipe.data.conversations import encode_asked, prompt_lengths
from rlpipe.data.cursor import CursorPosition, Draw, PromptCursor
from rlpipe.data.sources import room_for
from rlpipe.loop.session import Session
from rlpipe.loop.stage import Attempt, Produced, stage
from rlpipe.records.kinds import Float, Int32, Text
from rlpipe.records.prompt import Message, Prompt
from rlpipe.records.rollout import CarriedRollout, Group
from rlpipe.store.artifacts import read_manifest, read_records, read_records_if_any
from rlpipe.store.backend import Store
from rlpipe.store.facts import PromptsFacts, facts_of
from rlpipe.store.run import Run

CarriedGroup = list[CarriedRollout]
PASS_RATES = "pass_rates.parquet"
# the share of the newest group in the running rate: the groups before the newest four count a
# sixteenth together
NEWEST = 0.5
# curriculum weight: the least probability to be taken, so that no rate is out of date for ever
FLOOR = 0.1


@stage("rl", "prompts/round-{round_index}")
async def sample_prompts(
    session: Session,
    attempt: Attempt,
    *,
    iteration: int,
    round_index: int,
    before: ArtifactRef | None,
    carried: ArtifactRef | None = None,
    pass_rates: ArtifactRef | None = None,
) -> Produced:
    """The prompts of one sampling round; first those of the groups that go on from the previous
    iteration, whose batch is `carried`.

    `before`: the artifact of the previous round, whose cursor position is the start. `pass_rates`,
    for a curriculum, is the batch of the previous iteration too, in every round.
    """
    drawn = await asyncio.to_thread(_drawn, session, iteration, round_index, before, carried, pass_rates)
    prompts = [group[0].as_prompt for group in drawn.carried] + await encoded_prompts(session, "rl", drawn.prompts)
    assert len(prompts) == max(session.config.rl.round_groups, len(drawn.carried)), (
        "the cursor drew another number of prompts"
    )
    files = [await asyncio.to_thread(attempt.write, "prompts.parquet", prompts, Prompt)]
    if drawn.carried:
        rollouts = [rollout for group in drawn.carried for rollout in group]
        files.append(await asyncio.to_thread(attempt.write, "carried.parquet", rollouts, CarriedRollout))
    return Produced(files, drawn.metrics | {"num_prompts": len(prompts)})


class Drawn(NamedTuple):
    """The groups that go on, the prompts of new groups, and the metrics of the stage."""

    carried: list[CarriedGroup]
    prompts: list[Prompt]
    metrics: JsonDict


def _drawn(
    session: Session,
    iteration: int,
    round_index: int,
    before: ArtifactRef | None,
    carried: ArtifactRef | None,
    pass_rates: ArtifactRef | None,
) -> Drawn:
    position, metrics = _position(session, round_index, before)
    groups, sets = carried_groups(session.run.store, carried), session.data.fitting("rl")
    count = max(0, session.config.rl.round_groups - len(groups))
    draws, position, skipped = draw_prompts(session, iteration, position, count, pass_rates)
    metrics |= {name: metrics.get(name, 0) + number for name, number in skipped.items()}
    if session.config.drops("rl"):
        metrics["rollout/prompts_too_long"] = sum(map(len, session.data.prompts("rl"))) - sum(map(len, sets))
    return Drawn(groups, [sets[set_index][row_index] for set_index, row_index in draws], metrics | {"cursor": position})


def _position(session: Session, round_index: int, before: ArtifactRef | None) -> tuple[CursorPosition, JsonDict]:
    """The position where the cursor goes on, and the metrics that continue those of earlier rounds.

    UserError when the data have changed.
    """
    metrics: JsonDict = {"data_sha256": session.data.sha256, "first_group": 0}
    if before is None:
        check_lengths(session, "rl")
        return session.data.cursor.start(), metrics
    earlier = read_manifest(session.run.store, before.folder, before.sha256).metrics
    facts = facts_of(earlier, PromptsFacts, before.folder)
    if facts.data_sha256 != session.data.sha256:
        raise UserError(
            f"the data sets with use = 'rl' have changed since the prompts of {before.folder} were drawn (or, with"
            " on_too_long = 'drop', the longest prompt that is allowed has changed): restore them, or start another"
            " run"
        )
    if round_index:
        metrics |= {name: count for name, count in earlier.items() if name.startswith("rollout/")}
        metrics["first_group"] = facts.first_group + facts.num_prompts
    return facts.cursor, metrics


def carried_groups(store: Store, ref: ArtifactRef | None) -> list[CarriedGroup]:
    """The groups of an artifact's carried.parquet; none where it has no such file."""
    rollouts = read_records_if_any(store, ref, "carried.parquet", CarriedRollout) if ref else []
    return [list(group) for _, group in groupby(rollouts, key=lambda rollout: rollout.group_index)]


def prompts_by_id(store: Store, refs: list[ArtifactRef]) -> dict[str, Prompt]:
    """The prompts of sampling rounds."""
    return {prompt.prompt_id: prompt for ref in refs for prompt in read_records(store, ref, "prompts.parquet", Prompt)}


def check_carried(run: Run) -> None:
    """UserError when a fork cannot continue the partial rollouts of its parent, because its
    settings sample differently.
    """
    at, now = run.fork_at, run.config.rl
    record = run.iteration(at) if run.parent is not None and at >= 0 else None
    if record is None or run.redo or now.rollouts_from:
        return
    num_groups = len(carried_groups(run.store, record.artifact("batch")))
    before = run.owner("rl", at, "rollouts").config.rl
    if num_groups and now.overlap != "none":
        raise UserError(
            f"rl.overlap={now.overlap!r}: iteration {at} left {num_groups} groups with partial rollouts, and with this"
            " overlap they would be older than the rollouts that they are trained with: fork at an iteration whose"
            " rollout/groups_carried is 0, or with rl.overlap = 'none'"
        )
    differ = [name for name in ("temperature", "top_p") if getattr(before, name) != getattr(now, name)]
    if num_groups and (before.environment, before.environment_args) != (now.environment, now.environment_args):
        raise UserError(
            f"rl.environment={now.environment!r}: iteration {at} left {num_groups} groups with partial rollouts that"
            " began without this environment, or with other arguments, and a rollout cannot continue in another"
            f" environment. Two ways out: fork with rl.oversampling = 1 and rl.num_iterations = {at + 2}, which"
            f" finishes these groups, and then fork that run at {at + 1}; or fork at an iteration whose"
            " rollout/groups_carried is 0"
        )
    if num_groups and differ and now.train_stale_tokens:
        raise UserError(
            f"rl.{differ[0]} has another value in the partial rollouts that iteration {at} left: keep that value, or"
            " set rl.train_stale_tokens = false, so that their logprobs are not trained on"
        )


def check_lengths(session: Session, use: str) -> None:
    """UserError when prompts leave no room for a completion; those of an environment are checked
    when they are drawn.
    """
    if not session.config.rl.environment:
        prompts = [prompt for rows in session.data.fitting(use) for prompt in rows]
        lengths = list(prompt_lengths(session.data.tokenizer, prompts))
        check_room(session.config, use, prompts, lengths)


def check_room(config: PipelineConfig, use: str, prompts: Sequence[Prompt], lengths: Sequence[int]) -> None:
    """UserError naming the first prompt of a use that is too long for any engine, and their number.

    `lengths`: tokens of each prompt.
    """
    room = room_for(config, use)
    too_long = [(prompt, length) for prompt, length in zip(prompts, lengths, strict=True) if length > room]
    if too_long:
        prompt, length = too_long[0]
        section = "evaluation" if use == "evaluation" and config.evaluation.completion_tokens_max else "rl"
        others = f" (and {len(too_long) - 1} others are too long)" if len(too_long) > 1 else ""
        raise UserError(
            f"data set {prompt.source}: prompt {prompt.prompt_id} has {length} tokens; model.context_tokens_max less"
            f" {section}.completion_tokens_max leaves {room}{others}: set data.{prompt.source}.on_too_long = 'drop', a"
            f" smaller {section}.completion_tokens_max or a larger context (a run that has begun keeps its context; the"
            " others change with `rlpipe fork RUN --at sft --run NEW --set ...`)"
        )


async def encoded_prompts(session: Session, use: str, prompts: list[Prompt]) -> list[Prompt]:
    """The prompts of a use with the tokens that the policy is given: those of the environment's
    first messages, where there is an environment.
    """
    messages = await session.player.first_messages(prompts)

    def encoded(prompt: Prompt, asking: list[Message]) -> Prompt:
        tools = None if session.config.rl.environment else prompt.tools  # an environment's prompt has its own tools
        tokens = encode_asked(session.data.tokenizer, prompt.prompt_id, asking, tools)
        check_room(session.config, use, [prompt], [len(tokens)])
        return replace(prompt, prompt_tokens=np.array(tokens, dtype=np.int32))

    return await asyncio.to_thread(lambda: [encoded(*pair) for pair in zip(prompts, messages, strict=True)])


@dataclass(frozen=True)
class PassRate:
    """The pass rate of a prompt, and the number of groups that it is known from.

    Example: PassRate("words/17", 3, 0.375).
    """

    prompt_id: Text
    num_groups: Int32
    pass_rate: Float


PassRates = dict[str, PassRate]  # by prompt id


def read_pass_rates(session: Session, batch: ArtifactRef | None) -> PassRates:
    """The pass rates beside a batch; none where there is no batch yet, or its run has no
    curriculum.
    """
    rates = read_records_if_any(session.run.store, batch, PASS_RATES, PassRate) if batch is not None else []
    return {rate.prompt_id: rate for rate in rates}


def write_pass_rates(
    session: Session, attempt: Attempt, previous: ArtifactRef | None, groups: list[Group]
) -> tuple[list[FileRecord], Metrics]:
    """Writes the pass rates of `previous`, updated with all finished groups of this iteration, kept
    or dropped; returns the file and metrics.
    """
    if session.config.rl.curriculum == "none":
        return [], {}
    threshold, rl = passing_reward(session.config, "rl"), session.config.rl

    def is_ignored(fault: str) -> bool:
        return rl.leaves_out(fault) or bool(rule_for_all(rl.faults))  # as in older runs, whatever the rule

    shares: list[tuple[str, float]] = []
    for group in groups:
        scored = [rollout for rollout in group if not (rollout.reward_fault and is_ignored(rollout.reward_fault))]
        if scored:
            shares.append(
                (group[0].prompt_id, float(np.mean([(rollout.reward or 0.0) >= threshold for rollout in scored])))
            )
    rates = updated(read_pass_rates(session, previous), shares)
    return [attempt.write(PASS_RATES, [rates[name] for name in sorted(rates)], PassRate)], {
        "rollout/prompts_known": len(rates)
    }


def draw_prompts(
    session: Session, iteration: int, position: CursorPosition, count: int, previous: ArtifactRef | None
) -> tuple[list[Draw], CursorPosition, dict[str, int]]:
    """`count` draws after `position`, the position after them, and the number of prompts that the
    curriculum skipped (nothing where there is none).
    """
    rl, sets = session.config.rl, session.data.fitting("rl")
    if rl.curriculum == "none":
        return *session.data.cursor.take(position, count), {}
    rates = read_pass_rates(session, previous)

    def accepts(draw: Draw, place: int) -> bool:
        set_index, row_index = draw
        prompt_id = sets[set_index][row_index].prompt_id
        probability = chance(rates.get(prompt_id), rl.curriculum, rl.pass_rate_low, rl.pass_rate_high)
        return uniform(session.config.seed, "curriculum", iteration, prompt_id, place) < probability

    return take_accepted(session.data.cursor, position, count, accepts)


def updated(rates: PassRates, shares: Iterable[tuple[str, float]]) -> PassRates:
    """The rates after finished groups, given as (prompt id, share of its rollouts that passed), in
    order.

    The first group sets the rate; each later one moves it halfway towards its own (an exponential
    moving average).
    """
    after = dict(rates)
    for prompt_id, share in shares:
        assert 0.0 <= share <= 1.0, share
        known = after.get(prompt_id, PassRate(prompt_id, 0, share))
        rate = known.pass_rate + NEWEST * (share - known.pass_rate)
        after[prompt_id] = PassRate(prompt_id, known.num_groups + 1, rate)
    return after


def chance(known: PassRate | None, curriculum: str, low: float, high: float) -> float:
    """The probability that a drawn prompt is taken; 1 for a prompt that was never tried.

    band: 1 within low..high, else 0. weight: 4p(1-p), which is 1 at p = 1/2, but never below FLOOR.
    """
    assert curriculum in ("band", "weight"), curriculum
    if known is None:
        return 1.0
    if curriculum == "band":
        return float(low <= known.pass_rate <= high)
    return max(FLOOR, 4 * known.pass_rate * (1 - known.pass_rate))


def take_accepted(
    cursor: PromptCursor, position: CursorPosition, count: int, accepts: Callable[[Draw, int], bool]
) -> tuple[list[Draw], CursorPosition, dict[str, int]]:
    """`count` draws after `position` that `accepts(draw, its place in the stream)`, the position
    after the last one looked at, and how many were skipped.

    Looks at no more than one pass over the data (as many draws as there are rows). When that gives
    too few, skipped draws are taken after all, in order, and counted as refilled. Each place of the
    stream is taken or skipped once.
    """
    taken: list[Draw] = []
    skipped: list[Draw] = []
    looks_max = max(count, sum(cursor.sizes))
    while len(taken) < count and len(taken) + len(skipped) < looks_max:
        place = position["drawn"]
        [draw], position = cursor.take(position, 1)
        (taken if accepts(draw, place) else skipped).append(draw)
    refilled = skipped[: count - len(taken)]
    assert len(taken) + len(refilled) == count, "a pass over the data holds enough"
    counts = {"rollout/prompts_skipped": len(skipped) - len(refilled), "rollout/prompts_refilled": len(refilled)}
    return taken + refilled, position, counts
