"""The command and the environment that start an engine process, per kind."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from rlpipe.base.errors import UserError
from rlpipe.config.colocation import GPU_GIB_SMALLEST, engine_fraction
from rlpipe.config.operational import EnginesConfig
from rlpipe.config.pipeline import PipelineConfig
from rlpipe.engines.adapters import adapter_flags
from rlpipe.engines.toolkit import toolkit_environment
from rlpipe.engines.weights import Weights
from rlpipe.processes.gpus import gpu_environment, gpu_gib
from rlpipe.processes.launch import wrapped

# prompt + completion one or two below SGLang's context length stops early, silently
SGLANG_CONTEXT_SLACK = 8
SGLANG_CPU_FLAGS = (
    "--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch",
    "--grammar-backend", "none", "--disable-cuda-graph", "--disable-overlap-schedule", "--skip-server-warmup",
    "--mem-fraction-static", "0.05",
)  # fmt: skip
# a stream says what is new, not all again; an event for each token would cost more than the token
STREAM_INTERVAL = ("--stream-interval", "32")
SGLANG_STREAMS = ("--incremental-streaming-output", *STREAM_INTERVAL)
SGLANG_SERVER = Path(__file__).parent / "sglang_server.py"
PYTHON_TIMEOUT_S = 60.0  # a cold disk, or a shared one, takes long to start an interpreter
COLOCATION_FLAGS = {  # how memory can be given back at all, and what part of a GPU is taken
    "sglang": ("--enable-memory-saver", "--mem-fraction-static"),
    "vllm": ("--enable-sleep-mode", "--gpu-memory-utilization"),
}
# requests that SGLang decodes at once in a CUDA graph: each costs 2 MB, and 32 more a graph
GRAPHS_MAX = 1024
# its own 600 s know nothing of how large the weights are: the host's deadline does
VLLM_READY_S = "86400"
VLLM_SEQUENCES_MAX = 2048  # vLLM refuses more than the tokens that it batches, 2048 at least
VLLM_FLAGS = (
    "--served-model-name", "policy", "--logprobs-mode", "processed_logprobs", "--generation-config", "vllm",
    "--enable-scale-out", *STREAM_INTERVAL,
)  # fmt: skip


@dataclass(frozen=True)
class EngineAddress:
    """The address of one engine of a node. `keys`: the API key and the admin key that it asks
    for."""

    index: int
    host: str
    port: int
    keys: tuple[str, str]

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"


def check_python(engines: EnginesConfig) -> str:
    """Describes the engines' interpreter in a line; UserError when it cannot be run, or lacks the
    package that `engines.kind` names."""
    if engines.kind == "local":
        return ""
    python = engines.python or sys.executable
    install = "name the interpreter of an environment that has it (docs/engines.md)"
    program = (
        f"import importlib.util as u; s = u.find_spec({engines.kind!r}); print(s.origin if s and s.origin else '')"
    )
    try:
        done = subprocess.run(
            [python, "-c", program],
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=PYTHON_TIMEOUT_S,
            check=False,
        )
    except (OSError, ValueError) as error:
        raise UserError(f"engines.python={python!r}: cannot be run ({error}); {install}") from error
    except subprocess.TimeoutExpired as error:
        raise UserError(
            f"engines.python={python!r}: did not answer within {PYTHON_TIMEOUT_S:g} s; {install}"
        ) from error
    if done.returncode:
        raise UserError(
            f"engines.python={python!r}: it is no Python that runs ({done.stderr.strip()[-200:]!r}); {install}"
        )
    if not done.stdout.strip():
        raise UserError(f"engines.python={python!r}: has no {engines.kind}, which engines.kind asks for; {install}")
    return f"engines: {engines.kind} of {python}"


def environment_of(config: PipelineConfig, address: EngineAddress) -> dict[str, str]:
    """The environment variables of an engine, beside those of this process."""
    engines, (api_key, admin_api_key) = config.engines, address.keys
    variables = {"RLPIPE_API_KEY": api_key, "RLPIPE_ADMIN_API_KEY": admin_api_key, "RLPIPE_DIE_WITH_PARENT": "1",
                 "OMP_NUM_THREADS": str(engines.threads), "HF_HUB_OFFLINE": "1"}  # fmt: skip
    if engines.kind == "sglang":
        # the slack goes beyond what the model was made for, and is never used
        variables["SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"] = "1"
        if not engines.gpu_ids:
            variables["SGLANG_USE_CPU_ENGINE"] = "1"
    if engines.kind == "vllm":
        variables |= {"VLLM_API_KEY": api_key, "VLLM_SERVER_DEV_MODE": "1",
                      "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1",
                      "VLLM_ENGINE_READY_TIMEOUT_S": VLLM_READY_S}  # fmt: skip
        if config.model.adapter != "none":
            variables["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
        if not engines.gpu_ids:
            variables |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    share = len(engines.gpu_ids) // engines.count  # of the node's, each engine has an equal share
    gpu_ids = engines.gpu_ids[address.index * share : (address.index + 1) * share]
    if gpu_ids and engines.kind != "local":
        variables |= toolkit_environment(Path(engines.python or sys.executable))
    return variables | gpu_environment("engines.gpu_ids", gpu_ids) | engines.environment


def argv_of(config: PipelineConfig, address: EngineAddress, weights: Weights) -> list[str]:
    """The command of an engine on `weights`."""
    engines, listen = config.engines, ["--host", address.host, "--port", str(address.port)]
    if engines.kind == "local":
        return [*_local(config, weights), *listen]
    command, parallel_flag = (_sglang, "--tp-size") if engines.kind == "sglang" else (_vllm, "--tensor-parallel-size")
    parallel = [parallel_flag, str(max(1, len(engines.gpu_ids) // engines.count))]
    python = engines.python or sys.executable
    # of a flag that is there twice, the last one counts
    flags = [
        *parallel,
        *seats_flags(engines),
        *memory_flags(config),
        *adapter_flags(config, weights.folder),
        *engines.flags,
    ]
    return wrapped([python, *command(config, weights), *listen, "--dtype", config.model.dtype, *flags])


def seats_flags(engines: EnginesConfig) -> list[str]:
    """The flags that let an engine compute all requests in flight at once, in CUDA graphs. Without
    them it would queue some or leave its graphs."""
    seats = engines.in_flight_max
    if engines.kind == "sglang":
        graphs = ["--cuda-graph-max-bs-decode", str(min(seats, GRAPHS_MAX))] if engines.gpu_ids else []
        return ["--max-running-requests", str(seats), *graphs]
    return ["--max-num-seqs", str(min(seats, VLLM_SEQUENCES_MAX))] if engines.gpu_ids else []


def memory_flags(config: PipelineConfig) -> list[str]:
    """The flags that make an engine share its GPUs, and say how much of a GPU it may take, unless
    `engines.flags` says that. Empty when it does not share."""
    engines = config.engines
    if not engines.colocate:
        return []
    release, fraction = COLOCATION_FLAGS[engines.kind]
    if any(flag.split("=", 1)[0] == fraction for flag in engines.flags):
        return [release]
    return [release, fraction, f"{engine_fraction(config, gpu_gib(engines.gpu_ids) or GPU_GIB_SMALLEST):.2f}"]


def _local(config: PipelineConfig, weights: Weights) -> list[str]:
    return [
        sys.executable, "-m", "rlpipe.engines.local.server",
        "--model-path", str(weights.folder), "--weight-version", str(weights.version),
        "--threads", str(config.engines.threads),
        "--context-tokens-max", str(config.model.context_tokens_max),
        "--requests-max", str(config.engines.in_flight_max),
        "--device", "cuda" if config.engines.gpu_ids else "cpu",
    ]  # fmt: skip


def _sglang(config: PipelineConfig, weights: Weights) -> list[str]:
    on_device = [] if config.engines.gpu_ids else SGLANG_CPU_FLAGS
    return [
        str(SGLANG_SERVER), "--model-path", str(weights.folder), "--weight-version", str(weights.version),
        "--context-length", str(config.model.context_tokens_max + SGLANG_CONTEXT_SLACK),
        "--skip-tokenizer-init", "--sleep-on-idle", *SGLANG_STREAMS, *on_device,
    ]  # fmt: skip


def _vllm(config: PipelineConfig, weights: Weights) -> list[str]:
    # a seeded request whose prompt is computed in two chunks kills vLLM 0.32 on a CPU ("CPU
    # Generator does not use offset")
    on_device = [] if config.engines.gpu_ids else ["--enforce-eager", "--no-enable-chunked-prefill"]
    return [
        "-m", "vllm.entrypoints.openai.api_server", "--model", str(weights.folder), "--seed", "0",
        "--max-model-len", str(config.model.context_tokens_max), *VLLM_FLAGS, *on_device,
    ]  # fmt: skip
