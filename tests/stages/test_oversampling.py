"""Over-sampling through the stages, with engines that are played: whatever happens, no rollout,
token or prompt is lost."""

from __future__ import annotations

import asyncio
import tempfile
import threading
import zlib
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from rlpipe.base.errors import EngineError, UserError
from rlpipe.base.manifests import StageResult
from rlpipe.base.references import ArtifactRef
from rlpipe.base.seeds import rollout_seed
from rlpipe.base.values import JsonDict
from rlpipe.checks.preflight import preflight
from rlpipe.config.pipeline import PipelineConfig
from rlpipe.config.source import read_config
from rlpipe.data.cursor import PromptCursor
from rlpipe.engines.client import Completion, logprobs_of, tokens_of
from rlpipe.engines.pool import GroupRequest, OnGroup
from rlpipe.loop.session import Session
from rlpipe.records.prompt import Prompt
from rlpipe.rewards.score import Score
from rlpipe.stages.filtering import filter_groups
from rlpipe.stages.generation import generate, num_shards, round_at_work
from rlpipe.stages.iteration import commit_iteration, committed_before
from rlpipe.stages.sampling import sample_prompts
from rlpipe.stages.scoring import known_scores, over_rounds, score
from rlpipe.store.artifacts import read_manifest
from rlpipe.store.audit import verify
from rlpipe.store.opening import create_or_continue, fork, planned_fork
from rlpipe.store.run import Run
from tests.deadlines import DEADLINE_S, until_async
from tests.paths import PRESETS
from tests.rows import BATCH, CARRIED, ROLLOUTS, SCORES, finished, grouped, prompt_record, read_rows, rollout, spans_of
from tests.rows import PROMPTS as PROMPT_ROWS

PROMPTS = [
    Prompt(f"words/{index}", "words", [{"role": "user", "content": f"word {index}"}], "x") for index in range(11)
]
POLICY = ArtifactRef("p", "0" * 64)
LENGTH = 5
ONE_SHARD = "rl.shard_prompts=16"  # what is cut short depends on no thread's time


@dataclass
class PlayedTokenizer:
    stop_token_ids = (0,)

    def check_calls(self, messages: list[JsonDict]) -> None: ...

    def encode_prompt(self, messages: list[JsonDict]) -> list[int]:
        return [1, 2]

    def decode(self, tokens: list[int]) -> str:
        return " ".join(map(str, tokens))

    decode_plain = decode


@dataclass
class PlayedRewards:
    """A reward of 0 or 1 that is a function of the completion."""

    scored: Counter[str] = field(default_factory=Counter)
    last_error: str | None = None
    calls: list[int] = field(default_factory=list)  # how many rollouts in each
    gate: threading.Event = field(default_factory=threading.Event)  # the first call waits for it
    faults: float = 0.0  # the share of completions that cannot be scored

    def __post_init__(self) -> None:
        self.gate.set()

    def score(self, items: list[JsonDict]) -> list[Score]:
        self.calls.append(len(items))
        assert self.gate.wait(DEADLINE_S)
        self.scored.update(item["completion"] for item in items)
        return [self._score(zlib.crc32(item["completion"].encode())) for item in items]

    def _score(self, number: int) -> Score:
        return Score(None, {}, "timeout") if number // 2 % 1000 < 1000 * self.faults else Score(float(number % 2))

    def close(self) -> None: ...


