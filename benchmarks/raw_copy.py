"""A plain copy of a file over TCP, for benchmarks/weights.py: the least that it takes to get bytes
from one node to another.

raw_copy.py send ADDRESS PORT            # serves whoever asks for a path
raw_copy.py receive ADDRESS PORT PATH TARGET
    # waits for a line of its input, and prints when it had all (seconds of the clock)
"""

from __future__ import annotations

import socket
import sys
import threading
import time
from pathlib import Path

PIECE_BYTES = 1 << 20


def send(address: str, port: int) -> None:
    listener = socket.create_server((address, port))
    print("ready", flush=True)
    while True:
        connection, _ = listener.accept()
        threading.Thread(target=_send_file, args=(connection,), daemon=True).start()


def _send_file(connection: socket.socket) -> None:
    with connection, connection.makefile("r") as request, open(request.readline().rstrip("\n"), "rb") as file:
        connection.sendfile(file)


def receive(address: str, port: int, path: str, target: Path) -> None:
    print("ready", flush=True)
    sys.stdin.readline()
    piece = memoryview(bytearray(PIECE_BYTES))
    with socket.create_connection((address, port)) as connection, target.open("wb", buffering=0) as file:
        connection.sendall(f"{path}\n".encode())
        while count := connection.recv_into(piece):
            file.write(piece[:count])
    print(time.time(), flush=True)


if __name__ == "__main__":
    role, address, port, *rest = sys.argv[1:]
    if role == "send":
        send(address, int(port))
    else:
        receive(address, int(port), rest[0], Path(rest[1]))
