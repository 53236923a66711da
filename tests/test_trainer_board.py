"""What may run, what is answered from memory, and what a position means."""

from __future__ import annotations

import pytest

from rlpipe.trainer.board import Board, Job, Refused
from rlpipe.types import JsonDict

LOAD: JsonDict = {"position": "a"}
TRAIN: JsonDict = {"start": "a", "result": "b"}
SAVE: JsonDict = {"position": "b"}


def do(board: Board, kind: str, body: JsonDict, status: int = 200) -> Job:
    job = board.submit(kind, body)
    assert board.next(0) is job
    board.finish(job, status, {"said": status})
    return job


def test_a_job_asked_twice_is_done_once() -> None:
    board = Board()
    job = board.submit("load", LOAD)
    assert board.submit("load", dict(LOAD)) is job and board.next(0) is job
    assert board.status() == {"position": None, "busy": True, "progress": {"done": 0, "total": 0}, "idle_s": 0.0}
    board.finish(job, 200, {})
    trained = do(board, "train", TRAIN)
    assert board.position == "b"
    assert board.submit("train", TRAIN) is trained
    saved = do(board, "save", SAVE)
    assert board.submit("save", SAVE) is saved and board.submit("train", TRAIN) is trained
    assert board.next(0) is None


def test_what_is_not_resident_is_refused() -> None:
    board = Board()
    with pytest.raises(Refused, match="not resident") as refused:
        board.submit("train", TRAIN)
    assert refused.value.answer == {"error": "not resident", "position": None}
    do(board, "load", LOAD)
    with pytest.raises(Refused) as refused:
        board.submit("save", SAVE)
    assert refused.value.answer["position"] == "a"


def test_another_job_while_one_runs_is_refused() -> None:
    board = Board()
    board.submit("load", LOAD)
    with pytest.raises(Refused, match="busy"):
        board.submit("load", {"position": "c"})


def test_an_old_success_does_not_answer_for_a_position_that_was_left() -> None:
    board = Board()
    first = do(board, "load", LOAD)
    do(board, "train", TRAIN)
    assert do(board, "load", LOAD) is not first, "the weights have moved on: load for real"
    assert board.submit("train", TRAIN) is not None and board.running is not None, "train for real"


def test_a_failure_is_told_once_and_leaves_no_position() -> None:
    board = Board()
    do(board, "load", LOAD)
    failed = do(board, "train", TRAIN, status=422)
    assert board.position is None
    assert board.submit("train", TRAIN) is failed, "the asker was away when it failed"
    board.told(failed)
    with pytest.raises(Refused, match="not resident"):
        board.submit("train", TRAIN)


def test_a_failed_save_keeps_the_position() -> None:
    board = Board()
    do(board, "load", {"position": "b"})
    board.told(do(board, "save", SAVE, status=500))
    assert board.position == "b"
    assert do(board, "save", SAVE).status == 200
