"""What ends in the scheduler's thread wakes the server's loop, and nothing is missed."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace

import pytest

from rlpipe.extras.local_engine.server import Wake
from tests.deadlines import DEADLINE_S

ENDS = 20_000


async def test_none_of_many_ends_is_missed() -> None:
    wake, ended = Wake(), list[int]()

    def end_all() -> None:
        for index in range(ENDS):
            ended.append(index)
            wake.set()

    thread = threading.Thread(target=end_all)
    thread.start()
    seen = 0
    async with asyncio.timeout(DEADLINE_S):
        while seen < ENDS:
            await wake.wait()
            wake.clear()
            seen = len(ended)
    thread.join()


async def test_it_is_sent_once_until_it_is_cleared(monkeypatch: pytest.MonkeyPatch) -> None:
    wake, sent = Wake(), list[object]()
    monkeypatch.setattr(wake, "_loop", SimpleNamespace(call_soon_threadsafe=sent.append))
    for _ in range(5):
        wake.set()
    wake.clear()
    wake.set()
    assert len(sent) == 2
