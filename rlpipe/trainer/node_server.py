"""The HTTP server of each trainer node, from which other nodes fetch the files that were published
there.

On the first node it also answers jobs (`server.py`).

GET /files/KEY (bearer key).
"""

from __future__ import annotations

import asyncio
import logging
import socket
from pathlib import Path

from aiohttp import web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.http_exceptions import HttpProcessingError

from rlpipe.base.references import is_key
from rlpipe.config.secrecy import key_fits
from rlpipe.services.registration import FILES, LOOPBACK, service_key
from rlpipe.trainer.process import TrainerOptions
from rlpipe.trainer.publishing import Fetches, Uploads

http_log = logging.getLogger("rlpipe.trainer.http")
CONNECTIONS_MAX = 1024  # a host that fetches weights opens eight
# for the head of a request, and again for its body; an idle connection is closed
REQUEST_S = 30.0
# the body of an unauthorized request is read for so long: closing a connection with unread data
# would reset it before the client reads the answer
REFUSED_S = 1.0
BODY_BYTES_MAX = 4 * 1024 * 1024
FILE_CHUNK = 1024 * 1024


class Connections(web.Server):
    """A server with at most CONNECTIONS_MAX connections; any further one is closed without an
    answer.
    """

    def connection_made(self, handler: web.RequestHandler, transport: asyncio.Transport) -> None:
        super().connection_made(handler, transport)
        if len(self.connections) > CONNECTIONS_MAX:
            # not at once: aiohttp does not know the connection yet
            asyncio.get_running_loop().call_soon(transport.abort)


class NodeServer:
    """The server of published files. Bounds the time, memory and connections of clients without the
    key, so that they cannot exhaust it.
    """

    def __init__(self, options: TrainerOptions, uploads: Uploads) -> None:
        self.uploads = uploads
        self._key = service_key()
        assert self._key or options.host in LOOPBACK, f"{options.host}: a trainer that others can reach needs a key"
        self._listener = socket.create_server((options.host, options.port), backlog=CONNECTIONS_MAX)
        self.address = self._listener.getsockname()

    async def serve(self) -> None:
        """Serves until it is cancelled; in a thread of the node's first rank with its own event
        loop, as the main thread trains.
        """
        connections = Connections(
            self.answer,
            keepalive_timeout=REQUEST_S,
            lingering_time=REFUSED_S,
            auto_decompress=False,  # a compressed body would exceed its bound
            access_log=None,  # the polls of waiting clients would fill the log
            logger=http_log,
        )
        server = await asyncio.get_running_loop().create_server(connections, sock=self._listener)
        try:
            await server.serve_forever()
        finally:
            await connections.shutdown(0)

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answers any request; those without the key are refused."""
        if not key_fits(request.headers.get("Authorization", ""), self._key):
            return _refused(401, "wrong or missing bearer key")
        if "Transfer-Encoding" in request.headers:
            return _refused(411, "say how long the body is, as Content-Length")
        length = request.content_length or 0
        if length > BODY_BYTES_MAX:
            return _refused(413, f"the body has {length} bytes, at most {BODY_BYTES_MAX} are read")
        async with asyncio.timeout(REQUEST_S):
            body = await request.content.read()
        return await self.answer_to(request, body)

    async def answer_to(self, request: web.BaseRequest, body: bytes) -> web.StreamResponse:
        """Answers a request that has the key."""
        if request.method in ("GET", "HEAD") and request.path.startswith(f"{FILES}/"):
            return self._file(request.path.removeprefix(f"{FILES}/"))
        return web.json_response({"error": f"no {request.path}"}, status=404)

    def _file(self, key: str) -> web.StreamResponse:
        """Answers with a published file, or the requested range of it: so other nodes get a policy
        before the store has it.
        """
        path, disk = self.uploads.disk / key, self.uploads.disk.resolve()
        try:
            is_published = is_key(key) and path.resolve().is_relative_to(disk) and path.is_file()
        except OSError:  # the name is too long for a file
            is_published = False
        if not is_published:
            return web.json_response({"error": f"{key!r:.200} is not published here"}, status=404)
        return FetchedFile(path, self.uploads.fetches)


class FetchedFile(web.FileResponse):
    """A published file, or a range of it; uploads wait while it is sent."""

    def __init__(self, path: Path, fetches: Fetches) -> None:
        super().__init__(path, chunk_size=FILE_CHUNK)
        self._fetches = fetches

    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter | None:
        with self._fetches.fetching():
            return await super().prepare(request)


def _refused(status: int, error: str) -> web.Response:
    """An error after which the connection is closed."""
    response = web.json_response({"error": error}, status=status)
    response.force_close()
    return response


def _is_our_fault(record: logging.LogRecord) -> bool:
    """Drops log records about bytes that are not HTTP: any client could fill the log with them."""
    return record.exc_info is None or not isinstance(record.exc_info[1], HttpProcessingError)


http_log.addFilter(_is_our_fault)
