"""The trainer process: one rank of a torchrun gang; rank 0 also answers HTTP, in threads beside the one that trains.

GET /health, /status; POST /load, /train, /save (JSON, bearer key). A POST waits up to WAIT_S, then answers 202: ask again.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading

from rlpipe.launch import die_with_parent
from rlpipe.trainer.board import Board, Refused
from rlpipe.trainer.gang import clear_scratch, join_gang
from rlpipe.trainer.http import BoundedServer
from rlpipe.trainer.jobs import Trainer, serve_jobs
from rlpipe.trainer.options import TrainerOptions
from rlpipe.types import JsonDict

WAIT_S = 20.0
FIELDS = {
    "load": {"position", "new", "policy", "state"},
    "train": {"start", "result", "kind", "data", "reference", "settings"},
    "save": {"position", "policy_folder", "state_folder", "attempt", "tokenizer", "probe_tokens"},
}


class GangServer(BoundedServer):
    """The HTTP side of a gang of `ranks`."""

    def __init__(self, options: TrainerOptions, board: Board, ranks: int) -> None:
        super().__init__((options.host, options.port), options.token, self._answer)
        self.board = board
        self.told: JsonDict = {"ranks": ranks}

    def _answer(self, method: str, path: str, data: bytes) -> tuple[int, JsonDict]:
        kind = path.removeprefix("/")
        if method == "POST" and kind in FIELDS:
            return self._do(kind, data)
        answers: dict[str, JsonDict] = {"/health": self.told, "/status": self.board.status()}
        if method == "GET" and path in answers:
            return 200, answers[path]
        return 404, {"error": f"no {path}"}

    def _do(self, kind: str, data: bytes) -> tuple[int, JsonDict]:
        try:
            body = json.loads(data)
        except (ValueError, RecursionError) as error:  # RecursionError: a great many brackets
            return 400, {"error": f"the body is no JSON: {error}"}
        if not isinstance(body, dict) or set(body) != FIELDS[kind]:
            return 400, {"error": f"{kind} takes exactly the fields {', '.join(sorted(FIELDS[kind]))}"}
        try:
            job = self.board.submit(kind, body)
        except Refused as refused:
            return 409, refused.answer
        if not job.done.wait(WAIT_S):
            return 202, {"state": "running", "progress": job.progress}
        self.board.told(job)
        return job.status, job.answer


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
