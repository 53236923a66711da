"""Prefect's API, a real one, behind a proxy that does what passes by itself: the same
answers as without, or one line."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import httpx
import pytest
from prefect import get_client
from prefect.client.schemas.actions import ArtifactCreate
from prefect.exceptions import PrefectException
from prefect.settings import PREFECT_API_REQUEST_TIMEOUT, PREFECT_API_URL, temporary_settings

from flows import outage
from flows.outage import PrefectAway
from flows.server import run_flow
from rlpipe.store import patience
from rlpipe.store.patience import hurrying
from tests.deadlines import DEADLINE_S, SHORT_S, until_async
from tests.outage_world import Fault, Faults
from tests.s3_world import S3Proxy

pytestmark = pytest.mark.slow

FAULTS = ["500", "502", "503", "504", "429", "reset", "hang"]
LASTS_S, NEVER_S = 0.8, 3600.0


@pytest.fixture
def proxy(prefect_api: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Proxy]:
    """Before the server, which this process asks through it, and has not asked before."""
    monkeypatch.setattr(outage, "_answered", threading.Event())
    for name, seconds in {"FIRST_S": 0.3, "PAUSE_FIRST_S": 0.05, "PAUSE_MAX_S": 0.2, "SAID_AFTER_S": 0.2}.items():
        monkeypatch.setattr(patience, name, seconds)
    proxy = S3Proxy(prefect_api["PREFECT_API_URL"])
    with temporary_settings({PREFECT_API_URL: f"{proxy.url}/api", PREFECT_API_REQUEST_TIMEOUT: DEADLINE_S}):
        yield proxy
    proxy.close()


async def ask() -> tuple[object, ...]:
    """A call that changes nothing, and one that does, each by a client of its own."""
    async with get_client() as client:
        page = await client.read_flows(limit=1)
    async with get_client() as client:
        made = await client.create_artifact(ArtifactCreate(key="outage", type="markdown", data="x"))
    return len(page) >= 0, made.key, made.data


@pytest.mark.parametrize("fault", FAULTS)
async def test_a_fault_that_passes_changes_no_answer(
    fault: str, proxy: S3Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    undisturbed = await ask()
    proxy.faults = Faults(Fault("POST .*/flows/filter", fault, LASTS_S), Fault("POST .*/artifacts", fault, LASTS_S))
    assert await ask() == undisturbed
    with get_client(sync_client=True) as client:
        proxy.faults = Faults(Fault("POST", fault, LASTS_S))
        assert len(await asyncio.to_thread(client.read_flows, limit=1)) >= 0
    assert proxy.num_faults >= 3


async def test_what_is_given_up_is_one_line_with_the_first_cause(
    proxy: S3Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    await ask()
    monkeypatch.setattr(outage, "WORK_S", SHORT_S / 2)
    faults = iter(["500"])
    proxy.faults = lambda method, target: next(faults, "reset")
    with pytest.raises(
        PrefectAway, match=r"Prefect's API at http://127\.0\.0\.1:\d+ is away: 500 .*the first fault of \d+ s"
    ):
        await ask()


def test_a_flow_ends_in_one_line_that_says_to_start_again() -> None:
    async def flow() -> None:
        raise PrefectAway("Prefect's API at http://x is away: 500 (POST /y)")

    with pytest.raises(
        RuntimeError, match=r"^Prefect's API at http://x is away: 500 \(POST /y\)\. Start the run again"
    ):
        run_flow(flow())


async def test_the_first_contact_and_what_is_only_shown_give_up_soon(
    proxy: S3Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outage, "WORK_S", NEVER_S)
    for fault in ("500", "reset", "hang"):
        proxy.faults = lambda method, target, fault=fault: fault
        with pytest.raises(PrefectAway):
            await ask()
    proxy.faults = lambda method, target: ""
    await ask()
    proxy.faults = lambda method, target: "503"
    with hurrying(), pytest.raises(PrefectAway, match="503"):
        await ask()


async def test_a_server_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch, proxy: S3Proxy) -> None:
    proxy.close()
    with pytest.raises(PrefectAway, match="ConnectError"):
        await ask()


async def test_what_another_try_answers_alike_is_asked_once(proxy: S3Proxy) -> None:
    await ask()
    for status in ("400", "404", "409", "422"):
        before = proxy.num_faults
        proxy.faults = lambda method, target, status=status: status if "flows/filter" in target else ""
        with pytest.raises((PrefectException, httpx.HTTPError)):
            await ask()
        assert proxy.num_faults == before + 1


async def test_who_waits_ends_when_it_is_cancelled(proxy: S3Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    await ask()
    monkeypatch.setattr(outage, "WORK_S", NEVER_S)
    proxy.faults = lambda method, target: "500"
    waiting = asyncio.create_task(ask())
    await until_async(lambda: proxy.num_faults >= 4)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