@dataclass
class PlayedPool:
    """Samples tokens that no other token equals, in an order of its own; is lost at times."""

    random: Random
    version: int = 0
    token: int = 100
    faults: float = 0.0  # how often a shard is lost
    seeds: list[int] = field(default_factory=list)

    async def generate(
        self, groups: list[GroupRequest], on_group: OnGroup | None = None, enough: asyncio.Event | None = None
    ) -> list[list[Completion]]:
        done = [list(group.prior) for group in groups]
        running = [index for index, group in enumerate(done) if not all(completion.finished for completion in group)]
        for index, group in enumerate(done):  # a carried one that has all its tokens
            if index not in running and on_group:
                await on_group(index, group)
        lost_at = self.random.randrange(8) if self.random.random() < self.faults else -1
        while running and not (enough and enough.is_set()):
            await asyncio.sleep(0)
            # the first come first, as with a bound on what is in flight
            index = self.random.choice(running[:6])
            rollout = self.random.choice([i for i, completion in enumerate(done[index]) if not completion.finished])
            done[index][rollout] = self._longer(done[index][rollout], groups[index].params[rollout].max_new_tokens)
            self.seeds.append(groups[index].params[rollout].seed)
            if all(completion.finished for completion in done[index]):
                running.remove(index)
                if on_group:
                    await on_group(index, done[index])
                if (lost_at := lost_at - 1) == 0:
                    raise EngineError("every engine was lost")
        return done

    def _longer(self, completion: Completion, tokens_max: int) -> Completion:
        self.token += 1
        tokens, spans = [*completion.tokens, self.token], [*completion.spans]
        if spans and spans[-1][0] == self.version:
            spans[-1] = (self.version, spans[-1][1] + 1)
        else:
            spans.append((self.version, 1))
        reason = "stop" if self.random.random() < 0.3 else "abort"
        reason = "length" if reason == "abort" and len(tokens) == tokens_max else reason
        logprobs = [*completion.rollout_logprobs, -float(self.token)]
        return Completion(tokens_of(tokens), logprobs_of(logprobs), reason, spans, "engine-0")

    async def close(self) -> None: ...


