"""The line that says why the tracking of a run failed: MLflow is away (only where it is), the store
could not be read, or the error itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from rlpipe.base.errors import StoreError
from rlpipe.config.secrecy import without_passwords

MESSAGE_CHARS_MAX = 200
DATABASE_AWAY = "OperationalError"  # of any driver
# of the store, and of a file in it that is not as it should be, whatever trips over that
READ_FAULTS = (
    StoreError, OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, AssertionError,
    RuntimeError,
)  # fmt: skip
Read = TypeVar("Read")


class NotRead(Exception):
    """Raised when data for MLflow could not be read from the store, or computed from it."""


def read(what: str, reads: Callable[..., Read], *arguments: Any) -> Read:
    """Returns the result of `reads`; NotRead, which says `what` was read, when it fails."""
    try:
        return reads(*arguments)
    except READ_FAULTS as error:
        raise NotRead(f"{what}: {type(error).__name__}: {error}") from error


def said_of(error: Exception, uri: str) -> str:
    """One line about the error that kept MLflow at `uri` from getting its data.

    Example: MLflow at http://x cannot be reached (connection refused).
    """
    message = without_passwords(str(error))[:MESSAGE_CHARS_MAX]
    if isinstance(error, NotRead):
        return f"MLflow lacks {message}"
    is_away = any(isinstance(cause, OSError) or type(cause).__name__ == DATABASE_AWAY for cause in _causes(error))
    return f"MLflow at {without_passwords(uri)} " + (
        f"cannot be reached ({message})"
        if is_away
        else f"does not take what it is sent ({type(error).__name__}: {message})"
    )


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
