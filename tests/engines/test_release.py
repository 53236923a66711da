"""Engines that give their memory back while a trainer works, and take it again: real processes,
real memory, the same bits."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from rlpipe.engines.client import EngineUnavailable
from rlpipe.processes.launch import answers
from tests.deadlines import until
from tests.engine_fixtures import CONTEXT_TOKENS, VOCAB, Server, sampled, start_engine, stop
from tests.engine_world import requests, tokens, world
from tests.engines.test_pool import check_whole

pytestmark = pytest.mark.slow

PROMPT = [5, 17, 200, 3, 44]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights of more than 100 MB: too many to be missed in the memory of a process."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("model")
    config = Qwen3Config(
        vocab_size=VOCAB, hidden_size=512, intermediate_size=2048, num_hidden_layers=8, num_attention_heads=4,
        num_key_value_heads=2, head_dim=128, max_position_embeddings=CONTEXT_TOKENS, bos_token_id=1, eos_token_id=2,
        pad_token_id=0,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    assert (folder / "model.safetensors").stat().st_size > 100e6
    return folder


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Server]:
    sizes = ["--weight-version", "1", "--context-tokens-max", str(CONTEXT_TOKENS), "--requests-max", "4"]
    process, log, url = start_engine("--model-path", str(model), *sizes)
    try:
        until(lambda: answers(f"{url}/health"), log.read_text, running=process)
        yield Server(url, process)
    finally:
        stop(process)


def held_bytes(server: Server) -> int:
    """Memory that this process alone has: libraries that others use too are not in it."""
    return psutil.Process(server.process.pid).memory_full_info().uss


async def control(server: Server, path: str) -> tuple[int, Any]:
    return await server.call(path, {}, key="test-admin")


async def answer(server: Server) -> tuple[list[int], list[float]]:
    params = {"max_new_tokens": 8, "sampling_seed": 3, "ignore_eos": True}
    return sampled(await server.generate(PROMPT, params))


async def test_the_memory_really_goes_and_the_same_bits_come_back(server: Server, model: Path) -> None:
    weights = (model / "model.safetensors").stat().st_size
    first, checksum = await answer(server), await server.call("/weights_checker")
    for _ in range(3):
        present = held_bytes(server)
        for _ in range(2):  # the second time there is nothing to do
            assert (await control(server, "/release_memory_occupation"))[0] == 200
        assert present - held_bytes(server) > 0.9 * weights
        for path in ("/health", "/ready", "/server_info"):
            assert (await server.get(path))[0] == 200, "it is well, and waits"
        for _ in range(2):
            assert (await control(server, "/resume_memory_occupation"))[0] == 200
        assert await answer(server) == first
        assert await server.call("/weights_checker") == checksum


async def test_what_comes_while_it_is_released_waits_and_what_needs_weights_is_refused(
    server: Server, model: Path
) -> None:
    first = await answer(server)
    assert (await control(server, "/release_memory_occupation"))[0] == 200
    waiting = asyncio.create_task(answer(server))
    await server.until_load(lambda load: load["num_waiting_reqs"] == 1)
    for path in ("/weights_checker", "/update_weights_from_disk"):
        status, refusal = await server.call(path, {"model_path": str(model)} if "update" in path else None)
        assert status == 400 and "is released" in str(refusal), path
    assert (await control(server, "/resume_memory_occupation"))[0] == 200
    assert await waiting == first


async def test_with_a_request_in_it_it_is_not_released(server: Server) -> None:
    params = {"max_new_tokens": 40, "sampling_seed": 3, "ignore_eos": True}
    running = asyncio.create_task(server.generate(PROMPT, params))
    await server.until_running(1)
    status, refusal = await control(server, "/release_memory_occupation")
    assert status == 400 and "not finished" in str(refusal)
    assert len(sampled(await running)[0]) == 40


@pytest.mark.e2e
async def test_a_host_s_engines_go_die_and_come_back(tmp_path: Path) -> None:
    async with world(tmp_path) as made:
        first = await made.pool.generate(requests())
        check_whole(first, 6)
        await made.pool.release([])
        await made.pool.release([])
        assert made.pool.version is None and await made.host.clients(made.version) == []
        made.signal(0, signal.SIGKILL)
        # several looks of the watch: it must not start what others have the memory for
        await asyncio.sleep(2)
        assert made.restarts() == [0, 0] and not made.engine(0).service.alive() and made.engine(1).service.alive()
        await made.serve(0)
        await made.until_back()
        assert made.restarts() == [1, 0], "the dead one was started, the other woken"
        assert tokens(await made.pool.generate(requests())) == tokens(first)

        async def refuse() -> None:
            raise EngineUnavailable("it hangs")

        made.engine(1).client.release = refuse  # type: ignore[method-assign]
        await made.pool.release([])
        assert not made.engine(1).service.alive(), "one that cannot give its memory back is ended"
        await made.serve(1)
        await made.until_back()
        assert made.restarts() == [1, 1]
        check_whole(await made.pool.generate(requests()), 6)
