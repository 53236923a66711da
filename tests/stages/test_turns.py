"""Rollouts of several turns: every token is accounted for, once, whoever wrote it, and every
rollout ends for a reason that is told.

The engine is played, so that what it samples is known; so are the environments of the property,
which need no process to be random.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

import psutil
import pytest
import pytest_asyncio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from rlpipe.base.errors import EngineError, UserError
from rlpipe.base.references import ArtifactRef
from rlpipe.base.values import JsonDict
from rlpipe.checks.preflight import preflight
from rlpipe.config.pipeline import PipelineConfig
from rlpipe.config.source import read_config
from rlpipe.engines.client import Completion, logprobs_of, tokens_of
from rlpipe.engines.pool import GroupRequest, OnGroup, OnRollout
from rlpipe.extras.environments.pool import EnvironmentFault
from rlpipe.extras.environments.protocol import Step
from rlpipe.loop.session import Session
from rlpipe.processes.child import wait_for_end
from rlpipe.records.prompt import Prompt
from rlpipe.records.rollout import Rollout
from rlpipe.records.turns import turns_of
from rlpipe.stages import generation
from rlpipe.stages.generation import generate, round_at_work
from rlpipe.stages.rollouts import environment_metrics
from rlpipe.stages.sampling import sample_prompts
from rlpipe.stages.scoring import score, score_rollouts
from rlpipe.store.opening import create_or_continue
from tests.deadlines import SHORT_S, until_async
from tests.paths import PRESETS
from tests.rows import PROMPTS, ROLLOUTS, SCORES, grouped, read_rows, rollout

POLICY = ArtifactRef("p", "0" * 64)
PROMPTS_MADE = [
    Prompt(f"products/{index}", "products", [{"role": "user", "content": f"{index}*3"}], str(index * 3))
    for index in range(8)
]
TOKENS_MAX, TURNS_MAX, END = 24, 3, 9


class PlayedTokenizer:
    """Tokens are numbers; text is numbers too.

    What the environment says is one token a letter, between 7 and 8.
    """

    stop_token_ids = (END,)

    def check_calls(self, messages: list[JsonDict]) -> None: ...

    def encode_prompt(self, messages: list[JsonDict], tokens_max: int | None = None) -> list[int]:
        return [1, *map(ord, messages[-1]["content"]), 2]

    def encode_continuation(self, messages: list[JsonDict], tokens_max: int | None = None) -> list[int]:
        return [token for message in messages for token in (7, *map(ord, message["content"]), 8)]

    def decode(self, tokens: list[int]) -> str:
        return " ".join(map(str, tokens))

    decode_plain = decode


@dataclass
class PlayedPool:
    """Samples tokens that no other token equals, and remembers which;
    rollouts in an order of their own."""

    random: Random
    version: int = 0
    heard_at: float = 0.0
    token: int = 1000
    turns: dict[tuple[int, ...], list[list[int]]] = field(default_factory=dict)  # by what was there before
    seeds: list[int] = field(default_factory=list)

    async def generate(
        self, groups: list[GroupRequest], *, on_group: OnGroup, enough: Any, on_rollout: OnRollout
    ) -> list[list[Completion]]:
        done = [list(group.prior) for group in groups]
        running = {
            (number, index): (params, group.prior[index])
            for number, group in enumerate(groups)
            for index, params in enumerate(group.params)
        }
        while running:
            number, index = self.random.choice(list(running))
            params, prior = running.pop((number, index))
            assert not prior.finished
            done[number][index] = self._sampled(prior, params.max_new_tokens, params.seed)
            if again := await on_rollout(number, index, done[number][index]):
                running[number, index] = again
        return done

    def _sampled(self, prior: Completion, tokens_max: int, seed: int) -> Completion:
        room = tokens_max - len(prior.tokens)
        assert room > 0, "nothing over the limit is sent"
        self.seeds.append(seed)
        wanted = self.random.randint(1, 10)
        tokens = [self.token + index for index in range(min(room, wanted))]
        self.token += len(tokens)
        logprobs, reason = [-float(token) for token in tokens], "stop" if wanted <= room else "length"
        rest = Completion(tokens_of(tokens), logprobs_of(logprobs), reason, [(0, len(tokens))], "e")
        return prior.then(rest)

    async def close(self) -> None: ...


@dataclass
class PlayedEnvironment:
    """Answers at random, and fails at random; remembers what it was told."""

    random: Random
    prompt: JsonDict
    start_messages: list[JsonDict] | None = None
    told: list[tuple[str, Step | str]] = field(default_factory=list)

    async def start(self) -> list[JsonDict]:
        return self.prompt["messages"]

    async def step(self, completion: str) -> Step:
        await asyncio.sleep(0)
        self.start_messages = self.prompt["messages"]
        kind = self.random.choice(["done", "go", "go", "go", "fault"])
        if kind == "fault":
            self.told.append((completion, "environment_error"))
            raise EnvironmentFault("environment_error", "played")
        messages = [
            {"role": "user", "content": "x" * self.random.randint(0, 4)} for _ in range(self.random.randint(1, 2))
        ]
        step = Step(messages, kind == "done", float(self.random.randint(0, 3)), {"calls": 1.0})
        self.told.append((completion, step))
        return step

    def drop(self) -> None:
        if self.told[-1:] != [("dropped", "")]:
            self.told.append(("dropped", ""))


@dataclass
class PlayedEnvironments:
    random: Random
    opened: list[PlayedEnvironment] = field(default_factory=list)

    def open(self, prompt: JsonDict, history: Any = ()) -> PlayedEnvironment:
        assert not history
        self.opened.append(PlayedEnvironment(self.random, prompt))
        return self.opened[-1]

    async def close(self) -> None: ...


def config(tmp_path: Path, *sets: str) -> PipelineConfig:
    small = ["rl.num_prompts=4", "rl.group_size=3", "rl.shard_prompts=4", f"rl.completion_tokens_max={TOKENS_MAX}",
             f"rl.turns_max={TURNS_MAX}"]  # fmt: skip
    return read_config(
        "calculator", ["run=a", f"store=file://{tmp_path}/store", "tracking.uri=", *small, *sets], PRESETS
    )


def made_session(tmp_path: Path, random: Random, *sets: str) -> Session:
    session: Any = Session(create_or_continue(config(tmp_path, *sets)), tmp_path / "work")
    session.pool = PlayedPool(random)
    session.data.tokenizer = PlayedTokenizer()
    session.data.prompts = lambda _: [PROMPTS_MADE]
    return session


async def sampled(session: Session) -> tuple[ArtifactRef, ArtifactRef]:
    """The prompts and the rollouts of one round."""
    prompts = await sample_prompts(session, iteration=0, round_index=0, before=None)
    return prompts.ref, (
        await generate(session, iteration=0, round_index=0, shard=0, prompts=prompts.ref, policy=POLICY)
    ).ref


def runs(tokens: list[int], mask: list[int]) -> list[tuple[int, list[int]]]:
    """(mask, tokens) of each stretch written by one side."""
    pairs = itertools.groupby(zip(mask, tokens, strict=True), key=lambda pair: pair[0])
    return [(side, [token for _, token in pairs]) for side, pairs in pairs]


@pytest.mark.slow
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 2**32))
def test_every_token_is_accounted_for(tmp_path_factory: pytest.TempPathFactory, seed: int) -> None:
    random = Random(seed)
    session: Any = made_session(tmp_path_factory.mktemp("turns"), random)
    session.player = replace(session.player, environments=PlayedEnvironments(random))
    _, ref = asyncio.run(sampled(session))
    rows = read_rows(session.run.store, ref, "rollouts.parquet", ROLLOUTS)
    environments = session.player.environments.opened[4:]  # the first ones asked the prompts
    assert len(rows) == len(environments) == 12
    for row, environment in zip(rows, environments, strict=True):
        check_rollout(row, environment)
    assert len(set(session.pool.seeds)) == len(session.pool.seeds), "every turn of every rollout has a seed of its own"


def check_rollout(row: JsonDict, environment: PlayedEnvironment) -> None:
    tokens, mask = row["completion_tokens"], row["loss_mask"]
    stretches = runs(tokens, mask)
    *told, dropped = environment.told
    assert dropped == ("dropped", ""), "its process may forget it"
    said = [text for side, text in stretches if side]
    steps = [step for _, step in told]
    # the policy's tokens are those sampled, in order, and the
    # environment was told each turn of them
    assert all(token >= 1000 for text in said for token in text) and [*map(PlayedTokenizer().decode, said)][
        : len(told)
    ] == [text for text, _ in told]
    # the environment's tokens are its messages; those of its last answer are not put
    answers = [PlayedTokenizer().encode_continuation(step.messages) for step in steps if isinstance(step, Step)]
    assert [text for side, text in stretches if not side] == answers[: len(said) - 1]
    assert [side for side, _ in stretches] == [1, 0] * (len(said) - 1) + [1]
    assert row["rollout_logprobs"] == [-float(token) if side else 0.0 for side, token in zip(mask, tokens, strict=True)]
    assert row["weight_versions"] == [{"version": 0, "num_tokens": len(tokens)}] and len(tokens) <= TOKENS_MAX
    record = json.loads(row["environment"])
    whole = [step for step in steps if isinstance(step, Step)]
    assert record["num_turns"] == len(said) <= TURNS_MAX and record["reward"] == sum(step.reward for step in whole)
    assert record["messages"] == [step.messages for step in whole] and record["metrics"].get("calls", 0) == len(whole)
    check_end(row, record, steps, answers, len(said))
    check_turns(row, [*map(PlayedTokenizer().decode, said)], [step.messages for step in whole])


def check_turns(row: JsonDict, said: list[str], answers: list[list[JsonDict]]) -> None:
    """Who said what is known of the stored row alone: also where nothing of it is trained, or a
    token of the policy was certain."""
    turns = [turn for text, answer in zip(said, [*answers, []], strict=False)
             for turn in ({"role": "assistant", "content": text}, *answer)]  # fmt: skip
    expected = turns[: len(turns) - len(answers[len(said) - 1])] if len(answers) == len(said) else turns
    assert turns_of(rollout(row), PlayedTokenizer().decode, by_agent=False) == expected
    untrained = {**row, "loss_mask": [0] * len(row["loss_mask"])}
    assert turns_of(rollout(untrained), PlayedTokenizer().decode, by_agent=False) == expected
    if len(said[0].split()) > 2:
        logprobs = [0.0 if place == 1 else logprob for place, logprob in enumerate(row["rollout_logprobs"])]
        certain = {**untrained, "rollout_logprobs": logprobs}
        assert turns_of(rollout(certain), PlayedTokenizer().decode, by_agent=False) == expected


def check_end(row: JsonDict, record: JsonDict, steps: list[Any], answers: list[list[int]], num_turns: int) -> None:
    reason, last = row["finish_reason"], steps[-1] if steps else None
    assert record["fault"] == ("environment_error" if reason == "fault" else "")
    if reason == "fault":
        assert last == "environment_error"
    elif reason == "stop":
        assert isinstance(last, Step) and last.done
    elif reason == "turns":
        assert isinstance(last, Step) and not last.done and num_turns == TURNS_MAX
    else:
        assert reason == "length"
        full = len(row["completion_tokens"]) == TOKENS_MAX
        assert full or len(row["completion_tokens"]) + len(answers[-1]) >= TOKENS_MAX


ENVIRONMENT = '''
import pathlib, time
from rlpipe.extras.environments.protocol import Step

class Fickle:
    """Done at once, or fails for the rollouts whose first token is divisible by `fails`."""
    def __init__(self, fails): self.fails = fails
    def start(self, prompt): return [{"role": "user", "content": "now: " + prompt["messages"][0]["content"]}]
    def step(self, completion):
        if int(completion.split()[0]) % self.fails == 0: raise KeyError("gone")
        return Step(done=True, reward=2.0, metrics={"seen": 3})

class Moody:
    """Fails in every step for the prompts that the file `bad` lists, and starts too slowly as often as the file `slow` says."""
    def start(self, prompt):
        self.prompt_id = prompt["prompt_id"]
        slow = pathlib.Path("slow")
        if slow.exists() and (left := int(slow.read_text())):
            slow.write_text(str(left - 1))
            time.sleep(600)
        return prompt["messages"]
    def step(self, completion):
        if self.prompt_id in pathlib.Path("bad").read_text().split(): raise KeyError("gone")
        return Step(done=True, reward=2.0)

class Other(Fickle):
    def start(self, prompt): return [{"role": "user", "content": "then"}]
'''  # noqa: E501


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "fickle.py").write_text(ENVIRONMENT)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest_asyncio.fixture
async def session(folder: Path) -> AsyncIterator[Session]:
    made = made_session(
        folder, Random(1), "rl.environment=fickle:Fickle", "rl.environment_args={fails = 3}", "rl.faults={policy = -1}"
    )
    yield made
    await made.close()


async def test_what_the_environment_asks_is_what_is_stored_and_faults_get_the_fallback(session: Session) -> None:
    prompts, rollouts = await sampled(session)
    for row in read_rows(session.run.store, prompts, "prompts.parquet", PROMPTS):
        (message,) = json.loads(row["messages"])
        assert row["prompt_tokens"] == [1, *map(ord, "now: " + message["content"]), 2]
    scores = (await score(session, iteration=0, round_index=0, prompts=prompts, rollouts=[rollouts])).metrics
    ref = session.run.committed("rl", 0, "scores/round-0")[0]
    rows = read_rows(session.run.store, ref, "scores.parquet", SCORES)
    failed = [row for row in rows if row["completion_tokens"][0] % 3 == 0]
    assert 0 < len(failed) < len(rows) == 12
    for row in rows:
        fault = row in failed
        assert (row["reward"], row["reward_fault"]) == ((-1.0, "environment_error") if fault else (2.0, ""))
        assert row["finish_reason"] == ("fault" if fault else "stop")
    assert scores["rollout/fault_environment_error"] == len(failed) and scores["rollout/turns_mean"] == 1.0
    assert scores["rollout/environment_seen_mean"] == pytest.approx(3 * (12 - len(failed)) / 12)
    assert scores["rollout/num_tokens"] == sum(len(row["completion_tokens"]) for row in rows)


def moody(folder: Path, *sets: str) -> Session:
    small = ["rl.environment=fickle:Moody", "rl.environment_args={}", "rl.shard_prompts=2"]
    return made_session(folder, Random(1), *small, *sets)


def fails_for(session: Session, prompts: ArtifactRef, *slots: int) -> None:
    rows = read_rows(session.run.store, prompts, "prompts.parquet", PROMPTS)
    Path("bad").write_text(" ".join(rows[slot]["prompt_id"] for slot in slots))


def shard_of(session: Session, shard: int) -> ArtifactRef | None:
    found = session.run.artifact("rl", 0, f"rollouts/round-0/shard-{shard:03d}")
    return found[0] if found else None


@pytest.mark.slow
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
async def test_a_shard_that_its_environment_failed_is_committed_after_one_that_it_answered(
    folder: Path, order: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generation, "POLL_S", 0.01)
    session = moody(folder)
    prompts = (await sample_prompts(session, iteration=0, round_index=0, before=None)).ref
    fails_for(session, prompts, 0, 1)
    failing = asyncio.create_task(
        generate(session, iteration=0, round_index=0, shard=0, prompts=prompts, policy=POLICY)
    )
    if order == (0, 1):
        await until_async(lambda: round_at_work(session, (0, 0)).answers or failing.done())
        await asyncio.sleep(0.2)  # many times POLL_S
        assert not failing.done() and shard_of(session, 0) is None
    done = [await generate(session, iteration=0, round_index=0, shard=1, prompts=prompts, policy=POLICY), await failing]
    told = (
        await score(
            session, iteration=0, round_index=0, prompts=prompts, rollouts=[each.ref for each in reversed(done)]
        )
    ).metrics
    assert told["rollout/fault_environment_error"] == 6 and told["rollout/reward_mean"] == 1.0
    await session.close()


@pytest.mark.slow
async def test_a_shard_that_an_earlier_process_committed_counts(folder: Path) -> None:
    session = moody(folder)
    prompts = (await sample_prompts(session, iteration=0, round_index=0, before=None)).ref
    fails_for(session, prompts, 0, 1)
    await generate(session, iteration=0, round_index=0, shard=1, prompts=prompts, policy=POLICY)
    await session.close()
    session = moody(folder)
    await generate(session, iteration=0, round_index=0, shard=0, prompts=prompts, policy=POLICY)
    assert shard_of(session, 0)
    await session.close()


@pytest.mark.slow
async def test_a_shard_that_reported_an_answer_and_was_not_committed_proves_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generation, "POLL_S", 0.01)
    session = moody(folder)
    prompts = (await sample_prompts(session, iteration=0, round_index=0, before=None)).ref
    fails_for(session, prompts, 0, 1)
    answers = round_at_work(session, (0, 0)).answers
    answers["rl", 0, "rollouts/round-0/shard-001"] = True  # and its process dies right here
    failing = asyncio.create_task(
        generate(session, iteration=0, round_index=0, shard=0, prompts=prompts, policy=POLICY)
    )
    await until_async(lambda: len(answers) == 2)
    await asyncio.sleep(0.2)  # many times POLL_S
    assert not failing.done() and shard_of(session, 0) is None
    await session.close()
    with pytest.raises(EngineError, match="closed"):
        await failing


async def test_a_round_that_its_environment_failed_is_not_committed_and_sampled_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generation, "POLL_S", 0.01)
    session = moody(folder)
    prompts = (await sample_prompts(session, iteration=0, round_index=0, before=None)).ref
    fails_for(session, prompts, 0, 1, 2, 3)
    told = await asyncio.gather(
        *(
            generate(session, iteration=0, round_index=0, shard=shard, prompts=prompts, policy=POLICY)
            for shard in (0, 1)
        ),
        return_exceptions=True,
    )
    for shard, error in enumerate(told):
        assert isinstance(
            error, UserError
        ) and f"shard-00{shard}: 6 of 6 rollouts had one ({{'environment_error': 6}}" in str(error)
        assert "answered no rollout of iteration 0" in str(error) and "start again" in str(error)
    assert shard_of(session, 0) is shard_of(session, 1) is None
    await session.close()
    session = moody(folder)  # the same run, by another process
    fails_for(session, prompts, 0, 1)
    told = await asyncio.gather(
        *(
            generate(session, iteration=0, round_index=0, shard=shard, prompts=prompts, policy=POLICY)
            for shard in (0, 1)
        )
    )
    assert (
        await score(session, iteration=0, round_index=0, prompts=prompts, rollouts=[each.ref for each in told])
    ).metrics["rollout/reward_mean"] == 1.0
    await session.close()


async def test_the_wait_for_the_other_shards_has_an_end(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "POLL_S", 0.01)
    session = moody(folder, "engines.progress_timeout_s=0.05")
    prompts = (await sample_prompts(session, iteration=0, round_index=0, before=None)).ref
    fails_for(session, prompts, 0, 1)
    with pytest.raises(EngineError, match="no other shard ended"):
        await generate(session, iteration=0, round_index=0, shard=0, prompts=prompts, policy=POLICY)
    failing = asyncio.create_task(
        generate(session, iteration=0, round_index=0, shard=0, prompts=prompts, policy=POLICY)
    )
    await session.close()
    with pytest.raises(EngineError, match="closed"):
        await failing
    assert shard_of(session, 0) is None


def test_a_rollout_that_the_environment_never_heard_proves_nothing() -> None:
    def row(fault: str, messages: list[Any]) -> Rollout:
        return rollout({"environment": json.dumps({"fault": fault, "messages": messages})})

    never_heard, failed, failed_later, answered = (
        row("", []),
        row("environment_error", []),
        row("environment_error", [[]]),
        row("", [[]]),
    )
    assert not generation._any_answered([never_heard, failed, failed_later, rollout({"environment": ""})])
    assert generation._any_answered([failed, answered])


async def test_a_committed_round_of_faults_says_so(session: Session) -> None:
    rows = [rollout({"prompt_id": "a", "environment": json.dumps({"fault": "environment_crash"})})] * 2
    with pytest.raises(
        UserError, match=r"2 of 2 rollouts could not be scored .*environment_crash.* Mend it .*fork of a"
    ):
        await asyncio.to_thread(score_rollouts, session, {}, rows, {})


@pytest.mark.slow
async def test_a_start_that_takes_too_long_is_tried_once_more(folder: Path) -> None:
    Path("bad").touch()
    Path("slow").write_text("1")
    session = moody(folder, "rl.num_prompts=1", f"rl.environment_timeout_s={SHORT_S}")
    assert (await sample_prompts(session, iteration=0, round_index=0, before=None)).metrics["num_prompts"] == 1
    Path("slow").write_text("2")
    with pytest.raises(
        UserError, match=r"environment_timeout: .* set a longer rl.environment_timeout_s, and start again"
    ):
        await sample_prompts(session, iteration=1, round_index=0, before=None)
    await session.close()


async def test_without_a_fallback_a_fault_ends_the_run_before_the_shard_is_committed(folder: Path) -> None:
    path = "rl.environment=fickle:Fickle"
    session = made_session(folder, Random(1), path, "rl.environment_args={fails = 3}", "rl.faults={policy = 'stop'}")
    with pytest.raises(UserError, match=r"of 12 rollouts had a fault .*environment_error"):
        await sampled(session)
    assert session.run.artifact("rl", 0, "rollouts/round-0/shard-000") is None
    await session.close()


async def test_an_environment_that_asks_something_else_later_is_not_the_policy_s_fault(session: Any) -> None:
    prompts = await sample_prompts(session, iteration=0, round_index=0, before=None)
    for worker in session.player.environments._workers:
        worker.code.hello["path"] = "fickle:Other"
        keeper = worker._process.keeper
        psutil.Process(keeper.pid).children()[0].kill()
        wait_for_end(keeper)
    with pytest.raises(UserError, match="'environment_unavailable': "):
        await generate(session, iteration=0, round_index=0, shard=0, prompts=prompts.ref, policy=POLICY)


async def test_a_prompt_that_an_environment_cannot_start_with_is_named(folder: Path) -> None:
    session: Any = made_session(folder, Random(1), "rl.environment=fickle:Fickle", "rl.environment_args={fails = 3}")
    session.data.prompts = lambda _: [[Prompt("products/0", "products", [], "x")]]
    with pytest.raises(UserError, match=r"cannot start with prompt products/0 \(environment_error: IndexError"):
        await sample_prompts(session, iteration=0, round_index=0, before=None)
    await session.close()


def test_metrics_are_means_over_rollouts_and_none_without_an_environment() -> None:
    assert environment_metrics([rollout({"environment": ""})]) == {}
    rows = [
        rollout(
            {
                "environment": json.dumps({"num_turns": n, "reward": 1.0, "metrics": {"calls": 2.0} if n > 1 else {}}),
                "finish_reason": "turns" if n > 1 else "stop",
            }
        )
        for n in (1, 3)
    ]
    told = {
        "turns_mean": 2.0,
        "environment_reward_mean": 1.0,
        "environment_calls_mean": 1.0,
        "out_of_turns_fraction": 0.5,
    }
    assert environment_metrics(rows) == told
    assert environment_metrics(rows[:1], names_from=rows) == told | {
        "turns_mean": 1.0, "environment_calls_mean": 0.0, "out_of_turns_fraction": 0.0
    }  # fmt: skip


@pytest.mark.parametrize(
    ("sets", "said"),
    [
        (["rl.environment="], "set rl.environment"),
        (
            ["rl.environment=", "rl.environment_args={a = 1}", "rl.rewards={exact = 1.0}"],
            "rl.environment_args: there is no environment to give them to",
        ),
    ],
)
def test_combinations_that_make_no_sense(tmp_path: Path, sets: list[str], said: str) -> None:
    with pytest.raises((ValidationError, UserError), match=said):
        config(tmp_path, *sets)


@pytest.mark.slow
def test_preflight_tries_the_environment_and_the_template(folder: Path) -> None:
    preflight(config(folder))
    with pytest.raises(UserError, match="there is no environment 'abacus'"):
        preflight(config(folder, "rl.environment=abacus"))
    with pytest.raises(UserError, match="does not continue a conversation with messages of role tool"):
        preflight(
            config(
                folder,
                "model.chat_template={% for m in messages if m.role != 'tool' %}{{ m.content }}<|end|>{% endfor %}",
            )
        )


def test_groups_are_stored_whole(tmp_path: Path) -> None:
    random = Random(5)
    session: Any = made_session(tmp_path, random)
    session.player = replace(session.player, environments=PlayedEnvironments(random))
    _, ref = asyncio.run(sampled(session))
    rows = read_rows(session.run.store, ref, "rollouts.parquet", ROLLOUTS)
    assert [[row["rollout_index"] for row in group] for group in grouped(rows)] == [[0, 1, 2]] * 4
