"""rlpipe's own engine as a kind of engine: transformers on a CPU or one GPU, with SGLang's
protocol; it samples the same bits again.
"""

from __future__ import annotations

import sys

import aiohttp

from rlpipe.config.pipeline import PipelineConfig
from rlpipe.engines.client import EngineClient
from rlpipe.engines.kind import EngineKind
from rlpipe.engines.sglang_client import SglangClient
from rlpipe.engines.weights import Weights

SERVER = "rlpipe.extras.local_engine.server"


class LocalKind(EngineKind):
    """The server of this package, in this interpreter."""

    package = ""
    loads_adapters = False

    def client(self, name: str, url: str, session: aiohttp.ClientSession, keys: tuple[str, str]) -> EngineClient:
        return SglangClient(name, url, session, *keys, exact=True)

    def argv(self, config: PipelineConfig, weights: Weights, listen: list[str]) -> list[str]:
        return [
            sys.executable, "-m", SERVER,
            "--model-path", str(weights.folder), "--weight-version", str(weights.version),
            "--threads", str(config.engines.threads),
            "--context-tokens-max", str(config.model.context_tokens_max),
            "--requests-max", str(config.engines.in_flight_max),
            "--device", "cuda" if config.engines.gpu_ids else "cpu",
            "--dtype", config.model.dtype, *listen,
        ]  # fmt: skip


LOCAL = LocalKind()
