"""The trainer process: one rank of a torchrun gang; rank 0 also answers HTTP, in threads beside the one that trains.

GET /health, /status; POST /load, /train, /save (JSON, bearer token). A POST waits up to WAIT_S, then answers 202: ask again.
"""

from __future__ import annotations

import hmac
import json
import logging
import os
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from rlpipe.launch import die_with_parent
from rlpipe.trainer.board import Board, Refused
from rlpipe.trainer.gang import clear_scratch, join_gang
from rlpipe.trainer.jobs import Trainer, serve_jobs
from rlpipe.trainer.options import TrainerOptions
from rlpipe.types import JsonDict

WAIT_S = 20.0
BODY_BYTES_MAX = 4 * 1024 * 1024
IDLE_S = 600.0  # a connection without a request is closed
FIELDS = {
    "load": {"position", "new", "policy", "state"},
    "train": {"start", "result", "kind", "data", "reference", "settings"},
    "save": {"position", "policy_folder", "state_folder", "attempt", "tokenizer", "probe_tokens"},
}


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    timeout = IDLE_S
    wbufsize = 64 * 1024  # head and body in one packet: two would wait for a delayed ACK (40 ms)
    disable_nagle_algorithm = True
    server: GangServer  # pyright: ignore[reportIncompatibleVariableOverride]

    def do_GET(self) -> None:
        if not self._allowed():
            return
        board = self.server.board
        answers: dict[str, JsonDict] = {"/health": self.server.told, "/status": board.status()}
        self._answer(*((200, answers[self.path]) if self.path in answers else (404, {"error": f"no {self.path}"})))

    def do_POST(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        if length > BODY_BYTES_MAX:
            self.close_connection = True
            self._answer(413, {"error": f"the body has {length} bytes, at most {BODY_BYTES_MAX} are read"})
            return
        data = self.rfile.read(length)
        if self._allowed():
            self._answer(*self._work(self.path.removeprefix("/"), data))

    def _work(self, kind: str, data: bytes) -> tuple[int, JsonDict]:
        if kind not in FIELDS:
            return 404, {"error": f"no /{kind}"}
        try:
            body = json.loads(data)
        except ValueError as error:
            return 400, {"error": f"the body is no JSON: {error}"}
        if not isinstance(body, dict) or set(body) != FIELDS[kind]:
            return 400, {"error": f"{kind} takes exactly the fields {', '.join(sorted(FIELDS[kind]))}"}
        try:
            job = self.server.board.submit(kind, body)
        except Refused as refused:
            return refused.status, refused.answer
        if not job.done.wait(WAIT_S):
            return 202, {"state": "running", "progress": job.progress}
        self.server.board.told(job)
        return job.status, job.answer

    def _allowed(self) -> bool:
        given = self.headers.get("Authorization", "")
        if not self.server.token or hmac.compare_digest(given.encode(), f"Bearer {self.server.token}".encode()):
            return True
        self._answer(401, {"error": "wrong or missing bearer token"})
        return False

    def _answer(self, status: int, answer: JsonDict) -> None:
        data = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        """Polls would fill the log."""


class GangServer(ThreadingHTTPServer):
    """The HTTP side of a gang of `ranks`."""

    daemon_threads = True

    def __init__(self, options: TrainerOptions, board: Board, ranks: int) -> None:
        super().__init__((options.host, options.port), Handler)
        self.board = board
        self.told: JsonDict = {"ranks": ranks, "store": options.store, "dtype": options.dtype}
        self.token = options.token


def main(argument: str) -> None:
    """Joins the gang and serves until the parent ends."""
    die_with_parent()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    options = TrainerOptions.from_argument(argument)
    clear_scratch(options)
    gang = join_gang(options)
    board = Board() if gang.rank == 0 else None
    if board is not None:
        server = GangServer(options, board, gang.size)
        threading.Thread(target=server.serve_forever, daemon=True, name="http").start()
        logging.info("a gang of %d serves on %s:%d (pid %d)", gang.size, options.host, options.port, os.getpid())
    serve_jobs(Trainer(gang), board)


if __name__ == "__main__":
    main(sys.argv[1])
