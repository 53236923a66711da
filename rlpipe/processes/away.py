"""Whether an exception of a user's code says that something the code needs is away."""

from __future__ import annotations

import socket
from urllib.error import HTTPError

CHAIN_MAX = 100  # exceptions that one was raised from: a chain may be a circle
# what clients raise for a connection that fails, is cut or takes too long, where that is neither
# Python's ConnectionError nor raised from it: httpx, aiohttp, requests and urllib3
NAMES = {
    "NetworkError", "RemoteProtocolError", "ConnectTimeout", "ServerDisconnectedError", "ConnectionTimeoutError",
    "ConnectTimeoutError",
}  # fmt: skip
TOO_MANY = 429


def is_outage(error: BaseException) -> bool:
    """True when an exception, or one that it was raised from, says that a service is away.

    That is: Python's ConnectionError, on which HTTP clients build their own; a connection that took
    too long; a name that is not resolved; an answer with the status 429 or 5xx. Of a group of
    exceptions all must say so.
    """
    for _ in range(CHAIN_MAX):
        if isinstance(error, BaseExceptionGroup):
            return all(map(is_outage, error.exceptions))
        if isinstance(error, ConnectionError | socket.gaierror) or _says_so(error):
            return True
        earlier = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
        if earlier is None:
            return False
        error = earlier
    return False


def _says_so(error: BaseException) -> bool:
    """True for the exceptions of HTTP clients that do."""
    if any(kind.__name__ in NAMES for kind in type(error).__mro__):
        return True
    reply = getattr(error, "response", None)  # of requests, httpx, openai
    reply = error if reply is None else reply  # of aiohttp
    status = error.code if isinstance(error, HTTPError) else getattr(reply, "status_code", getattr(reply, "status", 0))
    return isinstance(status, int) and (status == TOO_MANY or 500 <= status < 600)
