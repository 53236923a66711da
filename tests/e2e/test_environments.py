"""The calculator end to end: what is trained on is what was sampled, and
a killed run has the same bits."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from rlpipe.data.chat import ChatTokenizer
from rlpipe.extras.environments.calculator import Calculator
from rlpipe.store.local_copy import materialise
from rlpipe.store.opening import open_existing
from rlpipe.store.run import Run
from tests.deadlines import PIPELINE_S
from tests.engine_fixtures import reference_logprobs
from tests.living import descendants
from tests.pipeline import Folder, kill_group
from tests.rows import BATCH, PROMPTS, prompt_of, read_rows

pytestmark = pytest.mark.e2e
ITERATIONS = 2
SMALL = [
    "sft.num_steps=60", "sft.segment_steps=30", "sft.decay_steps=60", "sft.warmup_steps=5", "sft.batch_size=32",
    "data.demonstrations.rows_max=3000", "data.products.rows_max=400", "data.demonstrations.args={tool_share = 0.7}",
    f"rl.num_iterations={ITERATIONS}", "rl.num_prompts=16", "rl.group_size=4", "rl.shard_prompts=4", "rl.filters={}",
    "evaluation.prompts_max=8", "evaluation.every=0",
]  # fmt: skip


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, prefect_api: dict[str, str]) -> Folder:
    folder = Folder(path := tmp_path_factory.mktemp("undisturbed"), f"file://{path}/store", prefect_api)
    folder.complete("b", *SMALL, preset="calculator")
    assert folder.rlpipe("verify", "b", "--store", folder.store)[0] == 0
    return folder


def batch_of(run: Run, iteration: int) -> list[dict[str, Any]]:
    return read_rows(run.store, run.committed("rl", iteration, "batch/round-0")[0], "batch.parquet", BATCH)


def turns_of(row: dict[str, Any]) -> tuple[list[list[int]], list[list[int]]]:
    """The policy's stretches of a completion, and the environment's."""
    sides: tuple[list[list[int]], list[list[int]]] = ([], [])
    before = None
    for token, written in zip(row["completion_tokens"], row["loss_mask"], strict=True):
        if written != before:
            sides[not written].append([])
        sides[not written][-1].append(token)
        before = written
    return sides


@pytest.mark.first
def test_the_environment_heard_what_was_sampled_and_its_answers_are_in_the_tokens(
    undisturbed: Folder, tmp_path: Path
) -> None:
    run = open_existing(undisturbed.open_store(), "b")
    tokenizer = ChatTokenizer.from_folder(
        materialise(run.store, run.committed("base", 0, "tokenizer")[0], tmp_path / "tokenizer")
    )
    rows = batch_of(run, 0)
    prompts = {row["prompt_id"]: prompt_of(row)
               for row in read_rows(run.store, run.committed("rl", 0, "prompts/round-0")[0],
                                    "prompts.parquet", PROMPTS)}  # fmt: skip
    assert len(rows) == 64 and sum(len(turns_of(row)[1]) > 0 for row in rows) > 10, "some use the calculator"
    for row in rows:
        said, told = turns_of(row)
        environment, record = Calculator(), json.loads(row["environment"])
        assert tokenizer.encode_prompt(environment.start(prompts[row["prompt_id"]])) == row["prompt_tokens"]
        heard = said if row["finish_reason"] in ("stop", "turns") else said[: len(record["messages"])]
        steps = [environment.step(tokenizer.decode(tokens)) for tokens in heard]
        assert [step.messages for step in steps] == record["messages"] and sum(step.reward for step in steps) == record[
            "reward"
        ]
        assert told == [tokenizer.encode_continuation(messages) for messages in record["messages"][: len(told)]]
        assert all(tokens[-1] == tokenizer.eos_token_id for tokens in said[:-1])
        assert row["reward"] == record["reward"] and row["reward_fault"] == ""


@pytest.mark.first
def test_logprobs_are_those_of_the_policy_after_everything_before(undisturbed: Folder, tmp_path: Path) -> None:
    run = open_existing(undisturbed.open_store(), "b")
    folder = materialise(run.store, run.policy(1)[0], tmp_path / "policy")
    for row in sorted(batch_of(run, 1), key=lambda row: -len(turns_of(row)[0]))[:12]:
        logprobs = reference_logprobs(folder, row["prompt_tokens"], row["completion_tokens"]).tolist()
        for mine, theirs, written in zip(row["rollout_logprobs"], logprobs, row["loss_mask"], strict=True):
            assert abs(mine - theirs) < 1e-4 if written else mine == 0.0
    for iteration in range(ITERATIONS):
        record = run.iteration(iteration)
        assert (
            record is not None and record.metrics["train/mismatch_abs_mean"] < 1e-4
        )  # the trainer's proximal logprobs
        assert record.metrics["train/num_tokens"] == sum(sum(row["loss_mask"]) for row in batch_of(run, iteration))


@pytest.mark.nightly
def test_killed_while_it_generates_it_ends_with_the_same_bits(undisturbed: Folder, folder: Folder) -> None:
    for iteration, wait_s in ((0, 0.3), (1, 0.6)):
        process = folder.start(*folder.run_arguments("a", *SMALL, preset="calculator"))
        folder.wait_for("a", f"rl/{iteration:05d}/prompts/round-0/manifest.json", process)
        time.sleep(wait_s)
        kill_group(process)
    folder.complete("a", *SMALL, preset="calculator")
    assert folder.rlpipe("verify", "a", "--store", folder.store)[0] == 0
    assert folder.final_sha256("a", ITERATIONS) == undisturbed.final_sha256("b", ITERATIONS)


@pytest.mark.nightly
def test_an_environment_process_that_is_killed_changes_nothing(undisturbed: Folder, folder: Folder) -> None:
    process = folder.start(*folder.run_arguments("a", *SMALL, preset="calculator"))
    try:
        folder.wait_for("a", "rl/00000/prompts/round-0/manifest.json", process)
        _keeper, victim = descendants(process, "rlpipe.extras.environments.worker")
        os.kill(victim.pid, signal.SIGKILL)
        assert process.wait(timeout=PIPELINE_S) == 0, folder.said()
    finally:
        kill_group(process)
    assert folder.final_sha256("a", ITERATIONS) == undisturbed.final_sha256("b", ITERATIONS)
