"""How an engine process is started: its command and environment, per kind."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from rlpipe.config import PipelineConfig
from rlpipe.engines.client import EngineClient
from rlpipe.engines.sglang import SglangClient
from rlpipe.engines.vllm import VllmClient
from rlpipe.launch import wrapped
from rlpipe.weights import Weights

SGLANG_CONTEXT_SLACK = 8  # prompt + completion one or two below SGLang's context length stops early, silently
SGLANG_CPU_FLAGS = (
    "--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch", "--grammar-backend", "none",
    "--disable-cuda-graph", "--disable-overlap-schedule", "--skip-server-warmup", "--mem-fraction-static", "0.05",
)  # fmt: skip
SGLANG_SERVER = Path(__file__).parent / "sglang_server.py"
VLLM_FLAGS = (
    "--served-model-name", "policy", "--logprobs-mode", "processed_logprobs", "--generation-config", "vllm",
    "--enable-scale-out",
)  # fmt: skip


@dataclass(frozen=True)
class Place:
    """Where one engine listens, and the keys it asks for."""

    index: int
    address: str
    port: int
    api_key: str
    admin_api_key: str

    @property
    def url(self) -> str:
        return f"http://{self.address}:{self.port}"


def client_of(kind: str, name: str, url: str, session: aiohttp.ClientSession, keys: tuple[str, str]) -> EngineClient:
    """The client that speaks an engine's protocol."""
    if kind == "vllm":
        return VllmClient(name, url, session, keys[0], keys[0])  # it has one key
    return SglangClient(name, url, session, *keys, together=kind == "local")


def gpus_of(config: PipelineConfig, index: int) -> list[int]:
    """The GPU ids of one engine: an equal share of the node's."""
    engines = config.engines
    share = len(engines.gpu_ids) // engines.count
    return engines.gpu_ids[index * share : (index + 1) * share]


def environment_of(config: PipelineConfig, place: Place) -> dict[str, str]:
    """What an engine finds in its environment, beside this process's own."""
    engines = config.engines
    told = {"RLPIPE_API_KEY": place.api_key, "RLPIPE_ADMIN_API_KEY": place.admin_api_key, "RLPIPE_DIE_WITH_PARENT": "1",
            "OMP_NUM_THREADS": str(engines.threads), "HF_HUB_OFFLINE": "1"}  # fmt: skip
    if engines.kind == "sglang":
        # the slack goes beyond what the model was made for, and is never used
        told["SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"] = "1"
        if not engines.gpu_ids:
            told["SGLANG_USE_CPU_ENGINE"] = "1"
    if engines.kind == "vllm":
        told |= {"VLLM_API_KEY": place.api_key, "VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
        if not engines.gpu_ids:
            told |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    if engines.gpu_ids:
        told["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, gpus_of(config, place.index)))
    return told | engines.environment


def argv_of(config: PipelineConfig, place: Place, weights: Weights) -> list[str]:
    """The command of an engine on `weights`."""
    build = {"local": _local, "sglang": _sglang, "vllm": _vllm}[config.engines.kind]
    return build(config, place, weights)


def _local(config: PipelineConfig, place: Place, weights: Weights) -> list[str]:
    return [
        sys.executable, "-m", "rlpipe.engines.local.server",
        "--model-path", str(weights.folder), "--weight-version", str(weights.version),
        "--host", place.address, "--port", str(place.port), "--threads", str(config.engines.threads),
        "--context-tokens-max", str(config.model.context_tokens_max), "--requests-max", str(config.engines.in_flight_max),
        "--device", "cuda" if config.engines.gpu_ids else "cpu",
    ]  # fmt: skip


def _sglang(config: PipelineConfig, place: Place, weights: Weights) -> list[str]:
    engines, model = config.engines, config.model
    argv = [
        engines.python or sys.executable, str(SGLANG_SERVER),
        "--model-path", str(weights.folder), "--weight-version", str(weights.version),
        "--host", place.address, "--port", str(place.port), "--dtype", model.dtype,
        "--context-length", str(model.context_tokens_max + SGLANG_CONTEXT_SLACK), "--skip-tokenizer-init", "--sleep-on-idle",
        "--tp-size", str(max(1, len(gpus_of(config, place.index)))),
    ]  # fmt: skip
    # on a GPU sampling_seed is ignored without it, and a resumed shard would sample other tokens; refused on a CPU
    argv += ["--enable-deterministic-inference"] if engines.gpu_ids else SGLANG_CPU_FLAGS
    return wrapped([*argv, *engines.flags])


def _vllm(config: PipelineConfig, place: Place, weights: Weights) -> list[str]:
    engines, model = config.engines, config.model
    argv = [
        engines.python or sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(weights.folder),
        "--host", place.address, "--port", str(place.port), "--dtype", model.dtype, "--seed", "0",
        "--max-model-len", str(model.context_tokens_max),
        "--tensor-parallel-size", str(max(1, len(gpus_of(config, place.index)))),
    ]  # fmt: skip
    # a seeded request whose prompt is computed in two chunks kills vLLM 0.32 on a CPU ("CPU Generator does not use offset")
    on_cpu = [] if engines.gpu_ids else ["--enforce-eager", "--no-enable-chunked-prefill"]
    return wrapped([*argv, *VLLM_FLAGS, *on_cpu, *engines.flags])
