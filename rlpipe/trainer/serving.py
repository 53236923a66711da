"""One trainer process, that is, one rank; `server.py` starts it.

All ranks do each job; rank 0 also answers HTTP, in a thread of its own.

GET /health, /status, /files/KEY; POST /load, /train, /save, /teacher, /offer, /send, /offload,
/upload (JSON, bearer key). A POST waits up to WAIT_S, then answers 202: ask again.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import shutil
import threading
import time
from functools import partial
from typing import NoReturn

from aiohttp import web

from rlpipe.base.errors import StepRefused, StoreError, UserError
from rlpipe.processes.memory import settle_newer
from rlpipe.services.registration import LOOPBACK
from rlpipe.store.patience import working
from rlpipe.trainer.board import Board, JobRefused
from rlpipe.trainer.jobs import (
    ANY_JOB,
    STATUS_LOST,
    STATUS_OK,
    STATUS_STORE,
    AnyJob,
    LoadJob,
    check_place,
    job_of,
)
from rlpipe.trainer.meeting import Pulse, Sent, come_to_meet
from rlpipe.trainer.node_server import NodeServer
from rlpipe.trainer.process import TrainerOptions
from rlpipe.trainer.publishing import BEGIN_S, Uploads
from rlpipe.trainer.ranks import join_ranks
from rlpipe.trainer.trainer import Trainer

log = logging.getLogger(__name__)
WAIT_S = 20.0
# idle ranks run a collective this often, so that none waits for as long as its timeout
TICK_S = 5.0
STATUS_OF = {UserError: 400, StoreError: 500, StepRefused: 422}
DELIVERY_S = 2.0  # to send the last answer


def serve_jobs(trainer: Trainer, board: Board | None) -> None:
    """Does jobs until the process ends.

    Only rank 0 has the board. A fault that is not raised on all ranks ends the process, and the
    launcher then ends the other ranks. Whoever started the trainer starts it again, with nothing
    resident.
    """
    ranks = trainer.ranks
    assert (board is not None) == (ranks.rank == 0), "the board is rank 0's"
    if board is not None:
        ranks.report = board.progress
    while True:
        record = board.next(TICK_S) if board is not None else None
        message, *_ = ranks.gather(ANY_JOB.dump_python(record.job, mode="json") if record else None)
        if message is None:
            continue
        job = ANY_JOB.validate_python(message, extra="forbid")
        status, answer = _outcome(trainer, job)
        if isinstance(job, LoadJob):
            settle_newer()
        if board is not None:
            assert record is not None, "a message without its job"
            board.finish(record, status, answer)


def _outcome(trainer: Trainer, job: AnyJob) -> tuple[int, dict[str, object]]:
    try:
        result = dataclasses.replace(trainer.run(job), warnings=trainer.ranks.told_users())
        return STATUS_OK, {"result": dataclasses.asdict(result)}
    except tuple(STATUS_OF) as error:
        log.warning("%s refused: %s", type(job).__name__, error)
        return STATUS_OF[type(error)], {"error": " ".join(str(error).split())}  # transformers writes several lines


class TrainerServer(NodeServer):
    """The HTTP server of a trainer with `num_ranks` ranks, on its first node: JSON in, JSON out."""

    def __init__(self, options: TrainerOptions, board: Board, num_ranks: int, uploads: Uploads) -> None:
        super().__init__(options, uploads)
        self.board = board
        self.num_ranks = num_ranks
        self._run = options.run

    async def answer_to(self, request: web.BaseRequest, body: bytes) -> web.StreamResponse:
        if self.board.lost:
            return web.json_response({"error": self.board.lost}, status=STATUS_LOST)
        match request.method, request.path:
            case "POST", "/load" | "/train" | "/save" | "/teacher" | "/offer" | "/send" | "/offload":
                return await self._do(request.path.removeprefix("/"), body)
            case "POST", "/upload":
                return await self._await_upload(body)
            case "GET", "/health":
                return web.json_response({"ranks": self.num_ranks, "nodes": self.board.nodes()})
            case "GET", "/status":
                return web.json_response(self.board.status() | ({"idle_s": 0.0} if self.uploads.is_busy else {}))
        return await super().answer_to(request, body)

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

    async def _await_upload(self, body: bytes) -> web.Response:
        """Answers when the upload of a save is complete.

        "not resident" where this trainer has not published that save.
        """
        try:
            sending = self.uploads.of(job_of("upload", body).attempt)
        except UserError as error:
            return web.json_response({"error": str(error)}, status=400)
        if sending is None:
            return web.json_response({"error": "not resident", "position": self.board.position}, status=409)
        waiting = asyncio.wrap_future(sending)
        # marks the exception as retrieved: it is answered below
        waiting.add_done_callback(asyncio.Future.exception)
        await asyncio.wait({waiting}, timeout=WAIT_S)
        if not sending.done():
            return web.json_response({"progress": {"done": 0, "total": 0}}, status=202)
        if fault := sending.exception():
            status = STATUS_STORE if isinstance(fault, OSError) else 500
            return web.json_response({"error": f"the upload failed: {fault}"}, status=status)
        return web.json_response({"result": {}})


@working()
def work(argument: str) -> None:
    """Joins the process group, and serves until the parent ends. `argument`: the options, JSON."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    options = TrainerOptions.model_validate_json(argument)
    clear_scratch(options)
    meeting = come_to_meet()
    ranks = join_ranks(options)
    board = Board() if ranks.rank == 0 else None
    # engines on this machine link published files and fetch none
    begin_s = 0.0 if options.host in LOOPBACK else BEGIN_S
    uploads = Uploads(
        ranks.store, ranks.published, begin_s, Sent(ranks) if ranks.leads_node and ranks.nodes > 1 else None
    )
    pulse = Pulse(ranks, meeting, partial(end, board))
    if board is not None:
        board.nodes = pulse.nodes
    if ranks.leads_node:
        server = NodeServer(options, uploads) if board is None else TrainerServer(options, board, ranks.size, uploads)
        threading.Thread(target=lambda: asyncio.run(server.serve()), daemon=True, name="http").start()
        log.info(
            "node %d of a trainer of %d ranks serves on %s:%d (pid %d)",
            ranks.node,
            ranks.size,
            options.host,
            options.port,
            os.getpid(),
        )
    with pulse:
        serve_jobs(Trainer(ranks, uploads.begin), board)


def clear_scratch(options: TrainerOptions) -> None:
    """Deletes the files that killed trainer processes left on this node; before the ranks meet, so
    that none uses the folder yet.
    """
    if os.environ.get("LOCAL_RANK", "0") == "0":
        shutil.rmtree(options.work_dir, ignore_errors=True)


def end(board: Board | None, why: str) -> NoReturn:
    """Ends this process; the launcher then ends the other ranks. Rank 0 first answers waiting
    requests with the reason.
    """
    log.error("the trainer processes end: %s", why)
    if board is not None:
        board.give_up(why)
        time.sleep(DELIVERY_S)
    os._exit(1)
