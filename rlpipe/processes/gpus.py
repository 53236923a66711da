"""This machine's GPUs: which of them a child process gets, whether they are here, and how large
they are.

`gpu_ids` of the config are numbers into what this process may see itself: into its
CUDA_VISIBLE_DEVICES where a scheduler or a user has set it (numbers, UUIDs or MIG instances), else
into all GPUs, as nvidia-smi numbers them.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

from rlpipe.base.errors import UserError

VISIBLE, ORDER, BY_BUS = "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "PCI_BUS_ID"
UUIDS = ("GPU-", "MIG-")  # how ids begin that are no numbers
DEVICES = Path("/dev")
OTHER_DEVICES = ("dxg", "kfd")  # of WSL and of AMD, which number no GPUs there
QUERY = ("--query-gpu=index,uuid,memory.total", "--format=csv,noheader,nounits")
QUERY_TIMEOUT_S = 30.0
# what nvidia-smi -L says of a MIG instance: its profile's name, with the GB in it, and its id
MIG_LINE = re.compile(r"^\s*MIG \S*?(\d+)gb\S* .*\(UUID:\s*(MIG-[^)]+)\)", re.MULTILINE)
# of the GB in a profile's name that is memory, GiB: 4.75 of 5, 9.5 of 10, 19.6 of 20
MIG_SHARE = 0.92


def gpu_environment(field_name: str, gpu_ids: list[int]) -> dict[str, str]:
    """The environment variables that show a child process these GPUs and no others; {} for none.
    UserError, naming the field, when this process may not use one of them."""
    if not gpu_ids:
        return {}
    variables = {VISIBLE: ",".join(_of_one_process(field_name, gpu_ids))}
    # what was inherited means what it means to whoever set it
    return variables if VISIBLE in os.environ or ORDER in os.environ else variables | {ORDER: BY_BUS}


def check_gpus(field_name: str, gpu_ids: list[int], num_processes: int = 1) -> None:
    """UserError (with the config field's name) when this machine has not so many GPUs, or this
    process may not use them.

    `num_processes`: how many share them evenly. Where a driver has no files of its own, nothing is
    known of the machine.
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
                " it on another place"
            )


def gpu_gib(gpu_ids: list[int]) -> float | None:
    """Memory of the smallest of these GPUs of this machine; None where nvidia-smi does not say."""
    try:
        devices = _visible("gpu_ids", gpu_ids)
        if devices[0].startswith("MIG-"):
            gib = {uuid: MIG_SHARE * float(size) for size, uuid in MIG_LINE.findall(_nvidia_smi("-L"))}
            return min(gib[device] for device in devices)
        mib: dict[str, float] = {}  # by number and by UUID
        for number, uuid, size in (line.split(", ") for line in _nvidia_smi(*QUERY).splitlines()):
            mib |= {number: float(size), uuid: float(size)}
        if devices[0].isdecimal() and os.environ.get(ORDER, "" if VISIBLE in os.environ else BY_BUS) != BY_BUS:
            # CUDA numbers them by speed, nvidia-smi does not: it may be any of them
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
    """The GPUs that this process sees, as CUDA reads them; None: all GPUs. A list ends at its first
    invalid entry, and one that repeats an entry is empty."""
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
    """The ids of these GPUs that CUDA knows.

    UserError when they are not of those that this process sees.
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
    """The ids of GPUs that one process or one gang has. UserError when that cannot be."""
    devices = _visible(field_name, gpu_ids)
    if len(devices) > 1 and devices[0].startswith("MIG-"):
        raise UserError(
            f"{field_name}={gpu_ids}: CUDA shows a process one MIG instance; a trainer, or an engine, can have no more"
        )
    return devices
