"""The stage generate with an agent: what is in the rollouts, what a limit or a fault becomes, and
what a process that takes over asks again."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from rlpipe.base.errors import EngineError, UserError
from rlpipe.base.references import ArtifactRef
from rlpipe.base.values import JsonDict
from rlpipe.config.source import read_config
from rlpipe.data.chat import ChatTokenizer
from rlpipe.engines.client import Completion, Sampling, logprobs_of, tokens_of
from rlpipe.engines.pool import GroupRequest
from rlpipe.loop.session import Session
from rlpipe.records.prompt import Prompt
from rlpipe.records.rollout import Branch
from rlpipe.records.turns import turns_of
from rlpipe.stages.generation import generate
from rlpipe.stages.sampling import sample_prompts
from rlpipe.stages.scoring import score
from rlpipe.store.artifacts import read_manifest, read_records
from rlpipe.store.audit import unreferenced
from rlpipe.store.opening import create_or_continue
from tests.agent_world import tokenizer_in
from tests.deadlines import SHORT_S, until_async
from tests.paths import PRESETS
from tests.rows import ROLLOUTS, SCORES, read_rows, rollout

POLICY = ArtifactRef("p", "0" * 64)
NUM_CALLS = 3
AGENT = f'''
import json, pathlib, time, urllib.request

def agent(prompt, client):
    """Asks {NUM_CALLS} times, going on each time; where the file `hang` is, it hangs before the last one."""
    if prompt["answer"] == "silent":
        time.sleep(600)
    messages = [{{"role": "system", "content": "be brief"}}, *prompt["messages"]]
    for number in range({NUM_CALLS}):
        if number == {NUM_CALLS - 1} and pathlib.Path("hang").exists():
            time.sleep(600)
        if number == {NUM_CALLS - 1} and prompt["answer"] == "fork":
            messages = [{{"role": "user", "content": "you have said " + message["content"]}}]
        headers = {{"Authorization": "Bearer " + client["api_key"]}}
        body = json.dumps({{"messages": messages}}).encode()
        request = urllib.request.Request(client["base_url"] + "/chat/completions", body, headers)
        message = json.load(urllib.request.urlopen(request))["choices"][0]["message"]
        messages += [message, {{"role": "user", "content": f"go on {{number}}"}}]
    if prompt["answer"] == "hang":
        time.sleep(600)
    if prompt["answer"] == "fail":
        raise KeyError("gone")
    return {{"reward": len(message["content"]), "metrics": {{"seen": 3}}}}
'''


@dataclass
class SeededPool:
    """Says numbers that depend on the seed and on what came before; remembers what was asked."""

    tokenizer: ChatTokenizer
    version: int = 0
    heard_at: float = 0.0
    num_lost: int = 0
    groups: list[GroupRequest] = field(default_factory=list)

    async def generate(self, groups: list[GroupRequest], enough: asyncio.Event) -> list[list[Completion]]:
        [group] = groups
        self.groups.append(group)
        return [[self._say(group, params, prior) for params, prior in zip(group.params, group.prior, strict=True)]]

    def _say(self, group: GroupRequest, params: Sampling, prior: Completion) -> Completion:
        number = (params.seed * 31 + sum(group.prompt_tokens) + sum(prior.tokens)) % 10**5
        tokens = self.tokenizer._encoder.encode(f"{number}<|end|>")[: params.max_new_tokens - len(prior.tokens)]
        reason = "stop" if tokens[-1] == self.tokenizer.eos_token_id else "length"
        return prior.then(
            Completion(tokens_of(tokens), logprobs_of([-0.5] * len(tokens)), reason, [(0, len(tokens))], "e")
        )

    async def close(self) -> None: ...


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "three_calls.py").write_text(AGENT)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def made_session(folder: Path, store: str, *sets: str, answers: str = "well") -> Session:
    small = [
        "rl.num_prompts=2",
        "rl.group_size=2",
        "rl.shard_prompts=2",
        "rl.agent=three_calls:agent",
        "rl.agents_max=2",
    ]
    config = read_config("agent", ["run=a", f"store=file://{folder}/{store}", "tracking.uri=", *small, *sets], PRESETS)
    session: Any = Session(create_or_continue(config), folder / "work")
    session.data.tokenizer = tokenizer_in(folder / "tokenizer")
    session.pool = SeededPool(session.data.tokenizer)
    rows = [
        Prompt(f"products/{index}", "products", [{"role": "user", "content": f"{index}*3"}], answers)
        for index in range(4)
    ]
    session.data.prompts = lambda _: [rows]
    return session


@pytest_asyncio.fixture
async def session(folder: Path) -> AsyncIterator[Session]:
    made = made_session(folder, "store")
    yield made
    await made.close()


async def sampled(session: Session) -> ArtifactRef:
    prompts = (await sample_prompts(session, iteration=0, round_index=0, before=None)).ref
    return (await generate(session, iteration=0, round_index=0, shard=0, prompts=prompts, policy=POLICY)).ref


def rows_of(session: Session, rollouts: ArtifactRef) -> list[JsonDict]:
    return read_rows(session.run.store, rollouts, "rollouts.parquet", ROLLOUTS)


def stretches_of(row: JsonDict) -> list[list[int]]:
    """The tokens of each reply: those whose mask is 1, from one that is not to the next."""
    pairs = itertools.groupby(zip(row["completion_tokens"], row["loss_mask"], strict=True), key=lambda pair: pair[1])
    return [[token for token, _ in stretch] for mask, stretch in pairs if mask]


async def test_every_trained_token_is_one_that_was_sampled_and_the_outcome_is_the_agents(session: Session) -> None:
    ref = await sampled(session)
    pool: Any = session.pool
    assert len(pool.groups) == 4 * NUM_CALLS and len({group.params[0].seed for group in pool.groups}) == 4 * NUM_CALLS
    for row in rows_of(session, ref):
        assert session.data.tokenizer.decode_raw(row["prompt_tokens"]).startswith("<|system|>be brief<|end|><|user|>")
        assert sum(row["loss_mask"]) == row["rollout_logprobs"].count(-0.5) and row["rollout_logprobs"].count(
            0.0
        ) == row["loss_mask"].count(0)
        # what was sampled, in order, is what the mask shows
        calls = [group for group in pool.groups if row["completion_tokens"][: len(group.prior[0].tokens)]
                 == group.prior[0].tokens.tolist()
                 and group.prompt_tokens == row["prompt_tokens"]]  # fmt: skip
        assert len(calls) >= NUM_CALLS and row["loss_mask"][0] == 1 and row["finish_reason"] == "stop"
        record = json.loads(row["environment"])
        assert (
            record["num_turns"] == NUM_CALLS
            and record["metrics"] == {"branches": 1.0, "seen": 3.0}
            and record["reward"] > 0
        )
        assert [message["content"] for message in record["messages"][1]] == ["go on 0"]
        turns = turns_of(rollout(row), session.data.tokenizer.decode, by_agent=True)
        assert [turn["role"] for turn in turns] == ["assistant", "user", "assistant", "user", "assistant"]
        assert [turn["content"] for turn in turns[1::2]] == ["go on 0", "go on 1"]
        sampled_texts = [session.data.tokenizer.decode(group) for group in stretches_of(row)]
        assert [turn["content"] for turn in turns[::2]] == sampled_texts
    prompts = session.run.committed("rl", 0, "prompts/round-0")[0]
    scores = await score(session, iteration=0, round_index=0, prompts=prompts, rollouts=[ref])
    rewards = [row["reward"] for row in read_rows(session.run.store, scores.ref, "scores.parquet", SCORES)]
    assert rewards == [json.loads(row["environment"])["reward"] for row in rows_of(session, ref)]
    assert scores.metrics["rollout/environment_seen_mean"] == 3.0 and scores.metrics["rollout/turns_mean"] == NUM_CALLS


async def test_a_branch_that_is_left_is_kept_beside_the_one_that_is_trained(folder: Path) -> None:
    session = made_session(folder, "store", answers="fork")
    ref = await sampled(session)
    pool: Any = session.pool
    rows, branches = rows_of(session, ref), read_records(session.run.store, ref, "branches.parquet", Branch)
    assert len(rows) == len(branches) == 4
    for row, branch in zip(rows, branches, strict=True):
        assert (branch.group_index, branch.rollout_index, branch.branch_index) == (
            row["group_index"],
            row["rollout_index"],
            0,
        )
        assert session.data.tokenizer.decode(row["prompt_tokens"]).startswith("<|user|>you have said") and all(
            row["loss_mask"]
        )
        assert json.loads(row["environment"])["metrics"]["branches"] == 2.0
        stretches = np.flatnonzero(np.diff(branch.loss_mask))
        assert len(stretches) == 2, "two replies, and what the agent put between them"
        assert np.array_equal(branch.rollout_logprobs < 0, branch.loss_mask == 1)
    assert len(pool.groups) == 4 * NUM_CALLS
    await session.close()


@pytest.mark.parametrize(
    ("limit", "reason", "metric"),
    [("rl.turns_max=2", "turns", "limit_calls"), ("rl.completion_tokens_max=12", "length", "limit_tokens")],
)
async def test_a_limit_ends_a_rollout_with_a_counted_reason(limit: str, reason: str, metric: str, folder: Path) -> None:
    session = made_session(folder, "store", limit)
    rows = rows_of(session, await sampled(session))
    assert {row["finish_reason"] for row in rows} == {reason}
    for row in rows:  # the agent fails of the refusal, which is no fault of its own
        record = json.loads(row["environment"])
        assert (record["fault"], record["reward"], record["metrics"][metric]) == ("", 0.0, 1.0) and 0 < record[
            "num_turns"
        ] < NUM_CALLS
        assert len(row["completion_tokens"]) <= session.config.rl.completion_tokens_max
    await session.close()


async def test_an_agent_that_fails_everywhere_ends_the_run(folder: Path) -> None:
    session = made_session(folder, "store", answers="fail")
    with pytest.raises(UserError, match=r"rl\.agent='three_calls:agent' has answered no rollout") as error:
        await sampled(session)
    assert "agent_error" in str(error.value)
    await session.close()


@pytest.mark.parametrize(
    ("answers", "num_lost", "reason"),
    [("silent", 0, "agent_silent"), ("hang", 0, "agent_timeout"), ("hang", 1, "agent_unavailable")],
)
async def test_the_policy_may_cause_a_timeout_unless_it_said_nothing_or_an_engine_was_lost(
    folder: Path, answers: str, num_lost: int, reason: str
) -> None:
    session = made_session(folder, "store", f"rl.agent_timeout_s={3 * SHORT_S}", "rl.num_prompts=1", answers=answers)
    pool: Any = session.pool
    player: Any = session.player
    play = player.agents.run

    async def run(rollout: Any, prompt: Any) -> Any:
        pool.num_lost += num_lost  # while it is played
        return await play(rollout, prompt)

    player.agents.run = run
    with pytest.raises(UserError, match=rf"\{{'{reason}': 2\}}"):  # all of them
        await sampled(session)
    await session.close()


@pytest.mark.parametrize(("answers", "sets"), [("well", []), ("fork", ["rl.branches=all"])])
async def test_a_process_that_takes_over_samples_only_what_was_not_kept(
    folder: Path, answers: str, sets: list[str]
) -> None:
    (folder / "hang").touch()
    first = made_session(folder, "store", *sets, answers=answers)
    pool: Any = first.pool
    working = asyncio.create_task(sampled(first))
    # rl.agents_max of them, up to where they hang
    await until_async(lambda: working.done() or len(pool.groups) == 2 * (NUM_CALLS - 1))
    await until_async(lambda: working.done() or any("/calls/" in key for key in first.run.store.list(first.run.root)))
    assert not working.done()
    await first.close()
    with pytest.raises(EngineError):
        await working
    (folder / "hang").unlink()
    kept = [key for key in first.run.store.list(first.run.root) if "/calls/" in key]
    assert kept and not [key for key in unreferenced(first.run) if "/calls/" in key], (
        "gc leaves them while they are needed"
    )

    second, undisturbed = (made_session(folder, store, *sets, answers=answers) for store in ("store", "other"))
    ref, other = await sampled(second), await sampled(undisturbed)
    assert rows_of(second, ref) == rows_of(undisturbed, other)
    files = [read_manifest(made.run.store, of.folder).files for made, of in ((second, ref), (undisturbed, other))]
    assert [file.sha256 for file in files[0]] == [file.sha256 for file in files[1]]
    assert len(files[0]) == (2 if answers == "fork" else 1), "its branches, where there are some"
    again: Any = second.pool
    assert len(again.groups) == 4 * NUM_CALLS - len(pool.groups)
    assert set(kept) < {key for key in unreferenced(second.run) if "/calls/" in key}
    for session in (second, undisturbed):
        await session.close()


@pytest.mark.parametrize(
    ("sets", "said"),
    [
        (["rl.environment=calculator"], r"rl\.agent='three_calls:agent': cannot be used with rl\.environment="),
        (["rl.oversampling=2"], r"rl\.oversampling=2"),
        (
            ["rl.branches=all", "rl.agent=", "rl.environment=calculator"],
            r"rl\.branches='all': only the conversation of an agent",
        ),
        (
            ["rl.branches=all", "rl.rollouts_from=run:b"],
            r"rl\.branches='all': rl\.rollouts_from='run:b' gives rollouts without",
        ),
        (["rl.agent="], r"rl\.rewards: the reward 'environment' is given by an environment or an agent"),
    ],
)
def test_what_an_agent_cannot_go_with_is_refused(sets: list[str], said: str) -> None:
    with pytest.raises(UserError, match=said):
        read_config("agent", ["rl.agent=three_calls:agent", *sets], PRESETS)
