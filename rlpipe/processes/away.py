"""Whether an exception of a user's code says that something the code needs is away."""

from __future__ import annotations

import errno
import socket
from urllib.error import HTTPError

CHAIN_MAX = 100  # exceptions that one was raised from: a chain may be a circle
# what clients raise for a connection that fails, is cut or takes too long, where that is not an
# OSError, nor raised from one: httpx, aiohttp, http.client and urllib, requests and urllib3
NAMES = {
    "NetworkError", "RemoteProtocolError", "ConnectTimeout", "ServerDisconnectedError", "ConnectionTimeoutError",
    "ClientConnectorError", "RemoteDisconnected", "IncompleteRead", "ConnectTimeoutError", "ProtocolError",
}  # fmt: skip
# of these an exception is also what was raised while another was handled: they raise their own so
CLIENTS = {"urllib3", "requests", "httpx", "httpcore", "http", "urllib", "aiohttp", "openai", "anthropic", "botocore"}
UNREACHABLE = {errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN, errno.ETIMEDOUT}
TOO_MANY = 429


def is_outage(error: BaseException) -> bool:
    """True when an exception, or one that it was raised from, says that a service is away.

    That is: Python's ConnectionError, but for what a broken pipe to a child process raises; a host
    that cannot be reached, a name that is not resolved; what HTTP clients raise for these, and
    their answers with the status 429 or 5xx. Of a group of exceptions all must say so. An answer
    that takes too long is none: what was asked may be the reason.
    """
    for _ in range(CHAIN_MAX):
        if isinstance(error, BaseExceptionGroup):
            return all(map(is_outage, error.exceptions))
        if _is_of_network(error) or _says_so(error):
            return True
        is_client = type(error).__module__.partition(".")[0] in CLIENTS
        earlier = error.__cause__ or (error.__context__ if is_client and not error.__suppress_context__ else None)
        if earlier is None:
            return False
        error = earlier
    return False


def _is_of_network(error: BaseException) -> bool:
    if isinstance(error, socket.gaierror) or (isinstance(error, OSError) and error.errno in UNREACHABLE):
        return True
    # of asyncio's pipes to a child process, too; that of a socket has a number
    is_of_pipe = isinstance(error, BrokenPipeError) or (isinstance(error, ConnectionResetError) and error.errno is None)
    return isinstance(error, ConnectionError) and not is_of_pipe


def _says_so(error: BaseException) -> bool:
    """True for the exceptions of HTTP clients that do."""
    if any(kind.__name__ in NAMES for kind in type(error).__mro__):
        return True
    reply = getattr(error, "response", None)  # of requests, httpx, openai
    reply = error if reply is None else reply  # of aiohttp
    status = error.code if isinstance(error, HTTPError) else getattr(reply, "status_code", getattr(reply, "status", 0))
    return isinstance(status, int) and (status == TOO_MANY or 500 <= status < 600)
