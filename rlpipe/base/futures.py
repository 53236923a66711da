"""Results for those who wait in another thread."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

Result = TypeVar("Result")


def settle(future: Future[Result], function: Callable[[], Result]) -> None:
    """Gives a future what the function returns, or what it raises, whatever that is: else those who
    wait for the future would wait for ever. A future that was cancelled gets nothing.
    """
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = function()
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)
