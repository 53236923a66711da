"""Over-sampling in an environment: a rollout that is cut short, in a turn or between two, goes on
in a later iteration as if it had not been."""

from __future__ import annotations

import asyncio
import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from rlpipe.base.errors import UserError
from rlpipe.base.values import JsonDict
from rlpipe.engines.client import Completion, logprobs_of, tokens_of
from rlpipe.engines.pool import GroupRequest, OnGroup, OnRollout
from rlpipe.extras.environments.protocol import Step
from rlpipe.extras.environments.turns import Turns, policy_turns
from rlpipe.records.rollout import EnvironmentOutcome
from rlpipe.stages.sampling import check_carried
from rlpipe.store.opening import planned_fork
from tests.rows import BATCH, CARRIED
from tests.rows import rollout as rollout_of
from tests.stages.test_oversampling import ONE_SHARD, PlayedPool, PlayedTokenizer, World
from tests.stages.test_turns import runs

END, TOKENS_MAX, TURNS_MAX, ITERATIONS = 0, 30, 3, 6
SETS = [
    "rl.environment=calculator", f"rl.turns_max={TURNS_MAX}", f"rl.completion_tokens_max={TOKENS_MAX}",
    "rl.oversampling=2",
    "rl.staleness_max=3", ONE_SHARD,
]  # fmt: skip


class TurnTokenizer(PlayedTokenizer):
    """What the environment says is a token a letter, between two others."""

    def encode_continuation(self, messages: list[JsonDict], tokens_max: int | None = None) -> list[int]:
        return [token for message in messages for token in (7, *map(ord, message["content"]), 8)]


class TurnPool(PlayedPool):
    """Samples token after token, each turn up to its stop token, until there is enough."""

    async def generate(
        self,
        groups: list[GroupRequest],
        on_group: OnGroup | None = None,
        enough: asyncio.Event | None = None,
        on_rollout: OnRollout | None = None,
    ) -> list[list[Completion]]:
        assert on_group and enough and on_rollout
        done = [list(group.prior) for group in groups]
        params = {(number, index): one for number, group in enumerate(groups) for index, one in enumerate(group.params)}
        for number, index in params:
            if done[number][index].finished:
                assert await on_rollout(number, index, done[number][index]) is None
        while not enough.is_set():
            await asyncio.sleep(0)
            running = [place for place in params if not done[place[0]][place[1]].finished]
            if not running:
                break
            number, index = place = self.random.choice(running[:6])
            assert done[number][index].tokens.tolist()[-1:] != [END], "a turn that has ended was answered"
            done[number][index] = longer = self._longer(done[number][index], params[place].max_new_tokens)
            if longer.finished:
                self.seeds.append(params[place].seed)
                if (again := await on_rollout(number, index, longer)) is not None:
                    params[place], done[number][index] = again
                elif all(completion.finished for completion in done[number]):
                    await on_group(number, done[number])
        return done

    def _longer(self, completion: Completion, tokens_max: int) -> Completion:
        longer = super()._longer(completion, tokens_max)
        if longer.finish_reason != "stop":
            return longer
        return Completion(
            tokens_of([*longer.tokens[:-1], END]), longer.rollout_logprobs, "stop", longer.spans, longer.engine
        )


def answer(prompt_id: str, heard: Sequence[str]) -> Step:
    """A function of the prompt and the completions, as an environment's answers must be."""
    number = zlib.crc32(f"{prompt_id} {heard}".encode())
    return Step([{"role": "user", "content": "x" * (number % 3)}], number % 4 == 0, float(number % 5), {"steps": 1.0})


@dataclass
class HonestEnvironment:
    """Made with a history, it was told the same before."""

    prompt: JsonDict
    history: Sequence[tuple[str, list[JsonDict]]]
    start_messages: list[JsonDict] | None = None
    heard: list[str] = field(default_factory=list)

    async def start(self) -> list[JsonDict]:
        return self.prompt["messages"]

    async def step(self, completion: str) -> Step:
        if self.start_messages is None:
            self.start_messages = self.prompt["messages"]
            for text, messages in self.history:
                self.heard.append(text)
                assert answer(self.prompt["prompt_id"], self.heard).messages == messages
        self.heard.append(completion)
        await asyncio.sleep(0)
        return answer(self.prompt["prompt_id"], self.heard)

    def drop(self) -> None: ...


class HonestEnvironments:
    def open(self, prompt: Any, history: Any = ()) -> HonestEnvironment:
        return HonestEnvironment(prompt, history)

    async def close(self) -> None: ...


class TurnWorld(World):
    def start(self, run: Any = None) -> None:
        super().start(run)
        played: Any = self.session
        played.data.tokenizer = TurnTokenizer()
        played.player = replace(played.player, environments=HonestEnvironments())


