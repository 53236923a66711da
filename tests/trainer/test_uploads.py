"""An upload leaves the cable of its node to others that fetch the same weights from it, because
engines wait for those."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest
from aiohttp import web

from rlpipe.store.backend import open_store
from rlpipe.trainer import publishing
from rlpipe.trainer.node_server import FetchedFile
from rlpipe.trainer.publishing import Fetches, Publication, Uploads, publish_bytes
from tests.deadlines import DEADLINE_S, until_async

KEY = "runs/a/rl/00000/policy/try/file"
BYTES = 64 << 20  # more than the kernel takes from a sender whom nobody reads


def published(uploads: Uploads) -> Publication:
    path = uploads.disk / KEY
    return Publication("try", {KEY: publish_bytes(path.parent, path.name, b"weights")}, {})


@pytest.fixture
def uploads(tmp_path: Path) -> Uploads:
    return Uploads(open_store(f"file://{tmp_path}/store"), tmp_path / "published", begin_s=DEADLINE_S)


def test_an_upload_begins_when_nobody_fetches_any_more(uploads: Uploads, tmp_path: Path) -> None:
    with uploads.fetches.fetching():
        uploads.begin(published(uploads))
        sending = uploads.of("try")
        assert sending is not None and not sending.done()
        assert not (tmp_path / "store").exists()
    sending.result(DEADLINE_S)
    assert (tmp_path / "store" / KEY).read_bytes() == b"weights"


def test_a_node_that_fetches_without_end_holds_no_upload_up(uploads: Uploads, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publishing, "GIVE_WAY_S", 0.1)
    monkeypatch.setattr(uploads.fetches, "_begin_s", 0.1)
    with uploads.fetches.fetching():
        uploads.begin(published(uploads))
        sending = uploads.of("try")
        assert sending is not None
        sending.result(DEADLINE_S)
        uploads.fetches.give_way()  # nor another one after that


def test_where_only_this_machine_fetches_an_upload_begins_at_once(tmp_path: Path) -> None:
    uploads = Uploads(open_store(f"file://{tmp_path}/store"), tmp_path / "published")
    uploads.begin(published(uploads))
    sending = uploads.of("try")
    assert sending is not None
    sending.result(DEADLINE_S)


@pytest.mark.parametrize("goes_away", [False, True])
async def test_a_file_counts_as_fetched_for_as_long_as_it_is_sent(tmp_path: Path, goes_away: bool) -> None:
    fetches, path = Fetches(0.0), tmp_path / "file"
    with path.open("wb") as file:
        file.truncate(BYTES)

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        return FetchedFile(path, fetches)

    listener = socket.create_server(("127.0.0.1", 0))
    server = web.Server(answer)
    serving = await asyncio.get_running_loop().create_server(server, sock=listener)
    reader, writer = await asyncio.open_connection(*listener.getsockname())
    writer.write(b"GET /file HTTP/1.1\r\nHost: trainer\r\n\r\n")
    await until_async(lambda: len(fetches.going) == 1)
    if goes_away:
        writer.transport.abort()
    else:
        head = await reader.readuntil(b"\r\n\r\n")
        assert b"200 OK" in head and len(await reader.readexactly(BYTES)) == BYTES
    await until_async(lambda: len(fetches.going) == 0)
    writer.close()
    serving.close()
    await server.shutdown(0)
