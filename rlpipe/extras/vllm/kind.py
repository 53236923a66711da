"""vLLM as a kind of engine: its client, its command, its variables."""

from __future__ import annotations

from pathlib import Path

import aiohttp

from rlpipe.config.pipeline import PipelineConfig
from rlpipe.engines.adapters import RANK_MAX, loads_adapters
from rlpipe.engines.client import EngineClient
from rlpipe.engines.commands import STREAM_INTERVAL, memory_flags, server_argv
from rlpipe.engines.kind import EngineKind
from rlpipe.engines.weights import Weights
from rlpipe.extras.vllm.client import VllmClient
from rlpipe.extras.vllm.untied import untied

# its own 600 s know nothing of how large the weights are: the host's deadline does
READY_S = "86400"
SEQUENCES_MAX = 2048  # it refuses more than the tokens that it batches, 2048 at least
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, RANK_MAX)  # the values of --max-lora-rank
FLAGS = (
    "--served-model-name", "policy", "--logprobs-mode", "processed_logprobs", "--generation-config", "vllm",
    "--enable-scale-out", *STREAM_INTERVAL,
)  # fmt: skip


class VllmKind(EngineKind):
    """vLLM's server, in the interpreter `engines.python`."""

    package = "vllm"
    loads_adapters = True

    def client(self, name: str, url: str, session: aiohttp.ClientSession, keys: tuple[str, str]) -> EngineClient:
        return VllmClient(name, url, session, keys[0], keys[0])  # it has one key

    def argv(self, config: PipelineConfig, weights: Weights, listen: list[str]) -> list[str]:
        engines = config.engines
        # a seeded request whose prompt is computed in two chunks kills vLLM 0.32 on a CPU ("CPU
        # Generator does not use offset")
        on_device = [] if engines.gpu_ids else ["--enforce-eager", "--no-enable-chunked-prefill"]
        command = [
            "-m", "vllm.entrypoints.openai.api_server", "--model", str(weights.folder), "--seed", "0",
            "--max-model-len", str(config.model.context_tokens_max), *FLAGS, *on_device, *listen,
        ]  # fmt: skip
        # all requests in flight at once, in CUDA graphs: it would queue some, or leave its graphs
        seats = ["--max-num-seqs", str(min(engines.in_flight_max, SEQUENCES_MAX))] if engines.gpu_ids else []
        memory = memory_flags(config, "--enable-sleep-mode", "--gpu-memory-utilization")
        flags = [*seats, *memory, *_adapters(config, weights.folder)]
        return server_argv(config, command, "--tensor-parallel-size", flags)

    def variables(self, config: PipelineConfig, api_key: str) -> dict[str, str]:
        variables = {"VLLM_API_KEY": api_key, "VLLM_SERVER_DEV_MODE": "1",
                     "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1",
                     "VLLM_ENGINE_READY_TIMEOUT_S": READY_S}  # fmt: skip
        if config.model.adapter != "none":
            variables["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
        if not config.engines.gpu_ids:
            variables |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        return variables

    def readable(self, folder: Path) -> Path:
        return untied(folder)  # it reloads tied embeddings wrongly, and says nothing


def _adapters(config: PipelineConfig, base: Path) -> list[str]:
    """The flags with which an engine on `base` loads adapters; empty where it loads none."""
    if not loads_adapters(config, base):
        return []
    rank = next(size for size in RANKS if size >= config.model.adapter_rank)
    return ["--enable-lora", "--max-loras", "1", "--max-lora-rank", str(rank)]


VLLM = VllmKind()
