"""What holds for rlpipe's own engine only: it survives what kills SGLang, refuses what SGLang lets
pass, ends with an exit code."""

from __future__ import annotations

import asyncio
import io
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from rlpipe.extras.local_engine.server import app
from tests.deadlines import DEADLINE_S, until
from tests.engine_fixtures import VOCAB, edit_config, local_engine, sampled, start_engine, stop, tiny_model

PROMPT = [5, 17, 200, 3, 44]
CONTEXT = ("--context-tokens-max", "512")


@pytest.fixture(autouse=True)
async def _version_one() -> AsyncIterator[None]:
    """Every test starts on model 0 as version 1."""
    yield
    await local_engine("a").reload(tiny_model(0), "1")


async def checksum() -> str:
    return (await local_engine("a").call("/weights_checker"))[1]["per_engine_checksum"]


REFUSED = {
    "out of vocabulary": {"input_ids": [1, VOCAB]},  # kills SGLang
    "negative token": {"input_ids": [-1]},
    "empty in a batch": {"input_ids": [[1, 2], []]},  # killed SGLang once
    "params of another length": {"input_ids": [[1], [2]], "sampling_params": [{}]},  # 500 from SGLang
    "no completions": {"input_ids": [1], "sampling_params": {"n": 0}},  # SGLang samples one
    "scoring before the start": {
        "input_ids": [1],
        "return_logprob": True,
        "logprob_start_len": -2,
    },  # SGLang takes it for 0
    "top tokens of the completion": {
        "input_ids": [1],
        "return_logprob": True,
        "top_logprobs_num": 2,
        "sampling_params": {"max_new_tokens": 1},
    },  # SGLang gives them
    "unknown field": {"input_ids": [1], "streem": True},  # SGLang ignores it
    "top_k that no tensor holds": {"input_ids": [1], "sampling_params": {"top_k": 10**30}},
    "many wrong tokens": {"input_ids": ["a"] * 150_000},  # each described, they would take seconds
}


@pytest.mark.slow
@pytest.mark.parametrize("body", REFUSED.values(), ids=REFUSED)
async def test_what_sglang_does_not_refuse_is_refused(body: Any) -> None:
    assert (await local_engine("a").call("/generate", body))[0] == 400
    assert (await local_engine("a").get("/health"))[0] == 200


async def test_no_stop_token_is_sampled_before_min_new_tokens() -> None:
    params = {"max_new_tokens": 8, "temperature": 0}
    tokens, _ = sampled(await local_engine("a").generate(PROMPT, params))
    later = await local_engine("a").generate(PROMPT, {**params, "stop_token_ids": [tokens[3]], "min_new_tokens": 6})
    assert len(later["output_ids"]) >= 6 and tokens[3] not in later["output_ids"][:6]


async def test_the_whole_context_is_used() -> None:
    for prompt, new in ((511, 1), (512, 0), (480, 32)):
        answer = await local_engine("a").generate([7] * prompt, {"max_new_tokens": new, "ignore_eos": True})
        assert len(answer["output_ids"]) == new


async def test_a_refused_flush_changes_no_weights() -> None:
    running = asyncio.create_task(local_engine("a").generate(PROMPT, {"max_new_tokens": 100, "ignore_eos": True}))
    await local_engine("a").until_running(1)
    await local_engine("a").call("/pause_generation", {"mode": "in_place"})
    assert (await local_engine("a").update(tiny_model(1), "2"))[0] == 400
    await local_engine("a").call("/continue_generation", {})
    assert (await running)["meta_info"]["weight_versions"] == [{"version": "1", "start": 0, "end": 100}]


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
    "a tensor twice": lambda folder: shutil.copy(
        (folder / "model.safetensors").rename(folder / "one.safetensors"), folder / "two.safetensors"
    ),
}


@pytest.mark.parametrize("damage", BROKEN.values(), ids=BROKEN)
async def test_broken_weights_are_refused_and_the_old_ones_serve(
    damage: Callable[[Path], None], tmp_path: Path
) -> None:
    folder = tmp_path / "policy"
    shutil.copytree(tiny_model(1), folder)
    damage(folder)
    before = await checksum()
    status, answer = await local_engine("a").update(folder, "9")
    assert status == 400 and answer["success"] is False and str(folder) in answer["message"]
    assert (await local_engine("a").get("/model_info"))[1]["weight_version"] == "1"
    assert await checksum() == before
    assert (await local_engine("a").generate(PROMPT, {"max_new_tokens": 1}))["meta_info"]["weight_version"] == "1"


