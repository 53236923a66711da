"""Runs a program of the tests on several ranks: what it imports is imported
once, and every rank is a fork.

The launcher of a run's trainer starts a process for each rank, and each imports torch.
Example: `python -m tests.ranks tests.ranks_of_a_step 2 FOLDER`.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

from torch.multiprocessing import start_processes

from rlpipe.processes.launch import free_port


def run_rank(rank: int, program: str, folder: str, *arguments: str) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    importlib.import_module(program).main(Path(folder), *arguments)


if __name__ == "__main__":
    program, ranks, *given = sys.argv[1:]
    os.environ |= {"WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    importlib.import_module(program)
    start_processes(run_rank, (program, *given), int(ranks), start_method="fork")
