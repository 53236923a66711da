"""Futures that are settled by hand."""

from __future__ import annotations

from concurrent.futures import Future

import pytest

from rlpipe.base.futures import settle


def test_a_future_gets_what_the_function_returns() -> None:
    future: Future[int] = Future()
    settle(future, lambda: 3)
    assert future.result(timeout=0) == 3


@pytest.mark.parametrize("fault", [KeyError("a"), SystemExit(1)])
def test_a_future_gets_whatever_the_function_raises(fault: BaseException) -> None:
    def fails() -> int:
        raise fault

    future: Future[int] = Future()
    settle(future, fails)
    assert future.exception(timeout=0) is fault


def test_one_who_waits_no_more_is_no_fault_for_the_others() -> None:
    cancelled, other = Future[int](), Future[int]()
    cancelled.cancel()
    for future in (cancelled, other):
        settle(future, lambda: 3)
    assert cancelled.cancelled() and other.result(timeout=0) == 3
