"""The example agent end to end, which sometimes ends in the middle of a call, by itself or by its
timeout: what is trained is what engines sampled, and a run whose flow, engine and agent were
killed, and in which trainer and engine share their memory, has the same bits."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from rlpipe.base.values import JsonDict
from rlpipe.store.opening import open_existing
from rlpipe.store.run import Run
from tests.deadlines import PATIENCE, PIPELINE_S, until
from tests.living import descendants, signal_all
from tests.paths import ROOT
from tests.pipeline import Folder, kill_group
from tests.rows import BATCH, read_rows

pytestmark = pytest.mark.e2e
ITERATIONS = 1
AGENT = f"python {ROOT}/tests/leaving_agent.py"
TIMEOUT_S = 30 * PATIENCE  # nine agents have to end well in it
SMALL = [
    "sft.num_steps=60", "sft.segment_steps=30", "sft.decay_steps=60", "sft.warmup_steps=5", "sft.batch_size=32",
    "data.demonstrations.rows_max=3000", "data.products.rows_max=400", "data.demonstrations.args={tool_share = 0.7}",
    f"rl.num_iterations={ITERATIONS}", "rl.num_prompts=4", "rl.group_size=3", "rl.shard_prompts=2", "rl.filters={}",
    "evaluation.prompts_max=2", "evaluation.num_completions=1",
    "rl.turns_max=200", "engines.in_flight_max=2",  # a call of many choices takes long
]  # fmt: skip
SHARD = "rollouts/round-0/shard-000"


@dataclass(frozen=True)
class Leaving:
    """How an agent leaves a call that is in flight: the settings, and the fault of its rollout."""

    sets: tuple[str, ...]
    fault: str


WAYS = [
    pytest.param(Leaving((f"rl.agent={AGENT}",), "agent_error"), id="ends"),
    pytest.param(
        Leaving((f"rl.agent={AGENT} {TIMEOUT_S:g}", f"rl.agent_timeout_s={TIMEOUT_S:g}"), "agent_timeout"),
        marks=pytest.mark.nightly,
        id="timeout",
    ),
]


def folder_of(path: Path, prefect_api: dict[str, str]) -> Folder:
    return Folder(path, f"file://{path}/store", {**prefect_api, "PYTHONPATH": f"{ROOT}"})


@pytest.fixture(scope="module", params=WAYS)
def leaving(request: pytest.FixtureRequest) -> Leaving:
    return request.param


@pytest.fixture(scope="module")
def undisturbed(leaving: Leaving, tmp_path_factory: pytest.TempPathFactory, prefect_api: dict[str, str]) -> Folder:
    folder = folder_of(tmp_path_factory.mktemp("undisturbed"), prefect_api)
    folder.complete("b", *SMALL, *leaving.sets, preset="agent")
    return folder


def calls(run: Run, iteration: int) -> list[JsonDict]:
    """The calls of the agents of an iteration, by the logs of its shards."""
    keys = [key for key in run.store.list(f"{run.root}/rl/{iteration:05d}/rollouts") if "/calls/" in key]
    return [json.loads(line) for key in keys for line in run.store.read(key).splitlines()]


@pytest.mark.first
def test_every_trained_token_is_one_that_an_engine_sampled(undisturbed: Folder, leaving: Leaving) -> None:
    run = open_existing(undisturbed.open_store(), "b")
    num_trained = num_of_engines = num_turns = 0
    for iteration in range(ITERATIONS):
        whole = calls(run, iteration)
        assert all(len(call["completions"]) == 1 for call in whole), "none of many choices came to its end"
        sampled = {tuple(reply["tokens"]): reply["logprobs"] for call in whole for reply in call["completions"]}
        for row in read_rows(run.store, run.committed("rl", iteration, "batch/round-0")[0], "batch.parquet", BATCH):
            turns: list[list[tuple[int, float]]] = []
            before = 0
            for token, logprob, trained in zip(
                row["completion_tokens"], row["rollout_logprobs"], row["loss_mask"], strict=True
            ):
                if trained and not before:
                    turns.append([])
                if trained:
                    turns[-1].append((token, logprob))
                before = trained
            num_trained += sum(map(len, turns))
            for turn in turns:
                tokens, logprobs = zip(*turn, strict=True)
                num_of_engines += len(turn) if sampled.get(tokens) is not None else 0
                assert all(logprob <= 0 for logprob in logprobs)
            num_turns += len(turns)
        record = run.iteration(iteration)
        assert (
            record is not None and record.metrics["train/mismatch_abs_mean"] < 1e-4
        )  # the trainer sees what the engine saw
        # one of the four prompts has agents that fail with a call in flight, which are trained with
        # the reward 0, and one agents that end well with one
        assert record.metrics[f"rollout/fault_{leaving.fault}"] == 3 and record.metrics["rollout/num_trained"] == 12
    assert num_of_engines == num_trained > 0 and num_turns > 9, "some use the calculator"


@pytest.mark.nightly
def test_flow_engine_and_agent_are_killed_and_it_ends_with_the_same_bits(
    undisturbed: Folder, leaving: Leaving, tmp_path: Path, prefect_api: dict[str, str]
) -> None:
    folder = folder_of(tmp_path, prefect_api)
    run_arguments = folder.run_arguments("a", *SMALL, *leaving.sets, "engines.colocate=true", preset="agent")
    process = folder.start(*run_arguments)
    kill_after_replies(folder, process)  # and before the shard is committed
    store = folder.open_store()
    assert not store.exists(f"runs/a/rl/00000/{SHARD}/manifest.json"), "it is too late to kill it"
    process = folder.start(*run_arguments)
    try:
        for word in ("leaving_agent.py", "rlpipe.extras.local_engine.server"):
            signal_all([wait_for_process(process, word)])
        assert process.wait(timeout=PIPELINE_S) == 0, folder.said()
    finally:
        kill_group(process)
    assert folder.rlpipe("verify", "a", "--store", folder.store)[0] == 0
    assert folder.final_sha256("a", ITERATIONS) == undisturbed.final_sha256("b", ITERATIONS)


def kill_after_replies(folder: Folder, process: subprocess.Popen[str]) -> None:
    store, calls = folder.open_store(), f"runs/a/rl/00000/{SHARD}/calls"
    try:
        until(lambda: store.list(calls), folder.said, running=process, within_s=PIPELINE_S, look_s=0.05)
    finally:
        kill_group(process)


def wait_for_process(process: subprocess.Popen[str], word: str) -> psutil.Process:
    return until(lambda: descendants(process, word), f"no {word}", running=process, within_s=PIPELINE_S, look_s=0.05)[0]
