"""Passes results to waiters in another thread."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

Result = TypeVar("Result")


def settle(future: Future[Result], function: Callable[[], Result]) -> None:
    """Sets a future to the result of the function, or to any exception that it raises; otherwise
    waiters would wait for ever. Does nothing to a cancelled future.
    """
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = function()
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)
