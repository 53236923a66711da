"""Pause, continue, abort, reload over HTTP, and how the process ends."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from rlpipe.engines.local.options import EngineOptions
from rlpipe.engines.local.server import serve
from rlpipe.types import UserError
from tests.engine_fixtures import API_KEY, edit_config, engine, reference_logprobs, sampled, start_engine, stop, tiny_model

PROMPT = [5, 17, 200, 3, 44]
LONG = {"max_new_tokens": 120, "ignore_eos": True, "sampling_seed": 11}
DEADLINE_S = 20.0
CONTEXT = ("--context-tokens-max", "512")


@pytest.fixture(autouse=True)
async def _version_one() -> AsyncIterator[None]:
    """Every test starts on model 0 as version 1, not paused."""
    yield
    await engine("a").call("/abort_request", {"abort_all": True})
    await engine("a").call("/continue_generation", {})
    status, answer = await engine("a").update(tiny_model(0), "1")
    assert status == 200 and answer["success"], answer


async def until_running(count: int) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        if (await engine("a").get("/get_load"))[1]["num_running_reqs"] == count:
            return
        await asyncio.sleep(0.005)
    raise AssertionError(f"never {count} running requests")


async def started(params: dict[str, Any], **fields: Any) -> asyncio.Task[Any]:
    task = asyncio.create_task(engine("a").generate(PROMPT, params, **fields))
    await until_running(1)
    return task


async def test_pause_abort_answers_at_once_with_what_there_is() -> None:
    running = await started(LONG)
    await engine("a").call("/pause_generation", {"mode": "abort"})
    answer = await running
    assert answer["meta_info"]["finish_reason"]["type"] == "abort"
    tokens, _ = sampled(answer)
    assert len(tokens) == answer["meta_info"]["completion_tokens"] < 120
    assert (await engine("a").get("/ready"))[0] == 503 and (await engine("a").get("/health"))[0] == 200
    waits = asyncio.create_task(engine("a").generate(PROMPT, {"max_new_tokens": 1}))
    await engine("a").call("/continue_generation", {})
    assert len((await waits)["output_ids"]) == 1
    assert (await engine("a").get("/ready"))[0] == 200


@pytest.mark.parametrize("mode", ["retract", "in_place"])
async def test_pause_and_continue_change_no_token(mode: str) -> None:
    whole = sampled(await engine("a").generate(PROMPT, LONG))
    running = await started(LONG)
    await engine("a").call("/pause_generation", {"mode": mode})
    assert not running.done()
    await engine("a").call("/continue_generation", {})
    tokens, logprobs = sampled(await running)
    assert tokens == whole[0]
    torch.testing.assert_close(torch.tensor(logprobs), torch.tensor(whole[1]), atol=1e-4, rtol=0)


async def test_retracted_requests_go_on_under_the_new_weights() -> None:
    running = await started(LONG)
    await engine("a").call("/pause_generation", {"mode": "retract"})
    assert (await engine("a").update(tiny_model(1), "2"))[0] == 200
    await engine("a").call("/continue_generation", {})
    answer = await running
    tokens, logprobs = sampled(answer)
    (old, cut), (new, rest) = answer["meta_info"]["weight_versions"]
    assert (old, new) == ("1", "2") and cut + rest == 120 and answer["meta_info"]["weight_version"] == "2"
    before = reference_logprobs(tiny_model(0), PROMPT, tokens)[:cut]
    after = reference_logprobs(tiny_model(1), PROMPT, tokens)[cut:]
    torch.testing.assert_close(torch.tensor(logprobs, dtype=torch.float64), torch.cat([before, after]), atol=1e-4, rtol=0)


async def test_a_flush_is_refused_while_requests_stay_in_place() -> None:
    running = await started(LONG)
    await engine("a").call("/pause_generation", {"mode": "in_place"})
    status, answer = await engine("a").update(tiny_model(1), "2")
    assert status == 400 and answer["success"] is False
    await engine("a").call("/continue_generation", {})
    assert (await running)["meta_info"]["weight_versions"] == [["1", 120]]


async def test_an_unknown_pause_mode_is_refused() -> None:
    status, answer = await engine("a").call("/pause_generation", {"mode": "gently"})
    assert status == 400 and "retract" in answer["error"]["message"]


async def test_abort_ends_the_request_of_that_name_only() -> None:
    tasks = [asyncio.create_task(engine("a").generate(PROMPT, LONG, rid=rid)) for rid in ("p4", "p40")]
    await until_running(2)
    await engine("a").call("/abort_request", {"rid": "p4"})
    aborted, finished = await asyncio.gather(*tasks)
    assert aborted["meta_info"]["finish_reason"]["type"] == "abort" and len(aborted["output_ids"]) < 120
    assert finished["meta_info"]["finish_reason"]["type"] == "length"
    assert (await engine("a").call("/abort_request", {"rid": "nobody"}))[0] == 200
    assert (await engine("a").call("/abort_request", {}))[0] == 400


async def test_a_live_rid_is_not_given_twice() -> None:
    running = await started(LONG, rid="mine")
    status, answer = await engine("a").call("/generate", {"input_ids": PROMPT, "rid": "mine"})
    assert status == 400 and "mine" in answer["error"]["message"]
    assert (await running)["meta_info"]["finish_reason"]["type"] == "length"


async def test_a_caller_that_goes_away_frees_its_slots() -> None:
    body = {"input_ids": [PROMPT] * 300, "sampling_params": {"max_new_tokens": 500, "ignore_eos": True}}
    headers = {"Authorization": f"Bearer {API_KEY}"}
    async with aiohttp.ClientSession(headers=headers) as session:
        gone = asyncio.create_task(session.post(engine("a").url + "/generate", json=body))
        await until_running(64)
        gone.cancel()
        with pytest.raises(asyncio.CancelledError):
            await gone
    await until_running(0)


async def test_reload_changes_weights_version_and_checksum() -> None:
    before = (await engine("a").call("/weights_checker", {"action": "checksum"}))[1]["checksum"]
    status, answer = await engine("a").update(tiny_model(1), "2")
    assert status == 200 and answer["success"] is True
    tokens, logprobs = sampled(generated := await engine("a").generate(PROMPT, {"max_new_tokens": 16, "ignore_eos": True}))
    assert generated["meta_info"]["weight_version"] == (await engine("a").get("/model_info"))[1]["weight_version"] == "2"
    expected = reference_logprobs(tiny_model(1), PROMPT, tokens)
    torch.testing.assert_close(torch.tensor(logprobs, dtype=torch.float64), expected, atol=5e-5, rtol=0)
    assert (await engine("a").call("/weights_checker", {"action": "checksum"}))[1]["checksum"] != before
    await engine("a").update(tiny_model(0), "3")
    assert (await engine("a").call("/weights_checker", {"action": "checksum"}))[1]["checksum"] == before


def _edited(change: Callable[[dict[str, torch.Tensor]], None]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")

    return apply


def _cut(keep: float) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        data = (folder / "model.safetensors").read_bytes()
        (folder / "model.safetensors").write_bytes(data[: int(len(data) * keep)])

    return apply


NORM = "model.norm.weight"
BROKEN: dict[str, Callable[[Path], None]] = {
    "torn data": _cut(0.9),
    "torn header": _cut(0.0003),
    "empty file": _cut(0),
    "no weights": lambda folder: (folder / "model.safetensors").unlink(),
    "no folder": shutil.rmtree,
    "missing tensor": _edited(lambda tensors: tensors.__delitem__(NORM)),
    "extra tensor": _edited(lambda tensors: tensors.update(extra=torch.zeros(2))),
    "wrong shape": _edited(lambda tensors: tensors.update({NORM: torch.ones(64)})),
    "not finite": _edited(lambda tensors: tensors[NORM].__setitem__(3, torch.nan)),
    "untied head": _edited(lambda tensors: tensors.update({"lm_head.weight": torch.zeros(320, 128)})),
    "another architecture": lambda folder: edit_config(folder, num_attention_heads=2, head_dim=64),
    "no config": lambda folder: (folder / "config.json").unlink(),
}


@pytest.mark.parametrize("damage", BROKEN.values(), ids=BROKEN)
async def test_broken_weights_are_refused_and_the_old_ones_serve(damage: Callable[[Path], None], tmp_path: Path) -> None:
    folder = tmp_path / "policy"
    shutil.copytree(tiny_model(1), folder)
    damage(folder)
    before = (await engine("a").call("/weights_checker", {"action": "checksum"}))[1]["checksum"]
    status, answer = await engine("a").update(folder, "9")
    assert status == 400 and answer["success"] is False and str(folder) in answer["message"]
    assert (await engine("a").get("/model_info"))[1]["weight_version"] == "1"
    assert (await engine("a").call("/weights_checker", {"action": "checksum"}))[1]["checksum"] == before
    assert (await engine("a").generate(PROMPT, {"max_new_tokens": 1}))["meta_info"]["weight_version"] == "1"


async def test_memory_stays_flat_over_reloads() -> None:
    process = psutil.Process(engine("a").process.pid)
    after: list[int] = []
    for index in range(100):
        assert (await engine("a").update(tiny_model(index % 2), str(index)))[0] == 200
        answer = await engine("a").generate(PROMPT, {"max_new_tokens": 2})
        assert answer["meta_info"]["weight_version"] == str(index)
        after.append(process.memory_info().rss)
    assert after[-1] < after[20] * 1.05


def test_a_taken_port_is_named_before_the_model_is_loaded() -> None:
    port = int(engine("a").url.rsplit(":", 1)[1])
    with pytest.raises(UserError, match=f"port={port}"):
        serve(EngineOptions("/no/model", port=port))


def test_each_end_of_a_process_has_its_exit_code() -> None:
    served, served_log, _ = start_engine("--model-path", str(tiny_model(0)), *CONTEXT)
    script = (
        "import threading, time; from rlpipe.engines.local import server, scheduler;"
        "threading.excepthook = server._end_process;"
        "s = scheduler.Scheduler(None, '0', 1, print); threading.Thread(target=s.run).start();"
        "s.ask(lambda: 1 / 0); time.sleep(30)"
    )
    faulty = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert faulty.returncode == 1 and "ZeroDivisionError" in faulty.stderr
    deadline = time.monotonic() + 60
    while "serving" not in served_log.read_text():
        assert time.monotonic() < deadline and served.poll() is None, served_log.read_text()
        time.sleep(0.05)
    assert stop(served) == 0, served_log.read_text()
