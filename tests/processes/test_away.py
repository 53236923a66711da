"""Exceptions that say that a service is away, of the clients that people use."""

from __future__ import annotations

import asyncio
import errno
import json
import multiprocessing
import socket
import subprocess
import sys
import urllib.request
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp
import httpx
import openai
import pytest
import requests
from aiohttp import web
from aiohttp.test_utils import TestServer

from rlpipe.processes.away import is_outage
from rlpipe.processes.launch import free_port
from rlpipe.processes.user_code import CodeLacks, CodeRaised, user_code
from tests.deadlines import DEADLINE_S, SHORT_S


def with_requests(url: str, timeout_s: float) -> None:
    with requests.get(url, timeout=timeout_s) as reply:
        reply.raise_for_status()


def with_httpx(url: str, timeout_s: float) -> None:
    httpx.get(url, timeout=timeout_s).raise_for_status()


def with_urllib(url: str, timeout_s: float) -> None:
    try:
        with urllib.request.urlopen(url, timeout=timeout_s) as reply:
            reply.read()
    except urllib.request.HTTPError as error:
        error.close()
        raise


def with_aiohttp(url: str, timeout_s: float) -> None:
    async def ask() -> None:
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        async with aiohttp.ClientSession(raise_for_status=True, timeout=timeout) as http, http.get(url) as reply:
            await reply.read()

    asyncio.run(ask())


def with_openai(url: str, timeout_s: float) -> None:
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=timeout_s) as client:
        client.models.list()


CLIENTS: list[Callable[[str, float], None]] = [with_requests, with_httpx, with_urllib, with_aiohttp, with_openai]


def error_of(code: Callable[[], Any]) -> CodeRaised:
    with pytest.raises(CodeRaised) as raised, user_code():
        code()
    return raised.value


@pytest.fixture
async def origin() -> AsyncIterator[str]:
    """A server that answers /STATUS with that status, /0 not in time, and cuts /1."""

    async def behave(request: web.Request) -> web.StreamResponse:
        status = int(request.path.split("/")[1])
        if status == 0:
            await asyncio.sleep(3 * SHORT_S)
        if status == 1 and request.transport is not None:
            request.transport.abort()
        return web.Response(status=status or 200, text="no")

    server = TestServer(web.Application())
    server.app.router.add_route("*", "/{path:.*}", behave)
    async with server:
        yield str(server.make_url("")).rstrip("/")


@pytest.mark.parametrize("client", CLIENTS)
async def test_a_service_that_is_away_or_overloaded_is_an_outage_and_one_that_refuses_is_not(
    origin: str, client: Callable[[str, float], None]
) -> None:
    expected = {"500": True, "503": True, "429": True, "400": False, "404": False}
    for status, is_away in expected.items():
        error = await asyncio.to_thread(error_of, lambda path=status: client(f"{origin}/{path}", DEADLINE_S))
        assert isinstance(error, CodeLacks) == is_away, (status, error)
    closed = await asyncio.to_thread(error_of, lambda: client(f"http://127.0.0.1:{free_port()}", DEADLINE_S))
    assert isinstance(closed, CodeLacks), closed
    # an answer that takes too long may be the doing of who asked
    cut = await asyncio.to_thread(error_of, lambda: client(f"{origin}/1", DEADLINE_S))
    assert isinstance(cut, CodeLacks), cut
    slow = await asyncio.to_thread(error_of, lambda: client(f"{origin}/0", SHORT_S))
    assert not isinstance(slow, CodeLacks), slow


def test_what_an_exception_was_raised_from_counts_as_a_traceback_shows_it() -> None:
    def chained(hidden: bool) -> None:
        try:
            socket.create_connection(("127.0.0.1", free_port()), DEADLINE_S)
        except OSError as error:
            if hidden:
                raise KeyError("no such tool") from None
            raise KeyError("the tool") from error

    assert isinstance(error_of(lambda: chained(hidden=False)), CodeLacks)
    assert not isinstance(error_of(lambda: chained(hidden=True)), CodeLacks)


def test_other_exceptions_are_none() -> None:
    circle = ValueError("a")
    circle.__cause__ = other = ValueError("b")
    other.__cause__ = circle
    known = json.JSONDecodeError("no", "x", 0)
    others = [SystemExit(503), TimeoutError(), FileNotFoundError(2, "none"), circle, known, MemoryError()]
    assert [is_outage(error) for error in others] == [False] * len(others)
    assert is_outage(ExceptionGroup("both", [ConnectionRefusedError(), ConnectionError()]))
    assert not is_outage(ExceptionGroup("both", [ConnectionRefusedError(), ValueError()]))
    assert is_outage(httpx.ConnectTimeout("slow")) and is_outage(requests.ConnectTimeout("slow"))
    assert is_outage(ConnectionError("the database is away")) and is_outage(OSError(errno.EHOSTUNREACH, "no route"))


def test_a_child_process_that_the_policy_has_ended_is_no_outage() -> None:
    """Programs and shells of a policy run in pipes: `exit()` would be a way out."""

    def to_a_pipe() -> None:
        with subprocess.Popen([sys.executable, "-c", ""], stdin=subprocess.PIPE) as child:
            child.wait()
            assert child.stdin is not None
            child.stdin.write(b"x" * (1 << 20))

    async def to_a_pipe_of_asyncio() -> None:
        child = await asyncio.create_subprocess_exec(sys.executable, "-c", "", stdin=asyncio.subprocess.PIPE)
        await child.wait()
        assert child.stdin is not None
        for _ in range(2):
            child.stdin.write(b"x" * (1 << 20))
            await child.stdin.drain()

    ends, other = multiprocessing.Pipe()
    other.close()
    for code in (to_a_pipe, lambda: asyncio.run(to_a_pipe_of_asyncio()), lambda: ends.send("x")):
        assert not isinstance(error_of(code), CodeLacks)
    ends.close()


def test_what_a_handler_itself_raises_is_its_own() -> None:
    def fetched() -> None:
        try:
            with_httpx(f"http://127.0.0.1:{free_port()}", DEADLINE_S)
        except httpx.ConnectError:
            raise ValueError("the policy's address has no page")  # noqa: B904

    assert not isinstance(error_of(fetched), CodeLacks)
