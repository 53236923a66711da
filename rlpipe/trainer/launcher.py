"""Starts the trainer processes of one node, in place of torchrun, whose import of torch takes
seconds.

It ends with its parent, so a killed flow process leaves no trainer processes, and listens only at
the address in its arguments, so nobody else can connect. On a signal it ends its ranks and prints
one line; when one rank fails, it ends the others.

`python -m rlpipe.trainer.launcher OPTIONS -- -m MODULE ARGUMENTS`. The ranks get the environment
variables that torchrun would set.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
import time

from rlpipe.processes.launch import KILL_TIMEOUT_S, die_with_parent, signal_group
from rlpipe.trainer.held import inherited

# for the rank that serves the meeting point: the file descriptor of its bound socket
LISTENER_VARIABLE = "RLPIPE_MEETING_SOCKET"
POLL_S = 0.2
STOP_GRACE_S = 30.0
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def bind(node: int, address: str, port: int) -> socket.socket | None:
    """Binds, on node 0, the socket of the meeting point of all ranks; None on other nodes."""
    return None if node else socket.create_server((address, port))


def start_rank(
    options: argparse.Namespace, local_rank: int, port: int, listener: socket.socket | None
) -> subprocess.Popen[bytes]:
    """Starts one rank, in a session of its own.

    Rank 0 serves the meeting point, on the socket that is bound already: a socket of torch's own
    would listen on every interface of the machine. The variables tell torch that an agent (as
    torchrun is one) serves it, so that no rank opens another.
    """
    local_ranks, rank = options.nproc_per_node, options.node_rank * options.nproc_per_node + local_rank
    environment = {
        "MASTER_ADDR": options.master_addr, "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True",
        "RANK": str(rank), "WORLD_SIZE": str(options.nnodes * local_ranks),
        "LOCAL_RANK": str(local_rank), "LOCAL_WORLD_SIZE": str(local_ranks),
        "GROUP_RANK": str(options.node_rank), "GROUP_WORLD_SIZE": str(options.nnodes),
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
    }  # fmt: skip
    handed = [listener.fileno()] if listener is not None and rank == 0 else []
    if handed:
        environment[LISTENER_VARIABLE] = str(handed[0])
    argv = [sys.executable, "-u", *options.program]
    handed += inherited()
    return subprocess.Popen(argv, env=os.environ | environment, start_new_session=True, pass_fds=handed)


def until_ended(ranks: list[subprocess.Popen[bytes]], signals: list[int]) -> int:
    """Waits until all ranks have ended with code 0, one has failed, or a signal has arrived in
    `signals`; returns the exit code.
    """
    while not signals:
        codes = [rank.poll() for rank in ranks]
        failed = [
            f"rank {local_rank} of this node ended with {said(code)}" for local_rank, code in enumerate(codes) if code
        ]
        if failed:
            print(f"{'; '.join(failed)}: the ranks of this node are ended", file=sys.stderr)
            return 1
        if None not in codes:
            return 0
        time.sleep(POLL_S)
    print(f"told to end ({signal.Signals(signals[0]).name}): the ranks of this node are ended", file=sys.stderr)
    return 128 + signals[0]


def said(code: int) -> str:
    """Describes how a process ended. Examples: code 1, signal SIGKILL."""
    return f"code {code}" if code > 0 else f"signal {signal.Signals(-code).name}"


def end(ranks: list[subprocess.Popen[bytes]]) -> None:
    """Ends the ranks that still run and their child processes: SIGTERM, then SIGKILL after a grace
    period.
    """
    deadline = time.monotonic() + STOP_GRACE_S
    for rank in ranks:
        signal_group(rank, signal.SIGTERM)
    for rank in ranks:
        try:
            rank.wait(timeout=max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            signal_group(rank, signal.SIGKILL)
            rank.wait(timeout=KILL_TIMEOUT_S)


def options_of(argv: list[str]) -> argparse.Namespace:
    """Parses the options, by torchrun's names, and the command of a rank."""
    parser = argparse.ArgumentParser(prog="rlpipe.trainer.launcher", allow_abbrev=False)
    for name in ("--nnodes", "--nproc-per-node", "--node-rank", "--master-port"):
        parser.add_argument(name, type=int, required=True)
    parser.add_argument("--master-addr", required=True)
    parser.add_argument("program", nargs="+")
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    options, signals, ranks = options_of(argv), [], []
    for number in SIGNALS:
        signal.signal(number, lambda number, _: signals.append(number))
    listener = bind(options.node_rank, options.master_addr, options.master_port)
    port = listener.getsockname()[1] if listener is not None else options.master_port
    try:
        for local_rank in range(options.nproc_per_node):
            ranks.append(start_rank(options, local_rank, port, listener))
        if listener is not None:
            listener.close()  # the first rank has it now
        return until_ended(ranks, signals)
    finally:
        end(ranks)


if __name__ == "__main__":
    die_with_parent()
    sys.exit(main(sys.argv[1:]))
