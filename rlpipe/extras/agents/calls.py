"""Calls that a request repeats: a client that got no reply sends its call again, and gets the reply
of that call.

Clients send the number of times that they sent a call before (`x-stainless-retry-count`: OpenAI's
and Anthropic's), but not which of several equal calls it is.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

from aiohttp import web

from rlpipe.chat_api.chat import GivenReplies

RETRY_COUNT, IDEMPOTENCY_KEY = "x-stainless-retry-count", "Idempotency-Key"
COUNT_DIGITS_MAX = 9


@dataclass(frozen=True, eq=False)
class SentRequest:
    """A request as it was sent."""

    said_sha256: bytes  # of its route and body: a repeated request has the same bytes
    num_before: int  # how often its client has sent it before
    key: str  # the client's key of the call; may be empty
    transport: asyncio.Transport | None

    @property
    def is_listening(self) -> bool:
        """True while the connection of its client is open, as far as is known."""
        return self.transport is not None and not self.transport.is_closing()


@dataclass(eq=False)
class SentCall:
    """A call of an agent, even if its client has sent it several times."""

    answering: asyncio.Task[GivenReplies]
    newest: SentRequest
    is_given: bool = False  # its reply was written whole, to a client that listened

    def given_to(self, sending: SentRequest) -> None:
        """Records that this sending of the call has got its reply."""
        self.is_given = self.is_given or sending is self.newest


class SentCalls:
    """The calls of one agent that were not refused."""

    def __init__(self) -> None:
        self._calls: defaultdict[bytes, list[SentCall]] = defaultdict(list)

    def call(self, sending: SentRequest, answer: Callable[[], asyncio.Task[GivenReplies]]) -> SentCall:
        """The call that a request makes, or repeats.

        Starts to answer a new call; it is forgotten when it is refused.
        """
        alike = self._calls[sending.said_sha256]
        if (call := _repeated(alike, sending)) is not None:
            call.newest, call.is_given = sending, False
            return call
        call = SentCall(answer(), sending)
        alike.append(call)
        call.answering.add_done_callback(
            lambda done: alike.remove(call) if done.cancelled() or done.exception() else None
        )
        return call


def sending_of(request: web.Request, body: bytes) -> SentRequest:
    """Reads from a request its hash, the number of times that it was sent before, and its key."""
    count = request.headers.get(RETRY_COUNT, "")
    is_number = count.isascii() and count.isdecimal() and len(count) <= COUNT_DIGITS_MAX
    said = hashlib.sha256(request.path.encode(errors="replace") + b"\0" + body).digest()
    return SentRequest(
        said, int(count) if is_number else 0, request.headers.get(IDEMPOTENCY_KEY, ""), request.transport
    )


def _repeated(alike: list[SentCall], sending: SentRequest) -> SentCall | None:
    """The call that a request repeats, of the equal ones; None when it repeats none. With a key it
    is the call with that key. Else it is one of those that were sent less often:

    - first one whose client has hung up before it had the reply, then one whose client waits (it
      may have hung up unseen), then one whose reply was given,
    - of these the one that was sent most often, then the oldest of those that wait, the newest of
      those that were given.
    """
    if sending.key:
        return next((call for call in alike if call.newest.key == sending.key), None)

    def likelihood(place: int) -> tuple[bool, bool, int, int]:
        call = alike[place]
        by_age = place if call.is_given else -place
        return not call.is_given, not call.newest.is_listening, call.newest.num_before, by_age

    less_often = [
        place for place, call in enumerate(alike) if not call.newest.key and call.newest.num_before < sending.num_before
    ]
    return alike[max(less_often, key=likelihood)] if less_often else None