@dataclass
class World:
    """A run whose engines and rewards are played; `session` may be replaced
    at any time, as after a crash."""

    folder: Path
    pool: PlayedPool
    sets: list[str]
    crashes: float = 0.0
    session: Session = field(init=False)
    rewards: PlayedRewards = field(default_factory=PlayedRewards)

    def __post_init__(self) -> None:
        self.start()

    def config(self, *sets: str) -> PipelineConfig:
        small = ["rl.num_prompts=4", "rl.group_size=3", "rl.shard_prompts=3", f"rl.completion_tokens_max={LENGTH}"]
        where = ["run=a", f"store=file://{self.folder}/store", "tracking.uri=", "data.words.rows_max=60"]
        return read_config("tiny", [*where, "sft.num_steps=0", *small, *self.sets, *sets], PRESETS)

    def start(self, run: Run | None = None) -> None:
        session = Session(run or create_or_continue(self.config()), self.folder / "work")
        played: Any = session
        played.pool, played.rewards = self.pool, lambda use="rl": self.rewards
        played.data.tokenizer = PlayedTokenizer()
        session.data.prompts = lambda _: [PROMPTS]
        self.session = session

    async def retried(self, stage: Any, **arguments: Any) -> StageResult:
        while True:
            try:
                return await stage(self.session, **arguments)
            except EngineError:
                continue

    def crash(self) -> bool:
        return self.pool.random.random() < self.crashes

    async def iterate(self, iteration: int) -> JsonDict:
        """The metrics of an iteration, done again from its start after each crash."""
        while (told := await self._iterate(iteration)) is None:
            self.start()
        return told

    async def _iterate(self, iteration: int) -> JsonDict | None:
        self.pool.version = iteration
        before, carried = committed_before(self.session, iteration)
        pass_rates = carried if self.session.config.rl.curriculum != "none" else None
        rounds: list[ArtifactRef] = []
        scores: list[StageResult] = []
        kept = 0
        while True:
            at = {"iteration": iteration, "round_index": len(rounds)}
            prompts = await sample_prompts(self.session, **at, before=before, carried=carried, pass_rates=pass_rates)
            rounds.append(prompts.ref)
            before, carried = prompts.ref, None
            part = {**at, "prompts": prompts.ref, "policy": POLICY, "num_kept": kept}
            shards = list(range(num_shards(self.session, prompts.metrics["num_prompts"])))
            if self.crash():  # some shards are committed, some are not
                lost = self.pool.random.sample(shards, len(shards) // 2)
                await asyncio.gather(*(self.retried(generate, **part, shard=shard) for shard in lost))
                return None
            told = await asyncio.gather(*(self.retried(generate, **part, shard=shard) for shard in shards))
            if self.crash():
                return None
            scores.append(await score(self.session, **at, prompts=prompts.ref, rollouts=[shard.ref for shard in told]))
            batch = await filter_groups(
                self.session, **at, prompts=rounds, scores=[done.ref for done in scores], pass_rates=pass_rates
            )
            kept = batch.metrics["rollout/groups_kept"]
            if not batch.metrics["needs_more"]:
                break
        metrics = over_rounds([done.metrics for done in scores]) | batch.metrics | {"train/num_tokens": 1}
        artifacts = {"prompts": prompts.ref, "batch": batch.ref}
        await commit_iteration(self.session, iteration, artifacts, metrics)
        await self.session.commits.all_committed()
        return batch.metrics | {"rounds": [ref.folder for ref in rounds]}

    def rows(self, iteration: int, stage: str, name: str, schema: Any) -> list[JsonDict]:
        ref, manifest = self.session.run.committed("rl", iteration, stage)
        present = any(record.plain_name == name for record in manifest.files)
        return read_rows(self.session.run.store, ref, name, schema) if present else []

    def rollouts(self, iteration: int, num_rounds: int) -> list[JsonDict]:
        found: list[JsonDict] = []
        for round_index in range(num_rounds):
            _, manifest = self.session.run.committed("rl", iteration, f"prompts/round-{round_index}")
            for shard in range(num_shards(self.session, manifest.metrics["num_prompts"])):
                stage = f"rollouts/round-{round_index}/shard-{shard:03d}"
                found += self.rows(iteration, stage, "rollouts.parquet", ROLLOUTS)
        return found


def tokens(rows: list[JsonDict]) -> set[int]:
    found = [token for row in rows for token in row["completion_tokens"]]
    assert len(set(found)) == len(found), "a token is there twice"
    return set(found)


def check_iteration(world: World, iteration: int, told: JsonDict, carried_before: list[JsonDict]) -> list[JsonDict]:
    """Every rollout and every token of one iteration is in one place; the rows carried on."""
    rl, last = world.session.config.rl, len(told["rounds"]) - 1
    rollouts = world.rollouts(iteration, last + 1)
    scored = [
        row for r in range(last + 1) for row in world.rows(iteration, f"scores/round-{r}", "scores.parquet", SCORES)
    ]
    trained = world.rows(iteration, f"batch/round-{last}", "batch.parquet", BATCH)
    carried = world.rows(iteration, f"batch/round-{last}", "carried.parquet", CARRIED)
    handed = {row["group_index"] for row in carried}
    left_out = [row for row in scored if rl.leaves_out(row["reward_fault"]) and row["group_index"] not in handed]
    filtered = [row for row in scored if str(row["group_index"]) in told["dropped"] and row not in left_out]
    going_on = [row for row in rollouts if row["group_index"] in handed]
    check_surplus(world, told, trained, grouped(rollouts), handed)
    assert tokens(carried_before) <= tokens(rollouts)
    assert set().union(*map(tokens, (trained, filtered, left_out, going_on))) == tokens(rollouts)
    assert sum(len(tokens(rows)) for rows in (trained, filtered, left_out, going_on)) == len(tokens(rollouts))
    assert len(tokens(carried)) + told["rollout/num_tokens_expired"] == len(tokens(going_on))
    assert tokens(carried) <= tokens(going_on)
    assert len(carried) == len(going_on) == rl.group_size * told["rollout/groups_carried"]
    assert [told[f"rollout/num_{name}"] for name in ("trained", "left_out")] == [len(trained), len(left_out)]
    counts = [told[f"rollout/num_{name}"] for name in ("trained", "filtered", "left_out", "carried", "expired")]
    assert told["rollout/num_sampled"] == sum(counts) == len(rollouts) - told["rollout/num_unsampled"]
    assert told["rollout/num_continued"] == sum(bool(row["completion_tokens"]) for row in carried_before)
    for row in trained:
        assert len(row["loss_mask"]) == len(row["completion_tokens"]) == sum(count for _, count in spans_of(row))
        assert row["rollout_logprobs"] == [-float(token) for token in row["completion_tokens"]]
        sampled_by = [version for version, count in spans_of(row) for _ in range(count)]
        assert iteration - min(sampled_by) <= rl.staleness_max
        masked = rl.mask_truncated and row["finish_reason"] == "length"
        assert row["loss_mask"] == [
            int(not masked and (rl.train_stale_tokens or version == iteration)) for version in sampled_by
        ]
        assert any(row["loss_mask"]) or row["advantage"] == 0
        assert row["weight_version"] == sampled_by[-1]
    if rl.mask_truncated:
        truncated = [[row["finish_reason"] == "length" for row in group] for group in grouped(trained)]
        assert not any(map(all, truncated)), "a group without a token to train was kept"
        assert told["rollout/num_masked"] <= sum(map(sum, truncated))
    else:
        assert told["rollout/num_masked"] == 0
    return carried


def check_surplus(
    world: World, told: JsonDict, trained: list[JsonDict], groups: list[list[JsonDict]], handed: set[int]
) -> None:
    """The batch is no larger than was asked for, of the groups that came first; what is beyond it
    waits, or is dropped and counted."""
    rl = world.session.config.rl
    wanted = max(rl.num_prompts, rl.groups_min)
    chosen = [group[0]["group_index"] for group in grouped(trained)]
    waiting = [group[0]["group_index"] for group in groups if finished(group) and group[0]["group_index"] in handed]
    dropped = [int(index) for index, reason in told["dropped"].items() if reason == "surplus"]
    assert len(chosen) == told["rollout/groups_kept"] <= wanted and chosen == sorted(chosen)
    assert handed >= {group[0]["group_index"] for group in groups if not finished(group)}
    assert told.get("rollout/groups_dropped_surplus", 0) == len(dropped)
    if waiting or dropped:
        assert len(chosen) == wanted and max(chosen) < min(waiting + dropped)
    if waiting:
        assert rl.oversampling > 1 and rl.train_stale_tokens and rl.staleness_max and len(handed) <= rl.round_groups


async def check_run(
    folder: Path, seed: int, iterations: int, faults: float, crashes: float, sets: list[str], unscored: float = 0.0
) -> World:
    world = World(
        folder, PlayedPool(Random(seed), faults=faults), sets, crashes, rewards=PlayedRewards(faults=unscored)
    )
    carried: list[JsonDict] = []
    ended, came = Counter[str](), Counter[str]()
    num_fresh = 0
    for iteration in range(iterations):
        told = await world.iterate(iteration)
        fresh = sum(read_manifest(world.session.run.store, ref).metrics["num_prompts"] for ref in told["rounds"]) - len(
            grouped(carried)
        )
        num_fresh += fresh
        carried = check_iteration(world, iteration, told, carried)
        groups = grouped(world.rollouts(iteration, len(told["rounds"])))
        handed = {row["group_index"] for row in carried}
        ended.update(group[0]["prompt_id"] for group in groups if group[0]["group_index"] not in handed)
        came.update(row["completion"] for group in groups if finished(group) for row in group)
        wanted = max(world.session.config.rl.num_prompts, world.session.config.rl.groups_min)
        if carried and not faults and not crashes:
            assert told["rollout/groups_kept"] >= wanted  # what was cut short was not needed
    ended.update(group[0]["prompt_id"] for group in grouped(carried))
    drawn, position = PromptCursor([len(PROMPTS)], [1.0], world.session.config.seed), None
    rows, position = drawn.take(drawn.start(), num_fresh)
    assert ended == Counter(PROMPTS[row].prompt_id for _, row in rows)  # none is lost, none is repeated
    last = committed_before(world.session, iterations).prompts
    assert last is not None
    assert read_manifest(world.session.run.store, last.folder).metrics["cursor"] == position
    if not faults and not crashes:
        # the stage score takes over what ended the round; a group that waits for the next iteration
        # is scored there once more
        assert world.rewards.scored == came
    return world


@pytest.mark.slow
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    seed=st.integers(0, 2**32),
    oversampling=st.sampled_from([1.0, 1.3, 2.0, 3.0]),
    staleness_max=st.integers(0, 3),
    stale=st.booleans(),
    rounds=st.sampled_from([(1, 1), (3, 4), (3, 6)]),
    disturbed=st.booleans(),
    masked=st.booleans(),
    unscored=st.sampled_from([0.0, 0.15]),
)
@example(
    seed=1, oversampling=2.0, staleness_max=1, stale=False, rounds=(3, 6), disturbed=True, masked=False, unscored=0.15
)
@example(
    seed=1, oversampling=1.0, staleness_max=1, stale=True, rounds=(1, 1), disturbed=False, masked=True, unscored=0.0
)
def test_every_rollout_token_and_prompt_is_in_exactly_one_place(
    seed: int,
    oversampling: float,
    staleness_max: int,
    stale: bool,
    rounds: tuple[int, int],
    disturbed: bool,
    masked: bool,
    unscored: float,
) -> None:
    sets = [f"rl.oversampling={oversampling}", f"rl.staleness_max={staleness_max}",
            f"rl.train_stale_tokens={str(stale).lower()}",
            f"rl.rounds_max={rounds[0]}", f"rl.groups_min={rounds[1]}",
            f"rl.mask_truncated={str(masked).lower()}"]  # fmt: skip
    chance = 0.3 if disturbed else 0.0
    with tempfile.TemporaryDirectory() as scratch:
        asyncio.run(check_run(Path(scratch), seed, 4, chance, chance, sets, unscored))