def check_rollout(row: JsonDict) -> None:
    """All of a rollout is what it would have been in one go."""
    tokens, mask, record = row["completion_tokens"], row["loss_mask"], json.loads(row["environment"])
    stretches, tokenizer = runs(tokens, mask), TurnTokenizer()
    assert [side for side, _ in stretches] == [1, 0] * (len(stretches) // 2) + [1]
    said = [text for side, text in stretches if side]
    assert record["num_turns"] == len(said) <= TURNS_MAX and len(tokens) <= TOKENS_MAX
    heard = [tokenizer.decode(text) for text in said if text[-1] == END]
    steps = [answer(row["prompt_id"], heard[: number + 1]) for number in range(len(heard))]
    assert record["messages"] == [step.messages for step in steps]
    assert record["reward"] == sum(step.reward for step in steps) and record["metrics"].get("steps", 0) == len(steps)
    told = [tokenizer.encode_continuation(step.messages) for step in steps]
    assert [text for side, text in stretches if not side] == told[: len(said) - 1]
    assert all((logprob < 0) == bool(side) for logprob, side in zip(row["rollout_logprobs"], mask, strict=True))
    reason = row["finish_reason"]
    assert [step.done for step in steps] == [False] * (len(steps) - 1) + [reason == "stop"] * bool(steps)
    assert reason != "turns" or len(said) == TURNS_MAX
    outcome = EnvironmentOutcome(**record)
    whole = rollout_of(row)
    turns = policy_turns(tokenizer, tokens_of(tokens), outcome.messages)  # pyright: ignore[reportArgumentType]
    assert [tokens[turn.start : turn.stop] for turn in turns] == said
    versions = [span["version"] for span in row["weight_versions"] for _ in range(span["num_tokens"])]
    for version in {*versions}:
        assert whole.num_sampled_by(version) == sum(
            side for side, at in zip(mask, versions, strict=True) if at == version
        )


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "crashes"), [(0, 0.0), (1, 0.0), (2, 0.3), (3, 0.3)])
async def test_a_rollout_that_is_cut_short_goes_on_as_if_it_had_not_been(
    tmp_path: Path, seed: int, crashes: float
) -> None:
    world = TurnWorld(tmp_path, TurnPool(Random(seed)), SETS, crashes)
    trained: list[JsonDict] = []
    carried: list[JsonDict] = []
    for iteration in range(ITERATIONS):
        told = await world.iterate(iteration)
        last = len(told["rounds"]) - 1
        trained += world.rows(iteration, f"batch/round-{last}", "batch.parquet", BATCH)
        carried += world.rows(iteration, f"batch/round-{last}", "carried.parquet", CARRIED)
    for row in trained:
        check_rollout(row)
    assert any(len({span["version"] for span in row["weight_versions"]}) > 1 for row in trained), (
        "one went on and was trained"
    )
    outcomes = [(row, json.loads(row["environment"])) for row in carried if row["environment"]]
    cut = [(row, outcome) for row, outcome in outcomes if row["finish_reason"] == "abort" and outcome["messages"]]
    assert any(row["completion_tokens"][-1] == 8 for row, _ in cut), "between two turns"
    assert any(row["completion_tokens"][-1] > 100 for row, _ in cut), "in a turn"
    assert any(row["finish_reason"] != "abort" for row, _ in outcomes), "finished, of a group that was cut short"
    assert len(set(world.pool.seeds)) == len(world.pool.seeds), "every turn of every rollout has a seed of its own"


def test_who_wrote_what_is_found_again() -> None:
    tokenizer: Any = TurnTokenizer()
    say = [{"role": "user", "content": "x"}]
    tokens = [101, END, 7, ord("x"), 8, 102, 103]
    told = tokens_of(tokens)
    assert policy_turns(tokenizer, told, [say]) == [range(2), range(5, 7)]
    assert policy_turns(tokenizer, told[:5], [say]) == [range(2), range(5, 5)], "cut short before its second turn"
    assert policy_turns(tokenizer, told[:2], [say]) == [range(2)], "ended by its environment"
    assert policy_turns(tokenizer, told[:0], []) == [range(0)]
    prior = Completion(told, logprobs_of([-1.0] * 7), "abort", [(1, 7)], "e")
    opened: list[Any] = []
    begun = Turns(tokenizer, opened.append, [1], (30, 3), prior, EnvironmentOutcome(0.0, 1, "", {}, [say]))  # type: ignore[arg-type]
    assert [*begun.policy_mask] == [1, 1, 0, 0, 0, 1, 1]
    assert opened == [[(tokenizer.decode([101, END]), say)]]
    with pytest.raises(AssertionError, match="other tokens"):
        policy_turns(tokenizer, told, [[{"role": "user", "content": "y"}]])


async def test_a_fork_with_another_environment_does_not_go_on_with_what_was_carried(tmp_path: Path) -> None:
    world = TurnWorld(tmp_path, TurnPool(Random(0)), SETS)
    at = 0
    while not (await world.iterate(at))["rollout/groups_carried"]:
        at += 1
    same = planned_fork(world.session.run, at, world.config("run=b"))
    check_carried(same)
    for sets, name in ((["rl.environment="], "''"), (["rl.environment_args={a = 1}"], "'calculator'")):
        planned = planned_fork(world.session.run, at, world.config("run=b", *sets))
        with pytest.raises(
            UserError, match=rf"rl.environment={name}: iteration {at} left \d+ groups with partial rollouts"
        ):
            check_carried(planned)
