"""What may run, what is answered from memory, and what a position means."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rlpipe.base.references import ArtifactRef
from rlpipe.config.training import RlConfig
from rlpipe.trainer.board import Board, JobRecord, JobRefused
from rlpipe.trainer.jobs import AnyJob, LoadJob, NewModel, OffloadJob, RlJob, SaveJob

LOAD = LoadJob("a", NewModel({}, 0), None, None)
TRAIN = RlJob("a", "b", ArtifactRef("batch", "0" * 64), 0, "rl", RlConfig(), None)
SAVE = SaveJob("b", "policy", None, "a1", None, [0], [1, 2])


def do(board: Board, job: AnyJob, status: int = 200) -> JobRecord:
    record = board.submit(job)
    assert board.next(0) is record
    board.finish(record, status, {"said": status})
    assert record.answer.result() == (status, {"said": status})
    return record


def test_a_job_asked_twice_is_done_once() -> None:
    board = Board()
    job = board.submit(LOAD)
    assert board.submit(replace(LOAD)) is job and board.next(0) is job
    assert board.status() == {"position": None, "busy": True, "progress": {"done": 0, "total": 0}, "idle_s": 0.0}
    board.finish(job, 200, {})
    trained = do(board, TRAIN)
    assert board.position == "b"
    assert board.submit(TRAIN) is trained
    saved = do(board, SAVE)
    assert board.submit(SAVE) is saved and board.submit(TRAIN) is trained
    assert board.next(0) is None


def test_an_offload_leaves_the_position_and_holds_until_the_next_job() -> None:
    board, offload = Board(), OffloadJob("offload")
    do(board, offload)  # with nothing resident
    do(board, LOAD)
    trained, first = do(board, TRAIN), do(board, offload)
    assert board.position == "b" and board.submit(offload) is first
    assert board.submit(TRAIN) is trained and board.submit(offload) is first, (
        "what is answered from memory brings nothing back"
    )
    saved = do(board, SAVE)
    again = do(board, offload)
    assert again is not first and board.submit(SAVE) is saved and board.submit(offload) is again
    with pytest.raises(JobRefused, match="not resident"):
        board.submit(replace(SAVE, position="elsewhere"))
    assert board.submit(offload) is again, "a job that was refused brings nothing back"
    failed = board.submit(replace(TRAIN, start="b", result="c"))
    assert board.next(0) is failed
    board.finish(failed, 422, {})
    do(board, offload)
    assert board.position is None


def test_what_is_not_resident_is_refused() -> None:
    board = Board()
    with pytest.raises(JobRefused, match="not resident") as refused:
        board.submit(TRAIN)
    assert refused.value.answer == {"error": "not resident", "position": None}
    do(board, LOAD)
    with pytest.raises(JobRefused) as refused:
        board.submit(SAVE)
    assert refused.value.answer["position"] == "a"


def test_another_job_while_one_runs_is_refused() -> None:
    board = Board()
    board.submit(LOAD)
    with pytest.raises(JobRefused, match="busy"):
        board.submit(replace(LOAD, position="c"))


def test_an_old_success_does_not_answer_for_a_position_that_was_left() -> None:
    board = Board()
    first = do(board, LOAD)
    do(board, TRAIN)
    assert do(board, LOAD) is not first, "the weights have moved on: load for real"
    assert board.submit(TRAIN) is not None and board.running is not None, "train for real"


def test_a_failure_is_told_once_and_leaves_no_position() -> None:
    board = Board()
    do(board, LOAD)
    failed = do(board, TRAIN, status=422)
    assert board.position is None
    assert board.submit(TRAIN) is failed, "the asker was away when it failed"
    board.delivered(failed)
    with pytest.raises(JobRefused, match="not resident"):
        board.submit(TRAIN)


def test_a_failed_save_keeps_the_position() -> None:
    board = Board()
    do(board, replace(LOAD, position="b"))
    board.delivered(do(board, SAVE, status=500))
    assert board.position == "b"
    assert do(board, SAVE).answer.result()[0] == 200