async def test_truncated_rollouts_carry_no_loss_but_count_in_their_group(tmp_path: Path) -> None:
    world = await check_run(tmp_path, 3, 4, 0.0, 0.0, ["rl.mask_truncated=true", "rl.estimator=dr_grpo"])
    batches = [world.rows(k, "batch/round-0", "batch.parquet", BATCH) for k in range(4)]
    truncated = [row for rows in batches for row in rows if row["finish_reason"] == "length"]
    assert truncated and not any(any(row["loss_mask"]) or row["advantage"] for row in truncated)
    for group in (group for rows in batches for group in grouped(rows)):
        mean = sum(row["reward"] for row in group) / len(group)
        for row in group:
            assert not any(row["loss_mask"]) or row["advantage"] == pytest.approx(row["reward"] - mean)


async def test_rollouts_go_on_with_seeds_of_the_iteration_that_continues_them(tmp_path: Path) -> None:
    world = await check_run(tmp_path, 3, 5, 0.0, 0.0, ["rl.oversampling=2.5", "rl.staleness_max=3", ONE_SHARD])
    rows = [row for k in range(5) for row in world.rows(k, "batch/round-0", "batch.parquet", BATCH)]
    continued = [row for row in rows if len(row["weight_versions"]) > 1]
    assert continued
    carried = {
        (row["prompt_id"], tuple(row["completion_tokens"])): row["seed"]
        for k in range(5)
        for row in world.rows(k, "batch/round-0", "carried.parquet", CARRIED)
        if row["completion_tokens"]
    }
    for row in continued:
        first = row["weight_versions"][0]["num_tokens"]
        assert carried[row["prompt_id"], tuple(row["completion_tokens"][:first])] != row["seed"]


