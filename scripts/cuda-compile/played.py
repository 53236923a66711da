"""A CUDA card that is not there: torch's compiler takes tensors of the CPU for the card's and makes
its kernels, which are kept and not run.

Imported before torch, which asks once for CUDA's bookkeeping: played.cpp is that.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import importlib.util
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

HERE = Path(__file__).parent


@dataclasses.dataclass(frozen=True)
class Card:
    """What torch's compiler asks of a card; `shared_max` bytes of shared memory may
    be had by one block of threads."""

    major: int
    minor: int
    shared_max: int
    multiprocessors: int
    example: str


# of CUDA's programming guide, "technical specifications per compute capability"
CARDS = {
    "sm_80": Card(8, 0, 163 << 10, 108, "A100"),
    "sm_89": Card(8, 9, 99 << 10, 142, "L40S, RTX 4090"),
    "sm_90": Card(9, 0, 227 << 10, 132, "H100, H200"),
    "sm_100": Card(10, 0, 227 << 10, 148, "B200"),
    "sm_120": Card(12, 0, 99 << 10, 188, "RTX PRO 6000, RTX 5090"),
}


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A kernel as it was made. `choices`: of how many it is that torch would time on the card."""

    name: str
    shared: int
    warps: int
    registers: int
    spilled: int
    choices: int


def load_bookkeeping() -> None:
    """Builds and loads played.cpp. An error of g++ is shown as it is."""
    found = importlib.util.find_spec("torch")
    assert found is not None and found.origin is not None
    torch = Path(found.origin).parent
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "played.so"
        argv = [
            "g++",
            "-std=c++20",
            "-shared",
            "-fPIC",
            f"-I{torch}/include",
            str(HERE / "played.cpp"),
            f"-L{torch}/lib",
        ]
        subprocess.run([*argv, "-lc10", "-ltorch_cpu", "-o", str(library)], check=True)
        for name in ("torch_global_deps", "c10", "torch_cpu", "c10_cuda", "torch_cuda"):
            if (part := torch / f"lib/lib{name}.so").exists():  # the last two in a CUDA build
                ctypes.CDLL(str(part), mode=ctypes.RTLD_GLOBAL)
        ctypes.CDLL(str(library))


load_bookkeeping()
import torch  # noqa: E402
import triton  # noqa: E402  # pyright: ignore[reportMissingImports]
from torch._dynamo.device_interface import CudaInterface  # noqa: E402
from torch._inductor import config as inductor  # noqa: E402
from torch._inductor.fx_passes import joint_graph, post_grad  # noqa: E402
from torch._inductor.runtime import triton_helpers, triton_heuristics  # noqa: E402
from torch._subclasses import fake_tensor  # noqa: E402
from torch._subclasses.meta_utils import MetaTensorDescriber  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402  # pyright: ignore[reportMissingImports]

DEVICE = torch.device("cuda", 0)


def play(card: Card) -> list[Kernel]:
    """From here on this process has that card; every kernel that
    is made is appended to the list."""
    _play_device(card)
    _play_triton(card)
    made: list[Kernel] = []
    tuner: Any = triton_heuristics.CachingAutotuner

    def keep(tuned: Any) -> None:
        """In place of loading the kernels onto the card."""
        name = tuned.inductor_meta["kernel_name"]
        results = tuned.compile_results
        made.extend(_kernel(name, result.kernel, len(results)) for result in results)

    tuner._make_launchers = keep
    # it asks the loaded kernels for their registers
    tuner._dynamic_scale_rblock = lambda _tuned: None
    tuner.run = lambda *_given, **_named: None
    fake_tensor.init_gpu_context = lambda _device: None
    inductor.compile_threads = 1
    inductor.use_static_triton_launcher = False
    joint_graph.lazy_init = post_grad.lazy_init = lambda *_given: (
        None
    )  # patterns of other operators, made of tensors on the card
    return made


def _kernel(name: str, kernel: Any, choices: int) -> Kernel:
    """Registers and spilled bytes of a thread are what cuobjdump says of the cubin."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(kernel.asm["cubin"])
        cubin.flush()
        tool = Path(str(triton.__file__)).parent / "backends/nvidia/bin/cuobjdump"
        said = subprocess.run([str(tool), "-res-usage", cubin.name], check=True, capture_output=True, text=True).stdout
    uses = dict(part.split(":", 1) for line in said.splitlines() for part in line.split() if part.count(":") == 1)
    data = kernel.metadata
    return Kernel(name, data.shared, data.num_warps, int(uses["REG"]), int(uses["STACK"]), choices)


def _play_device(card: Card) -> None:
    """What torch says of the device.

    Where torch makes a tensor on it, memory of the CPU is taken.
    """
    properties = SimpleNamespace(
        name=card.example, major=card.major, minor=card.minor, multi_processor_count=card.multiprocessors, warp_size=32,
        regs_per_multiprocessor=65536, max_threads_per_multi_processor=2048, max_threads_per_block=1024,
        shared_memory_per_block_optin=card.shared_max, total_memory=80 << 30, L2_cache_size=50 << 20,
    )  # fmt: skip
    answers: dict[str, Callable[..., Any]] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_properties": lambda _device=None: properties,
        "get_device_capability": lambda _device=None: (card.major, card.minor),
        "get_rng_state": lambda _device=None: torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": lambda *_given: None,
        "_exchange_device": lambda _index: 0,
        "_maybe_exchange_device": lambda _index: 0,
        "synchronize": lambda _device=None: None,
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)
        if hasattr(CudaInterface, name.lstrip("_")):
            setattr(CudaInterface, name.lstrip("_"), staticmethod(answer))
    CudaInterface.get_raw_stream = staticmethod(lambda _index: 0)  # pyright: ignore[reportAttributeAccessIssue]
    inside: Any = torch._C
    for name in ("getDevice", "setDevice", "exchangeDevice", "maybeExchangeDevice", "getCurrentRawStream"):
        setattr(inside, f"_cuda_{name}", lambda *_given: 0)
    inside._dynamo.guards._empty_strided_cuda = lambda size, stride, dtype: torch.empty_strided(
        size, stride, dtype=dtype
    )
    torch.version.cuda = "13.0"


def _play_triton(card: Card) -> None:
    target = GPUTarget("cuda", 10 * card.major + card.minor, 32)
    driver = SimpleNamespace(
        get_current_target=lambda: target, get_current_device=lambda: 0, get_active_torch_device=lambda: DEVICE
    )
    triton.runtime.driver.set_active(driver)
    triton_helpers.set_driver_to_gpu = lambda: None


@contextlib.contextmanager
def on_the_card() -> Iterator[None]:
    """Meanwhile the compiler takes tensors of the CPU that it is given for the card's."""
    describe = MetaTensorDescriber.describe_tensor

    def described(self: Any, *given: Any, **named: Any) -> Any:
        return dataclasses.replace(describe(self, *given, **named), device=DEVICE)

    MetaTensorDescriber.describe_tensor = described
    try:
        yield
    finally:
        MetaTensorDescriber.describe_tensor = describe
