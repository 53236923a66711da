"""The trainer process: one rank of a torchrun gang. All ranks do the jobs; rank 0 also answers HTTP, in a thread of its own.

GET /health, /status, /files/KEY; POST /load, /train, /save, /offload, /upload (JSON, bearer key). A POST waits up to WAIT_S, then answers 202: ask again.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import shutil
import socket
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import NoReturn

from aiohttp import web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.http_exceptions import HttpProcessingError

from rlpipe.config.secrecy import key_fits
from rlpipe.processes.launch import die_with_parent
from rlpipe.processes.memory import settle_heap
from rlpipe.services.registration import FILES, LOOPBACK, service_key
from rlpipe.store.patience import working
from rlpipe.trainer.gang import Pulse, join_gang
from rlpipe.trainer.jobs import (
    ANY_JOB,
    STATUS_LOST,
    STATUS_OK,
    STATUS_STORE,
    Board,
    GangJob,
    JobRefused,
    LoadJob,
    attempt_of,
    check_place,
    job_of,
)
from rlpipe.trainer.process import TrainerOptions
from rlpipe.trainer.publishing import BEGIN_S, Fetches, Uploads
from rlpipe.trainer.trainer import Trainer
from rlpipe.types import StepRefused, StoreError, UserError, is_key

log = logging.getLogger(__name__)
http_log = logging.getLogger("rlpipe.trainer.http")
WAIT_S = 20.0
TICK_S = 5.0  # idle ranks meet this often: none waits for another as long as the collective timeout
STATUS_OF = {UserError: 400, StoreError: 500, StepRefused: 422}
DELIVERY_S = 2.0  # for the last answer
CONNECTIONS_MAX = 1024  # a host that fetches weights has eight
REQUEST_S = 30.0  # for the head of a request, and again for its body; a connection without a request is closed
REFUSED_S = 1.0  # a stranger's body is read for so long, so that he reads the answer; closing with more unread would reset it
BODY_BYTES_MAX = 4 * 1024 * 1024
FILE_CHUNK = 1024 * 1024


def serve_jobs(trainer: Trainer, board: Board | None) -> None:
    """Works until the process is ended. Only rank 0 has the board. A fault that is not common to all ranks ends the process,
    and torchrun the gang: who started it starts it again, empty."""
    gang = trainer.gang
    assert (board is not None) == (gang.rank == 0), "the board is rank 0's"
    if board is not None:
        gang.report = board.progress
    while True:
        record = board.next(TICK_S) if board is not None else None
        message, *_ = gang.gather(ANY_JOB.dump_python(record.job, mode="json") if record else None)
        if message is None:
            continue
        job = ANY_JOB.validate_python(message)
        status, answer = _outcome(trainer, job)
        if isinstance(job, LoadJob):
            settle_heap()
        if board is not None:
            assert record is not None, "a message without its job"
            board.finish(record, status, answer)


def _outcome(trainer: Trainer, job: GangJob) -> tuple[int, dict[str, object]]:
    try:
        result = dataclasses.replace(trainer.run(job), warnings=trainer.gang.told_users())
        return STATUS_OK, {"result": dataclasses.asdict(result)}
    except tuple(STATUS_OF) as error:
        log.warning("%s refused: %s", type(job).__name__, error)
        return STATUS_OF[type(error)], {"error": " ".join(str(error).split())}  # transformers writes several lines


class Connections(web.Server):
    """At most CONNECTIONS_MAX at a time; one more is closed unheard."""

    def connection_made(self, handler: web.RequestHandler, transport: asyncio.Transport) -> None:
        super().connection_made(handler, transport)
        if len(self.connections) > CONNECTIONS_MAX:
            asyncio.get_running_loop().call_soon(transport.abort)  # at once it would be lost before aiohttp knows of it


class GangServer:
    """The HTTP side of a gang of `ranks`: JSON in, JSON out. Strangers cannot fill it: they get little time, memory and room."""

    def __init__(self, options: TrainerOptions, board: Board, ranks: int, uploads: Uploads) -> None:
        self.board = board
        self.ranks = ranks
        self.uploads = uploads
        self._run = options.run
        self._key = service_key()
        assert self._key or options.host in LOOPBACK, f"{options.host}: a gang that others can reach needs a key"
        self._listener = socket.create_server((options.host, options.port), backlog=CONNECTIONS_MAX)
        self.address = self._listener.getsockname()

    async def serve(self) -> None:
        """Serves until it is cancelled; in a thread of rank 0 with its own event loop, because the main thread trains."""
        connections = Connections(
            self.answer,
            keepalive_timeout=REQUEST_S,
            lingering_time=REFUSED_S,
            auto_decompress=False,  # a body would grow beyond its bound
            access_log=None,  # polls would fill the log
            logger=http_log,
        )
        server = await asyncio.get_running_loop().create_server(connections, sock=self._listener)
        try:
            await server.serve_forever()
        finally:
            await connections.shutdown(0)

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        if not key_fits(request.headers.get("Authorization", ""), self._key):
            return _refused(401, "wrong or missing bearer key")
        if "Transfer-Encoding" in request.headers:
            return _refused(411, "say how long the body is, as Content-Length")
        length = request.content_length or 0
        if length > BODY_BYTES_MAX:
            return _refused(413, f"the body has {length} bytes, at most {BODY_BYTES_MAX} are read")
        async with asyncio.timeout(REQUEST_S):
            body = await request.content.read()
        if self.board.lost:
            return web.json_response({"error": self.board.lost}, status=STATUS_LOST)
        if request.method in ("GET", "HEAD") and request.path.startswith(f"{FILES}/"):
            return self._file(request.path.removeprefix(f"{FILES}/"))
        match request.method, request.path:
            case "POST", "/load" | "/train" | "/save" | "/offload":
                return await self._do(request.path.removeprefix("/"), body)
            case "POST", "/upload":
                return await self._await_upload(body)
            case "GET", "/health":
                return web.json_response({"ranks": self.ranks, "nodes": self.board.nodes()})
            case "GET", "/status":
                return web.json_response(self.board.status() | ({"idle_s": 0.0} if self.uploads.under_way else {}))
        return web.json_response({"error": f"no {request.path}"}, status=404)

    async def _do(self, kind: str, body: bytes) -> web.Response:
        try:
            job = job_of(kind, body)
            check_place(job, self._run)
            record = self.board.submit(job)
        except UserError as error:
            return web.json_response({"error": str(error)}, status=400)
        except JobRefused as refused:
            return web.json_response(refused.answer, status=409)
        await asyncio.wait({asyncio.wrap_future(record.answer)}, timeout=WAIT_S)
        if not record.answer.done():
            return web.json_response({"progress": record.progress}, status=202)
        self.board.delivered(record)
        status, answer = record.answer.result()
        return web.json_response(answer, status=status)

    def _file(self, key: str) -> web.StreamResponse:
        """A file that was published, or the part of it that is wanted: other nodes get policies so, before the store has them."""
        path, disk = self.uploads.disk / key, self.uploads.disk.resolve()
        try:
            is_published = is_key(key) and path.resolve().is_relative_to(disk) and path.is_file()
        except OSError:  # a name that is too long for a file
            is_published = False
        if not is_published:
            return web.json_response({"error": f"{key!r:.200} is not published here"}, status=404)
        return FetchedFile(path, self.uploads.fetches)

    async def _await_upload(self, body: bytes) -> web.Response:
        """Answers when what a save published is in the store. Not resident: this gang has nothing of it."""
        try:
            sending = self.uploads.of(attempt_of(body))
        except UserError as error:
            return web.json_response({"error": str(error)}, status=400)
        if sending is None:
            return web.json_response({"error": "not resident", "position": self.board.position}, status=409)
        waiting = asyncio.wrap_future(sending)
        waiting.add_done_callback(asyncio.Future.exception)  # whoever asks is told, and asks here
        await asyncio.wait({waiting}, timeout=WAIT_S)
        if not sending.done():
            return web.json_response({"progress": {"done": 0, "total": 0}}, status=202)
        if fault := sending.exception():
            status = STATUS_STORE if isinstance(fault, OSError) else 500
            return web.json_response({"error": f"the upload failed: {fault}"}, status=status)
        return web.json_response({"result": {}})


class FetchedFile(web.FileResponse):
    """A published file, or a part of it; while it is sent, uploads give way."""

    def __init__(self, path: Path, fetches: Fetches) -> None:
        super().__init__(path, chunk_size=FILE_CHUNK)
        self._fetches = fetches

    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter | None:
        with self._fetches.fetching():
            return await super().prepare(request)


def _refused(status: int, error: str) -> web.Response:
    """The last answer of a connection."""
    response = web.json_response({"error": error}, status=status)
    response.force_close()
    return response


def _is_our_fault(record: logging.LogRecord) -> bool:
    """Bytes that are not HTTP are not logged: strangers would fill the log."""
    return record.exc_info is None or not isinstance(record.exc_info[1], HttpProcessingError)


http_log.addFilter(_is_our_fault)


def main(argument: str) -> None:
    """Joins the gang and serves until the parent ends."""
    die_with_parent()
    with working():
        _work(argument)


def _work(argument: str) -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    options = TrainerOptions.model_validate_json(argument)
    clear_scratch(options)
    gang = join_gang(options)
    board = Board() if gang.rank == 0 else None
    # of a gang that only this machine reaches, engines link what was published
    uploads = Uploads(gang.store, gang.published, 0.0 if options.host in LOOPBACK else BEGIN_S)
    pulse = Pulse(gang, partial(end, board))
    if board is not None:
        board.nodes = pulse.nodes
        server = GangServer(options, board, gang.size, uploads)
        threading.Thread(target=lambda: asyncio.run(server.serve()), daemon=True, name="http").start()
        log.info("a gang of %d serves on %s:%d (pid %d)", gang.size, options.host, options.port, os.getpid())
    with pulse:
        serve_jobs(Trainer(gang, uploads.begin), board)


def clear_scratch(options: TrainerOptions) -> None:
    """Removes what a killed gang left on this node; before the ranks meet, so that none uses it yet."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        shutil.rmtree(options.work_dir, ignore_errors=True)


def end(board: Board | None, why: str) -> NoReturn:
    """Ends this process, and torchrun with it the gang; rank 0 says first why, to who waits for a job."""
    log.error("the gang ends: %s", why)
    if board is not None:
        board.give_up(why)
        time.sleep(DELIVERY_S)
    os._exit(1)


if __name__ == "__main__":
    main(sys.argv[1])
