"""The faults of obstore (object_store of Rust) as OSErrors, and the process that may use it."""

from __future__ import annotations

import errno
import os
import re

from botocore.exceptions import ConnectionError as NoConnection
from botocore.exceptions import HTTPClientError, MetadataRetrievalError
from obstore.exceptions import AlreadyExistsError, PermissionDeniedError, UnauthenticatedError

from rlpipe.store.patience import PASSING_STATUSES, Passing

NO_ANSWER = NoConnection, HTTPClientError, MetadataRetrievalError  # of who has the keys
_NOISE = re.compile(
    r"^Generic S3 error: | in [\d.]+\S*s(, after \d+ retries, max_retries: \d+, retry_timeout: \S+)?(?=\s+-)"
)
_used_by: int | None = None  # the process in which the threads of obstore run


def check_process(address: str) -> None:
    """OSError in a process that was forked after obstore was used: obstore's threads do not exist
    there, and a call would wait for ever.
    """
    global _used_by
    if _used_by not in (None, os.getpid()):
        raise OSError(
            errno.ENOTSUP, "this process was forked from one that used S3; start it by exec or spawn", address
        )
    _used_by = os.getpid()


def as_oserror(error: Exception, address: str) -> OSError:
    """The same fault as an OSError.

    Its kind follows from the server's answer; for a listing, obstore gives that in the text only.
    """
    text, _, debug = str(error).partition("\n\nDebug source")
    status = re.search(r"status code: (\d{3})", text)
    causes = re.findall(r'message: "([^"]+)"', debug) or re.findall(r"HttpError {\s+kind: (\w+)", debug)
    reason = " ".join([*_NOISE.sub("", text).split(), *(f"({cause})" for cause in causes[-1:])])
    if "NoSuchBucket" in reason:
        return OSError(errno.EIO, "this bucket does not exist", address)
    if isinstance(error, FileNotFoundError):
        return FileNotFoundError(errno.ENOENT, reason, address)
    if isinstance(error, AlreadyExistsError):
        return FileExistsError(errno.EEXIST, reason, address)
    if isinstance(error, (PermissionDeniedError, UnauthenticatedError)) or " 403 " in reason:
        return PermissionError(errno.EACCES, reason, address)
    passes = isinstance(error, NO_ANSWER) or "HttpError {" in debug or "Server returned error response" in text
    if status is not None:
        # as S3 says 408
        passes = int(status[1]) in PASSING_STATUSES or (int(status[1]) == 400 and "RequestTimeout" in reason)
    return (Passing if passes and "builder error" not in text else OSError)(errno.EIO, reason, address)
