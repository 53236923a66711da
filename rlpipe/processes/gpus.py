"""This machine's GPUs: assigns them to child processes, checks that they exist and that kernels can
be built for them, and reads their memory.

`gpu_ids` in the config index into the GPUs that this process sees: into its CUDA_VISIBLE_DEVICES
(numbers, UUIDs or MIG instances) if a scheduler or a user has set it, else into all GPUs in the
order of nvidia-smi.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sysconfig
from pathlib import Path

from rlpipe.base.errors import UserError

VISIBLE, ORDER, BY_BUS = "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "PCI_BUS_ID"
UUIDS = ("GPU-", "MIG-")  # prefixes of ids that are not numbers
DEVICES = Path("/dev")
OTHER_DEVICES = ("dxg", "kfd")  # device files of WSL and of AMD, which do not number the GPUs
QUERY = ("--query-gpu=index,uuid,memory.total", "--format=csv,noheader,nounits")
QUERY_TIMEOUT_S = 30.0
# the line of nvidia-smi -L for a MIG instance: the name of its profile, which has the GB, and its
# id
MIG_LINE = re.compile(r"^\s*MIG \S*?(\d+)gb\S* .*\(UUID:\s*(MIG-[^)]+)\)", re.MULTILINE)
# GiB of memory per GB in a profile's name: 4.75 of 5, 9.5 of 10, 19.6 of 20
MIG_SHARE = 0.92
SEARCHED = ("CPATH", "C_INCLUDE_PATH")  # further places in which a C compiler looks for headers


def gpu_environment(field_name: str, gpu_ids: list[int]) -> dict[str, str]:
    """The environment variables with which a child process sees only these GPUs; {} for none.
    UserError naming the field when this process may not use one of them.
    """
    if not gpu_ids:
        return {}
    variables = {VISIBLE: ",".join(_of_one_process(field_name, gpu_ids))}
    # an inherited value is kept: its order is that of whoever set it
    return variables if VISIBLE in os.environ or ORDER in os.environ else variables | {ORDER: BY_BUS}


def check_gpus(field_name: str, gpu_ids: list[int], num_processes: int = 1) -> None:
    """Raises UserError naming the config field when this machine does not have these GPUs, or this
    process may not use them.

    `num_processes`: the number of processes that share them evenly. With drivers that have no
    device file per GPU (WSL, AMD) the number of GPUs is not checked.
    """
    devices, share = _visible(field_name, gpu_ids), len(gpu_ids) // num_processes
    for index in range(num_processes):
        _of_one_process(field_name, gpu_ids[index * share : (index + 1) * share])
    if gpu_ids and not any((DEVICES / name).exists() for name in OTHER_DEVICES):
        count = sum(1 for path in DEVICES.glob("nvidia*") if path.name.removeprefix("nvidia").isdecimal())
        if max(int(device) if device.isdecimal() else 0 for device in devices) >= count:
            here = f"its GPUs are 0 to {count - 1}" if count else "it has none"
            inherited = f"; {VISIBLE}={os.environ[VISIBLE]}" if VISIBLE in os.environ else ""
            raise UserError(
                f"{field_name}={gpu_ids}: not all of them are of this machine ({here}{inherited}); name others, or run"
                " it on another machine"
            )


def gpu_gib(gpu_ids: list[int]) -> float | None:
    """The memory, in GiB, of the smallest of these GPUs of this machine; None where nvidia-smi does
    not report it.
    """
    try:
        devices = _visible("gpu_ids", gpu_ids)
        if devices[0].startswith("MIG-"):
            gib = {uuid: MIG_SHARE * float(size) for size, uuid in MIG_LINE.findall(_nvidia_smi("-L"))}
            return min(gib[device] for device in devices)
        mib: dict[str, float] = {}  # memory by index and by UUID
        for number, uuid, size in (line.split(", ") for line in _nvidia_smi(*QUERY).splitlines()):
            mib |= {number: float(size), uuid: float(size)}
        if devices[0].isdecimal() and os.environ.get(ORDER, "" if VISIBLE in os.environ else BY_BUS) != BY_BUS:
            # CUDA orders GPUs by speed, nvidia-smi does not: it may be any of them
            devices = [*mib]
        return min(mib[device] for device in devices) / 1024
    except (OSError, ValueError, KeyError, subprocess.SubprocessError, UserError):
        return None


def _nvidia_smi(*words: str) -> str:
    done = subprocess.run(
        ["nvidia-smi", *words],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=QUERY_TIMEOUT_S,
        check=True,
    )
    return done.stdout


def _inherited() -> list[str] | None:
    """The GPUs that this process sees, by CUDA's rules; None: all GPUs. A list ends at its first
    invalid entry; a list that repeats an entry is empty.
    """
    if VISIBLE not in os.environ:
        return None
    words = [word.strip() for word in os.environ[VISIBLE].split(",")]
    kind = next((kind for kind in UUIDS if words[0].startswith(kind)), "")
    devices = []
    for word in words:
        number = re.match(r"\+?(\d+)", word)  # CUDA reads 1 in "1st"
        if not (word.startswith(kind) if kind else number):
            break
        devices.append(word if kind or not number else str(int(number[1])))
    return devices if len({*devices}) == len(devices) else []


def _visible(field_name: str, gpu_ids: list[int]) -> list[str]:
    """The ids of these GPUs for CUDA.

    UserError when this process does not see one of them.
    """
    inherited = _inherited()
    if inherited is None:
        return [*map(str, gpu_ids)]
    if max(gpu_ids, default=-1) >= len(inherited):
        shown = f"no GPU but {', '.join(map(str, range(len(inherited))))}" if inherited else "no GPU"
        raise UserError(
            f"{field_name}={gpu_ids}: with {VISIBLE}={os.environ[VISIBLE]} there is {shown}; name others, or start it"
            " where more are visible"
        )
    return [inherited[number] for number in gpu_ids]


def _of_one_process(field_name: str, gpu_ids: list[int]) -> list[str]:
    """The ids of the GPUs of one process, or of the trainer processes of a node. UserError for a
    combination that is not possible.
    """
    devices = _visible(field_name, gpu_ids)
    if len(devices) > 1 and devices[0].startswith("MIG-"):
        raise UserError(
            f"{field_name}={gpu_ids}: CUDA shows a process one MIG instance; a trainer, or an engine, can have no more"
        )
    return devices


def check_compiler() -> None:
    """Raises UserError when there is no C compiler, or there are no headers of this Python, which
    training on GPUs needs: Triton compiles a small C extension, the launcher of its kernels, if it
    has none in its cache, even if all kernels are cached.
    """
    named = os.environ.get("CC", "")
    if not any(shutil.which(name) for name in ([named] if named else ["gcc", "clang"])):
        missing = f"CC={named} is no program" if named else "no C compiler (gcc, clang)"
        raise UserError(
            f"trainer.gpu_ids: {missing}, without which no kernel of Triton runs; apt-get install gcc, or name one in"
            " CC"
        )
    own = sysconfig.get_path("include")
    folders = [own, *(folder for name in SEARCHED for folder in os.environ.get(name, "").split(os.pathsep) if folder)]
    if not any((Path(folder) / "Python.h").is_file() for folder in folders):
        version = sysconfig.get_python_version()
        raise UserError(
            f"trainer.gpu_ids: no Python.h in {own}, without which no kernel of Triton runs; apt-get install"
            f" python{version}-dev, or a Python that brings its headers"
        )