@pytest.mark.parametrize(
    "path", ["x" * 5000, "/" + "x/" * 5000, "a\0b", "", "/dev/null", "/proc/self/mem"], ids=range(6)
)
async def test_a_path_that_is_none_is_refused_and_the_engine_serves(path: str) -> None:
    status, answer = await local_engine("a").call(
        "/update_weights_from_disk", {"model_path": path, "weight_version": "9"}
    )
    assert status == 400 and len(answer["message"]) < 1000
    assert (await local_engine("a").generate(PROMPT, {"max_new_tokens": 1}))["meta_info"]["finish_reason"][
        "type"
    ] == "length"


@pytest.mark.parametrize(
    "body", [b"[" * 100_000, b'{"input_ids":' * 50_000, b"\xff", b"{", b"1" * 5000, b'{"a": NaN'], ids=range(6)
)
async def test_a_body_that_is_no_json_is_a_400(body: bytes) -> None:
    engine = local_engine("a")
    async with aiohttp.ClientSession() as session:
        for path in (
            "/generate",
            "/update_weights_from_disk",
            "/pause_generation",
            "/abort_request",
            "/weights_checker",
        ):
            headers = {"Authorization": f"Bearer {engine.key(path)}"}
            async with session.post(engine.url + path, data=body, headers=headers) as answer:
                assert answer.status == 400, path
        headers = {"Authorization": f"Bearer {engine.key('/generate')}"}
        async with session.post(
            engine.url + "/generate", data=io.BytesIO(b" " * (65 << 20)), headers=headers
        ) as answer:
            assert answer.status == 413


@pytest.mark.slow
async def test_memory_stays_flat_over_reloads() -> None:
    """Over 80 of them.

    An allocator takes 29 MB once, seen between the 30th and the 40th:
    that is before they are counted.
    """
    process = psutil.Process(local_engine("a").process.pid)
    after: list[int] = []
    for index in range(130):
        assert (await local_engine("a").update(tiny_model(index % 2), str(index)))[0] == 200
        answer = await local_engine("a").generate(PROMPT, {"max_new_tokens": 2})
        assert answer["meta_info"]["weight_version"] == str(index)
        after.append(process.memory_info().rss)
    assert after[-1] < after[50] * 1.05


def test_a_taken_port_is_named_before_the_model_is_loaded() -> None:
    port = local_engine("a").url.rsplit(":", 1)[1]
    outcome = CliRunner().invoke(app, ["--model-path", "/no/model", "--port", port])
    assert outcome.exit_code == 2 and f"port={port}: the port is taken" in outcome.output


@pytest.mark.slow
def test_each_end_of_a_process_has_its_exit_code() -> None:
    served, served_log, _ = start_engine("--model-path", str(tiny_model(0)), *CONTEXT)
    script = (
        "import threading, time; from rlpipe.extras.local_engine import scheduler, server;"
        "threading.excepthook = server.end_process;"
        "s = scheduler.Scheduler(None, '0', 1); threading.Thread(target=s.run).start();"
        "s.ask(lambda: 1 / 0); time.sleep(30)"
    )
    faulty = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=DEADLINE_S)
    assert faulty.returncode == 1 and "ZeroDivisionError" in faulty.stderr
    until(lambda: "serving" in served_log.read_text(), served_log.read_text, running=served)
    assert stop(served) == 0, served_log.read_text()


async def test_five_hundred_clients_at_once_are_answered() -> None:
    engine = local_engine("a")
    headers = {"Authorization": f"Bearer {engine.key('/model_info')}"}
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, force_close=True), headers=headers
    ) as session:

        async def ask() -> int:
            async with session.get(engine.url + "/model_info", timeout=aiohttp.ClientTimeout(DEADLINE_S)) as answer:
                return answer.status

        assert await asyncio.gather(*(ask() for _ in range(500))) == [200] * 500


def test_its_server_is_imported_without_torch_and_transformers() -> None:
    program = "import sys, rlpipe.extras.local_engine.server; assert not {'torch', 'transformers'} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 0, done.stderr