async def test_a_round_that_is_not_over_sampled_is_sampled_to_its_end_with_the_seeds_it_always_had(
    tmp_path: Path,
) -> None:
    world = await check_run(tmp_path, 3, 2, 0.0, 0.0, ["rl.rounds_max=2", "rl.groups_min=4"])
    rows = world.rollouts(0, 1)
    assert [row["group_index"] for row in rows] == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
    slots = [(row["group_index"], row["prompt_id"], row["rollout_index"]) for row in rows]
    assert [row["seed"] for row in rows] == [rollout_seed(0, 0, 0, *slot) for slot in slots]
    for iteration in range(2):
        _, manifest = world.session.run.committed("rl", iteration, "batch/round-0")
        assert [record.plain_name for record in manifest.files] == ["batch.parquet"]
        _, manifest = world.session.run.committed("rl", iteration, "prompts/round-0")
        assert [record.plain_name for record in manifest.files] == ["prompts.parquet"]
        assert manifest.metrics["num_prompts"] == 4


async def test_a_fork_that_wants_less_takes_up_all_that_was_carried(tmp_path: Path) -> None:
    world = await check_run(tmp_path, 5, 2, 0.0, 0.0, ["rl.oversampling=4", "rl.staleness_max=3", ONE_SHARD])
    handed = grouped(world.rows(1, "batch/round-0", "carried.parquet", CARRIED))
    less = ["rl.oversampling=1", "rl.num_prompts=2", "rl.group_size=2", "rl.completion_tokens_max=2"]
    assert len(handed) > 2
    assert any(
        len(row["completion_tokens"]) >= 2 and row["finish_reason"] == "abort" for group in handed for row in group
    )
    forked = fork(world.session.run, 1, world.config("run=b", *less))
    world.start(forked)
    told = await world.iterate(2)
    rows = world.rollouts(2, 1)
    assert Counter(row["prompt_id"] for row in rows) == Counter(row["prompt_id"] for group in handed for row in group)
    assert told["rollout/num_continued"] == sum(bool(row["completion_tokens"]) for group in handed for row in group)
    assert told["rollout/num_sampled"] == told["rollout/num_trained"] + told["rollout/num_filtered"] == len(rows)
    assert [
        fault
        for fault in verify(forked)[1]
        if POLICY.sha256[:12] not in fault and not fault.endswith("names no policy")
    ] == []


