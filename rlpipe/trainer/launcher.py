"""torchrun as a gang is started by it: it ends with its parent and listens where its arguments say, so a killed flow process leaves no
gang behind, and nobody else gets in. Told to end, it ends its ranks and says so in one line.
"""

from __future__ import annotations

import socket
import sys
from datetime import timedelta
from typing import Any

import torch.distributed.run as torchrun
from torch._C._distributed_c10d import TCPStore
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.rendezvous import static_tcp_rendezvous

from rlpipe.processes.launch import die_with_parent


def bind(argv: list[str]) -> socket.socket | None:
    """On node 0 the socket that the nodes meet at; its port takes the place of port 0 in `argv`."""
    if argv[argv.index("--node-rank") + 1] != "0":
        return None
    at = argv.index("--master-port") + 1
    listener = socket.create_server((argv[argv.index("--master-addr") + 1], int(argv[at])))
    argv[at] = str(listener.getsockname()[1])
    return listener


class MeetingPoint(TCPStore):
    """torch's store, on a socket that is bound already: its own would listen at every address of the machine."""

    listener: socket.socket | None = None

    def __init__(self, host: str, port: int, world_size: int, is_master: bool, timeout: timedelta, **_: Any) -> None:
        if not is_master:
            super().__init__(host, port, world_size, False, timeout)
            return
        assert self.listener is not None, "bind comes first"
        handed = self.listener.detach()  # the store closes it
        super().__init__(host, port, world_size, True, timeout, master_listen_fd=handed)


if __name__ == "__main__":
    die_with_parent()
    MeetingPoint.listener = bind(sys.argv)
    static_tcp_rendezvous.TCPStore = MeetingPoint  # pyright: ignore[reportPrivateImportUsage]
    try:
        torchrun.main()
    except SignalException as told:  # whoever told it to end knows why: a traceback would be read as a fault
        sys.exit(128 + told.sigval)
