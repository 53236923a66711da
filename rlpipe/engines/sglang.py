"""The engine kind SGLang: its client, command and environment variables."""

from __future__ import annotations

from pathlib import Path

import aiohttp

from rlpipe.config.pipeline import PipelineConfig
from rlpipe.engines.adapters import LAYERS, loads_adapters
from rlpipe.engines.client import EngineClient
from rlpipe.engines.commands import STREAM_INTERVAL, memory_flags, server_argv
from rlpipe.engines.kind import EngineKind
from rlpipe.engines.sglang_client import SglangClient
from rlpipe.engines.weights import Weights

# SGLang stops silently when prompt + completion are one or two tokens below its context length
CONTEXT_SLACK = 8
CPU_FLAGS = (
    "--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch",
    "--grammar-backend", "none", "--disable-cuda-graph", "--disable-overlap-schedule", "--skip-server-warmup",
    "--mem-fraction-static", "0.05",
)  # fmt: skip
SGLANG_STREAMS = ("--incremental-streaming-output", *STREAM_INTERVAL)
SERVER = Path(__file__).parent / "sglang_server.py"
# requests per CUDA graph of SGLang's decoding: each costs 2 MB, and every 32 one more graph
GRAPHS_MAX = 1024


class SglangKind(EngineKind):
    """SGLang's server, run by the interpreter `engines.python`."""

    package = "sglang"
    loads_adapters = True

    def client(self, name: str, url: str, session: aiohttp.ClientSession, keys: tuple[str, str]) -> EngineClient:
        return SglangClient(name, url, session, *keys)

    def argv(self, config: PipelineConfig, weights: Weights, listen: list[str]) -> list[str]:
        on_device = [] if config.engines.gpu_ids else CPU_FLAGS
        command = [
            str(SERVER), "--model-path", str(weights.folder), "--weight-version", str(weights.version),
            "--context-length", str(config.model.context_tokens_max + CONTEXT_SLACK),
            "--skip-tokenizer-init", "--sleep-on-idle", *SGLANG_STREAMS, *on_device, *listen,
        ]  # fmt: skip
        memory = memory_flags(config, "--enable-memory-saver", "--mem-fraction-static")
        flags = [*_seats(config), *memory, *_adapters(config, weights.folder)]
        return server_argv(config, command, "--tp-size", flags)

    def variables(self, config: PipelineConfig, api_key: str) -> dict[str, str]:
        # the slack exceeds the model's context length, but is never used
        variables = {"SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"}
        return variables if config.engines.gpu_ids else variables | {"SGLANG_USE_CPU_ENGINE": "1"}


def _seats(config: PipelineConfig) -> list[str]:
    """The flags with which it computes all requests in flight at once, in CUDA graphs; by default
    it would queue some, or leave its graphs.
    """
    seats = config.engines.in_flight_max
    graphs = ["--cuda-graph-max-bs-decode", str(min(seats, GRAPHS_MAX))] if config.engines.gpu_ids else []
    return ["--max-running-requests", str(seats), *graphs]


def _adapters(config: PipelineConfig, base: Path) -> list[str]:
    """The flags with which an engine on `base` loads adapters; empty where it loads none."""
    if not loads_adapters(config, base):
        return []
    on_device = [] if config.engines.gpu_ids else ["--lora-backend", "torch_native"]
    # two at a time: a request for the base alone counts as one
    several = ["--max-loras-per-batch", "2", "--max-lora-rank", str(config.model.adapter_rank)]
    layers = config.model.adapter_targets or LAYERS
    return ["--enable-lora", *several, "--lora-target-modules", *layers, *on_device]


SGLANG = SglangKind()