@pytest.mark.slow
async def test_a_fork_that_cannot_go_on_with_what_was_carried_is_refused_before_it_is_written(tmp_path: Path) -> None:
    world = await check_run(tmp_path, 5, 2, 0.0, 0.0, ["rl.oversampling=4", ONE_SHARD])
    run = world.session.run
    world.start(fork(run, 1, world.config("run=finished", "rl.oversampling=1")))
    assert (await world.iterate(2))["rollout/groups_carried"] == 0
    for parent, at, sets, said in (
        (run, 1, ["rl.environment=calculator"],
         r"rl\.environment='calculator': iteration 1 left \d+ groups with partial rollouts.*fork that run at 2"),
        (run, 1, ["rl.temperature=0.5"],
         r"rl\.temperature .* partial rollouts that iteration 1 left: keep .* or set rl\.train_stale_tokens"),
        (run, 1, ["rl.temperature=0.5", "rl.train_stale_tokens=false"], ""),
        (world.session.run, 2, ["rl.environment=calculator"], ""),
    ):  # fmt: skip
        planned = planned_fork(parent, at, world.config("run=b", "rl.oversampling=1", *sets))
        if said:
            with pytest.raises(UserError, match=said):
                preflight(planned.config, planned)
        else:
            preflight(planned.config, planned)


@pytest.mark.parametrize("staleness_max", [0, 1])
async def test_tokens_expire_and_the_rollout_starts_again(tmp_path: Path, staleness_max: int) -> None:
    sets = ["rl.oversampling=4", f"rl.staleness_max={staleness_max}", "rl.filters={}", ONE_SHARD]
    world = await check_run(tmp_path, 11, 6, 0.0, 0.0, sets)
    records = [world.session.run.iteration(k) for k in range(6)]
    metrics = [record.metrics for record in records if record]
    expired = sum(told["rollout/num_expired"] for told in metrics)
    carried = sum(told["rollout/num_carried"] for told in metrics)
    assert expired > 0
    assert (carried == 0) == (staleness_max == 0)
    # over the run: what was started anew ended trained, filtered, expired, or is still carried
    started = sum(told["rollout/num_sampled"] - told["rollout/num_continued"] for told in metrics)
    ended = sum(told[f"rollout/num_{name}"] for told in metrics for name in ("trained", "filtered", "expired"))
    assert started == ended + metrics[-1]["rollout/num_carried"]


async def test_groups_that_finish_while_others_are_scored_are_scored_together(tmp_path: Path) -> None:
    world = World(tmp_path, PlayedPool(Random(2)), ["rl.oversampling=3", "rl.filters={}"])
    prompts = (await sample_prompts(world.session, iteration=0, round_index=0, before=None)).ref
    told = {row["prompt_id"]: row for row in world.rows(0, "prompts/round-0", "prompts.parquet", PROMPT_ROWS)}
    ended = [row | {"finish_reason": "stop", "environment": ""} for row in told.values()]
    groups = [
        [row | {"group_index": index, "completion": f"{index}.{each}", "completion_tokens": [1]} for each in range(3)]
        for index, row in enumerate(ended[:6])
    ]
    survivors = round_at_work(world.session, (0, 0))
    world.rewards.gate.clear()
    judging = [
        asyncio.create_task(
            survivors.judge(prompt_record(told[group[0]["prompt_id"]]), [rollout(row) for row in group])
        )
        for group in groups
    ]
    await until_async(lambda: survivors._waiting.qsize() >= 5 and world.rewards.calls)
    judging[5].cancel()  # its shard is not wanted any more
    await asyncio.wait([judging[5]])
    world.rewards.gate.set()
    await asyncio.gather(*judging[:5])
    assert world.rewards.calls == [3, 15], "the first alone, those that came meanwhile together"
    assert survivors.begin([]).is_set() and survivors._surviving == {0, 1, 2, 3, 4}
    assert len(known_scores(world.session, (0, 0))) == 18 and prompts.folder


