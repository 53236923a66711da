"""The files of another node over HTTP, where that node goes away, is silent, or answers in another
way."""

from __future__ import annotations

import contextlib
import errno
import socket
import tempfile
import threading
from collections.abc import Iterator

import pytest

from rlpipe.processes.launch import free_port
from rlpipe.store import file_server
from rlpipe.store.file_server import FileServer
from tests.deadlines import DEADLINE_S

DATA = bytes(range(256)) * 8
PART = b"HTTP/1.1 206 Partial Content\r\nContent-Length: %d\r\n%s\r\n%s"


def part(data: bytes, length: int | None = None, header: bytes = b"") -> bytes:
    return PART % (len(data) if length is None else length, header, data)


@contextlib.contextmanager
def node(*connections: list[bytes | None]) -> Iterator[tuple[FileServer, list[bytes]]]:
    """A node that answers the requests on each connection so, then closes it; None: never. And the
    first lines of the requests.
    """
    listener, over, asked = socket.create_server(("127.0.0.1", 0)), threading.Event(), list[bytes]()

    def serve() -> None:
        for answers in connections:
            connection, _ = listener.accept()
            with connection, connection.makefile("rb") as request:
                for answer in answers:
                    lines = list(iter(request.readline, b"\r\n"))
                    asked.append(lines[0].strip())
                    assert b"Authorization: Bearer key\r\n" in lines
                    if answer is None:
                        over.wait(DEADLINE_S)
                    else:
                        connection.sendall(answer)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield FileServer(f"http://127.0.0.1:{listener.getsockname()[1]}/files", "key"), asked
    finally:
        over.set()
        thread.join(DEADLINE_S)
        listener.close()


def copied(server: FileServer, start: int = 0, end: int = len(DATA)) -> tuple[int, bytes]:
    with tempfile.TemporaryFile() as file:
        last = server.copy_part("a key/x", start, end, file.fileno())
        return last, file.read()


def test_parts_come_over_one_connection_into_their_places() -> None:
    with node([part(DATA[:100]), part(DATA[100:])]) as (server, asked):
        assert copied(server, 0, 100) == (100, DATA[:100])
        assert copied(server, 100) == (len(DATA), bytes(100) + DATA[100:])
    assert asked[1] == b"GET /files/a%20key/x HTTP/1.1"


def test_a_connection_that_the_node_closed_meanwhile_is_made_again() -> None:
    closing = part(DATA, header=b"Connection: close\r\n")
    with node([part(DATA)], [closing], [part(DATA)]) as (server, asked):
        assert [copied(server) for _ in range(3)] == [(len(DATA), DATA)] * 3
    assert len(asked) == 3


def test_an_answer_that_is_cut_off_is_asked_for_once_more() -> None:
    cut = part(DATA[:9], len(DATA))
    with node([cut], [part(DATA)]) as (server, _):
        assert copied(server) == (len(DATA), DATA)
    with node([cut], [cut]) as (server, _), pytest.raises(OSError, match="the connection was lost"):
        copied(server)


def test_a_file_that_ends_before_says_where() -> None:
    beyond = b"HTTP/1.1 416 Range Not Satisfiable\r\nContent-Length: 2\r\n\r\nno"
    with node([part(DATA[:9]), beyond, beyond]) as (server, _):
        assert copied(server)[0] == 9
        assert copied(server, 5000, 6000)[0] == 5000
        assert server.read_part("x", 5000, 6000) == b""


@pytest.mark.parametrize(
    ("answer", "number"),
    [
        (b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n", errno.ENOENT),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\nx", errno.EIO),  # all of it, and not the part
        (b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 0\r\n\r\n", errno.EIO),
        (b"220 mail.example.org\r\n\r\n", errno.EIO),
    ],
)
def test_another_answer_is_an_error(answer: bytes, number: int) -> None:
    with node([answer]) as (server, _), pytest.raises(OSError, match="files/a key/x") as caught:
        copied(server)
    assert caught.value.errno == number


def test_a_node_that_is_gone_or_silent_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OSError, match="the connection was lost"):
        FileServer(f"http://127.0.0.1:{free_port()}/files", "key").read("x")
    monkeypatch.setattr(file_server, "SILENCE_S", 0.1)
    with node([None]) as (server, _), pytest.raises(TimeoutError):
        server.read("x")
