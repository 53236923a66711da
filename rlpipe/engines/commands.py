"""The command and the environment that start an engine process."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from rlpipe.base.errors import UserError
from rlpipe.config.colocation import GPU_GIB_SMALLEST, engine_fraction
from rlpipe.config.operational import EnginesConfig
from rlpipe.config.pipeline import PipelineConfig
from rlpipe.engines.kind import kind_of
from rlpipe.engines.weights import Weights
from rlpipe.processes.gpus import gpu_environment, gpu_gib
from rlpipe.processes.launch import wrapped

# events hold only new tokens; an event per token would cost more than the token
STREAM_INTERVAL = ("--stream-interval", "32")
CUDA_HOMES = ("CUDA_HOME", "CUDA_PATH")
# in pip's packages of CUDA 13 and newer
CUDA_WHEELS = "lib/python3.*/site-packages/nvidia/cu1[0-9]"
PYTHON_TIMEOUT_S = 60.0  # an interpreter starts slowly from a cold or a shared disk


@dataclass(frozen=True)
class EngineAddress:
    """The address of one engine of a node. `keys`: its API key and its admin key."""

    index: int
    host: str
    port: int
    keys: tuple[str, str]

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"


def check_python(engines: EnginesConfig) -> str:
    """Describes the engines' interpreter in one line. UserError when it cannot be run, lacks the
    package of `engines.kind`, or when this installation lacks that kind.
    """
    package = kind_of(engines.kind).package
    if not package:
        return ""
    python = engines.python or sys.executable
    install = "name the interpreter of an environment that has it (docs/engines.md)"
    program = f"import importlib.util as u; s = u.find_spec({package!r}); print(s.origin if s and s.origin else '')"
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
        raise UserError(f"engines.python={python!r}: has no {package}, which engines.kind asks for; {install}")
    return f"engines: {package} of {python}"


def environment_of(config: PipelineConfig, address: EngineAddress) -> dict[str, str]:
    """The environment variables of an engine, in addition to those of this process."""
    engines, kind, (api_key, admin_api_key) = config.engines, kind_of(config.engines.kind), address.keys
    variables = {"RLPIPE_API_KEY": api_key, "RLPIPE_ADMIN_API_KEY": admin_api_key, "RLPIPE_DIE_WITH_PARENT": "1",
                 "OMP_NUM_THREADS": str(engines.threads), "HF_HUB_OFFLINE": "1"}  # fmt: skip
    variables |= kind.variables(config, api_key)
    share = len(engines.gpu_ids) // engines.count  # the engines share the node's GPUs equally
    gpu_ids = engines.gpu_ids[address.index * share : (address.index + 1) * share]
    if gpu_ids and kind.package:
        variables |= toolkit_environment(Path(engines.python or sys.executable))
    return variables | gpu_environment("engines.gpu_ids", gpu_ids) | engines.environment


def toolkit_environment(python: Path) -> dict[str, str]:
    """The CUDA_HOME and PATH of an engine on a GPU that `python` runs: SGLang and vLLM build GPU
    kernels at their first request, with nvcc and ninja.

    CUDA_HOME is the folder of pip's nvcc in the interpreter's environment, which is not searched by
    default; the machine's toolkit often has another version. It is unchanged if the user has set
    it, or if the environment has no nvcc. PATH begins with the programs of the environment (ninja
    is one), as if it were activated.
    """
    # a bare name is resolved by PATH, not by the working directory
    programs = Path(shutil.which(python) or python).parent
    variables = {"PATH": f"{programs}{os.pathsep}{os.environ.get('PATH', os.defpath)}"}
    if not any(os.environ.get(name) for name in CUDA_HOMES):
        homes = [home for home in sorted(programs.parent.glob(CUDA_WHEELS)) if (home / "bin" / "nvcc").is_file()]
        variables |= {"CUDA_HOME": str(homes[-1])} if homes else {}
    return variables


def argv_of(config: PipelineConfig, address: EngineAddress, weights: Weights) -> list[str]:
    """The command that starts an engine on `weights`."""
    return kind_of(config.engines.kind).argv(config, weights, ["--host", address.host, "--port", str(address.port)])


def server_argv(config: PipelineConfig, command: list[str], parallel_flag: str, flags: list[str]) -> list[str]:
    """The command of a server that `engines.python` runs: on all GPUs of the engine, in the model's
    dtype, with `flags`, then those of `engines.flags`.
    """
    engines = config.engines
    parallel = [parallel_flag, str(max(1, len(engines.gpu_ids) // engines.count))]
    # the last one of a repeated flag counts
    own = ["--dtype", config.model.dtype, *parallel, *flags, *engines.flags]
    return wrapped([engines.python or sys.executable, *command, *own])


def memory_flags(config: PipelineConfig, release: str, fraction: str) -> list[str]:
    """The flags of an engine that shares its GPUs: `release`, and `fraction` with the share of GPU
    memory that it may use, unless `engines.flags` sets it. Empty when it does not share.
    """
    engines = config.engines
    if not engines.colocate:
        return []
    if any(flag.split("=", 1)[0] == fraction for flag in engines.flags):
        return [release]
    return [release, fraction, f"{engine_fraction(config, gpu_gib(engines.gpu_ids) or GPU_GIB_SMALLEST):.2f}"]