async def test_a_scorer_that_fails_fails_those_who_wait_for_it_and_nobody_after_them(tmp_path: Path) -> None:
    world = World(
        tmp_path, PlayedPool(Random(2)), ["rl.oversampling=3", "rl.filters={}", "rl.estimator=reinforce_plus_plus"]
    )
    await sample_prompts(world.session, iteration=0, round_index=0, before=None)
    (row, *_) = world.rows(0, "prompts/round-0", "prompts.parquet", PROMPT_ROWS)
    more = {"finish_reason": "stop", "environment": "", "completion_tokens": [1]}
    survivors = round_at_work(world.session, (0, 0))
    fail_once(world.rewards)
    # the last one is there twice: its shard is tried again, and the attempt before is not over
    first, *others = [
        [rollout(row | more | {"group_index": index, "completion": f"{index}"})] for index in (0, 1, 2, 2)
    ]
    with pytest.raises(EngineError, match="closed"):
        await survivors.judge(prompt_record(row), first)
    await asyncio.gather(*(survivors.judge(prompt_record(row), group) for group in others))
    assert survivors._surviving == {1, 2}


def fail_once(rewards: PlayedRewards) -> None:
    score_well, failures = rewards.score, [EngineError("closed")]

    def fails_once(items: list[JsonDict]) -> list[Score]:
        if failures:
            raise failures.pop()
        return score_well(items)

    rewards.score = fails_once  # pyright: ignore[reportAttributeAccessIssue]


async def sampled(world: World) -> tuple[ArtifactRef, list[ArtifactRef]]:
    """The prompts of round 0 of iteration 0, and all of its rollouts, committed."""
    prompts = await sample_prompts(world.session, iteration=0, round_index=0, before=None)
    shards = range(num_shards(world.session, prompts.metrics["num_prompts"]))
    at = {"iteration": 0, "round_index": 0, "prompts": prompts.ref, "policy": POLICY}
    return prompts.ref, [(await generate(world.session, shard=shard, **at)).ref for shard in shards]


async def test_a_shard_is_committed_while_its_rewards_are_computed_and_each_is_computed_once(tmp_path: Path) -> None:
    world = World(tmp_path, PlayedPool(Random(2)), ["rl.filters={}"])
    world.rewards.gate.clear()
    prompts, shards = await sampled(world)  # comes to its end though the scorer does not answer
    world.rewards.gate.set()
    result = await score(world.session, iteration=0, round_index=0, prompts=prompts, rollouts=shards)
    assert set(world.rewards.scored.values()) == {1} and sum(world.rewards.calls) == result.metrics["num_scored"] > 0
    rows = [rollout(row) for row in world.rows(0, "scores/round-0", "scores.parquet", SCORES)]
    assert [row.reward for row in rows] == [float(zlib.crc32(row.completion.encode()) % 2) for row in rows]


async def test_what_a_scorer_could_not_do_ahead_the_stage_does(tmp_path: Path) -> None:
    world = World(tmp_path, PlayedPool(Random(2)), ["rl.filters={}"])
    fail_once(world.rewards)
    prompts, shards = await sampled(world)
    result = await score(world.session, iteration=0, round_index=0, prompts=prompts, rollouts=shards)
    assert set(world.rewards.scored.values()) == {1} and len(world.rewards.scored) == result.metrics["num_scored"]


async def test_a_process_that_takes_over_a_round_counts_what_was_committed(tmp_path: Path) -> None:
    world = World(tmp_path, PlayedPool(Random(2)), ["rl.oversampling=3", "rl.filters={}"])
    prompts = await sample_prompts(world.session, iteration=0, round_index=0, before=None)
    for shard in (0, 1):
        await generate(world.session, iteration=0, round_index=0, shard=shard, prompts=prompts.ref, policy=POLICY)
    rows = [
        row
        for shard in (0, 1)
        for row in world.rows(0, f"rollouts/round-0/shard-{shard:03d}", "rollouts.parquet", ROLLOUTS)
    ]
    whole = [row for group in grouped(rows) if finished(group) for row in group]
    assert 4 * 3 == len(whole) < len(rows)  # there was enough
    world.start()
    world.rewards.scored.clear()
    await generate(world.session, iteration=0, round_index=0, shard=3, prompts=prompts.ref, policy=POLICY)
    late = world.rows(0, "rollouts/round-0/shard-003", "rollouts.parquet", ROLLOUTS)
    assert [row["completion_tokens"] for row in late] == [[]] * 9
    assert world.rewards.scored == Counter(row["completion"] for row in whole)
