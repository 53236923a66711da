"""Services: trainer gangs and engine hosts in processes of their own, elsewhere.

What they leave in the store, and when they end.

A service leaves a record in `runs/<run>/services/<kind>/<name>.json`, and is the run's for as long
as that record is its own: who deletes it, or puts another in its place, dismisses the service.
Nobody has to reach it for that. With a services' key a record is only taken from who has it, and
each start of a service is asked with a key of its own, which both sides make of the services' key:
who listens at the URL of one that died learns nothing that another takes.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import logging
import os
import secrets
import shutil
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Never, Protocol

from pydantic import BaseModel

from rlpipe.base.errors import StoreError, UserError
from rlpipe.config.pipeline import PipelineConfig
from rlpipe.processes.launch import raise_file_limit
from rlpipe.services.run_watch import RunWatch
from rlpipe.store import patience
from rlpipe.store.backend import Store
from rlpipe.store.documents import read_document, sealed
from rlpipe.store.run import open_existing
from rlpipe.store.run_record import record_key, run_names

log = logging.getLogger(__name__)
KEY_VARIABLE, ADDRESS_VARIABLE = "RLPIPE_SERVICE_KEY", "RLPIPE_ADDRESS"
LOOPBACK = ("127.0.0.1", "localhost", "::1")
FILES = "/files"  # below a service's URL: what it published or fetched last
WATCH_S = 2.0
RUN_POLL_S = 5.0
TRAINER, ENGINES = "trainer", "engines"
_refused: set[str] = set()  # the starts of records of which that was said


@dataclass(frozen=True)
class ServiceRecord:
    """The record that a service leaves in the store. `engine`: the kind of its engines;
    `rendezvous`: host:port of trainer processes on several nodes."""

    name: str
    url: str
    engine: str = ""
    rendezvous: str = ""
    start: str = field(default_factory=lambda: secrets.token_hex(8))  # no two starts leave the same record
    proof: str = ""  # that who left it has the services' key

    def proved(self, place: str) -> ServiceRecord:
        """The same with its proof: the HMAC by the services' key of all that it says and of where
        it stands. Empty without a key.
        """
        return replace(self, proof=_derived("proof", {**asdict(self), "proof": "", "place": place}))

    @property
    def key(self) -> str:
        """The bearer key of this start alone; a gang that its service starts again has another.

        Empty without a services' key.
        """
        return _derived("key", {"start": self.start, "rendezvous": self.rendezvous})

    @property
    def files_url(self) -> str:
        return self.url + FILES


def node_name(node: int) -> str:
    """The name of the service that a run starts for one of its nodes: a second start of it takes
    the first one's place.
    """
    return f"node-{node}"


def service_key() -> str:
    """The secret that flow, gangs and hosts share, and send to nobody; empty: no key is asked for.

    UserError when it is no plain text.
    """
    key = os.environ.get(KEY_VARIABLE, "").strip()
    if not (key.isascii() and key.isprintable()):
        raise UserError(
            f"{KEY_VARIABLE} has characters that an HTTP header cannot carry; make one with `openssl rand -hex 32`"
        )
    return key


def _derived(purpose: str, of: dict[str, str]) -> str:
    """The HMAC of these values by the services' key: only a process with the key can make it, and
    it differs for each purpose. Empty without that key."""
    key, text = service_key(), json.dumps([purpose, of], sort_keys=True)
    return hmac.new(key.encode(), text.encode(), "sha256").hexdigest() if key else ""


def own_address(address: str = "") -> str:
    """The address to listen at: the given one, else this node's ($RLPIPE_ADDRESS), else loopback.

    UserError when others could reach it without a key.
    """
    address = address or os.environ.get(ADDRESS_VARIABLE, "") or LOOPBACK[0]
    if address not in LOOPBACK and not service_key():
        raise UserError(
            f"address={address}: beyond loopback a service needs a key: set {KEY_VARIABLE} here and where the flow runs"
        )
    return address


def services_folder(run_root: str, kind: str) -> str:
    assert kind in (TRAINER, ENGINES), kind
    return f"{run_root}/services/{kind}"


def registered(store: Store, run_root: str, kind: str) -> list[ServiceRecord]:
    """The records of a kind, in the order of their names; where this process has the services' key,
    those of who has it too.
    """
    records = []
    for key in _places(store, run_root, kind):
        with contextlib.suppress(StoreError):  # gone between the two calls, or of another version
            record = read_document(store, key, ServiceRecord)
            if service_key() and not hmac.compare_digest(record.proof.encode(), record.proved(key).proof.encode()):
                _refuse(store.address(key), record)
            else:
                records.append(record)
    return records


def file_keys(store: Store, run_root: str) -> dict[str, str]:
    """The bearer keys of what serves files to a run, its gang and its hosts, by the URLs of these
    files.
    """
    return {record.files_url: record.key for kind in (TRAINER, ENGINES) for record in registered(store, run_root, kind)}


def anybody_registered(store: Store, run_root: str, kind: str) -> bool:
    """True when there is a record of a kind, also one that is not accepted."""
    return bool(_places(store, run_root, kind))


def _places(store: Store, run_root: str, kind: str) -> list[str]:
    keys = store.list(services_folder(run_root, kind))
    return [key for key in keys if not key.rsplit("/", 1)[-1].startswith(".")]  # else it is being written


def _refuse(address: str, record: ServiceRecord) -> None:
    """Says, once, that a record is not taken."""
    if record.start not in _refused:
        _refused.add(record.start)
        log.warning(
            "%s was not left by who has this %s: what it names (%s) is not asked; start that service again with the "
            "key and the version of the flow",
            address, KEY_VARIABLE, record.url,
        )  # fmt: skip


def dismiss(store: Store, run_root: str, kind: str, name: str) -> None:
    """Ends a service, wherever it is, within a few seconds."""
    with contextlib.suppress(FileNotFoundError):  # it left, or another dismissed it
        store.delete(f"{services_folder(run_root, kind)}/{name}.json")


@dataclass
class Registration:
    """A service's own record, from the first `enter` on."""

    store: Store
    run_root: str
    kind: str
    record: ServiceRecord

    def work_dir(self, below: Path) -> Path:
        """Its own folder for logs and local copies; those of earlier starts, which were killed, are
        removed.
        """
        folder = below / f"{self.kind}-{self.run_root.rsplit('/', 1)[-1]}-{self.record.name}"
        for scratch in folder.glob("*/*/"):
            shutil.rmtree(scratch, ignore_errors=True)
        return folder / self.record.start

    async def enter(self) -> None:
        """Leaves the record: whoever was in its place is dismissed."""
        key = f"{services_folder(self.run_root, self.kind)}/{self.record.name}.json"
        self.record = self.record.proved(key)
        await asyncio.to_thread(self.store.put, key, sealed(self.record))

    async def change(self, **fields: str) -> None:
        """Says something else in the record, while it stands: a dismissed service must not bring
        itself back.
        """
        self.record = replace(self.record, **fields)
        if await self.stands():
            await self.enter()

    async def stands(self) -> bool:
        """True when the record is still this service's own."""
        records = await asyncio.to_thread(registered, self.store, self.run_root, self.kind)
        return self.record.start in (record.start for record in records)

    async def leave(self) -> None:
        """Takes the record away, unless another service has taken the place."""
        if await self.stands():
            await asyncio.to_thread(dismiss, self.store, self.run_root, self.kind, self.record.name)


class RunService(Protocol):
    """A service that `serve` keeps registered: HostService, GangService."""

    registration: Registration

    async def work(self) -> Never:
        """Serves until it is cancelled, or raises why it cannot go on."""
        ...

    async def idle_s(self) -> float:
        """For how many seconds the run has asked for nothing."""
        ...

    async def close(self) -> None:
        """Ends what `work` has started."""


# whether a service that has been without work for so many seconds is to end
IsOver = Callable[[float], Awaitable[bool]]


def past(idle_timeout_s: float) -> IsOver:
    """Returns the rule that ends a service which its run starts again when it needs it: the service
    ends after more than `idle_timeout_s` without work; 0: never."""

    async def is_over(idle_s: float) -> bool:
        return 0 < idle_timeout_s < idle_s

    return is_over


async def serve(service: RunService, is_over: IsOver, ended: asyncio.Event) -> str:
    """Serves a run until that is over, leaves the run, and returns why: told to end, dismissed, or
    without work for too long (`past`, or `RunWatch.is_over` for a service that nobody starts
    again). A fault that ends the work is raised.
    """
    raise_file_limit()
    with patience.working() as work:
        return await _served(service, is_over, ended, work)


async def _served(service: RunService, is_over: IsOver, ended: asyncio.Event, work: patience.Errand) -> str:
    registration = service.registration
    # before there is anything to change in it: two writes at once would have no order
    await registration.enter()
    working, ending = asyncio.create_task(service.work()), asyncio.create_task(ended.wait())
    try:
        while True:
            await asyncio.wait({working, ending}, timeout=WATCH_S, return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                await working
            if ended.is_set():
                return "it was told to end"
            with patience.hurrying():  # it is asked again anyway
                try:
                    if not await registration.stands():
                        return "the run dismissed it"
                except (OSError, StoreError) as error:
                    log.warning("the store does not answer: %s", error)  # who is asked for work goes on working
                if await is_over(idle_s := await service.idle_s()):
                    return f"it had no work for {idle_s:.0f} s"
    finally:
        work.end()
        working.cancel()
        ending.cancel()
        await asyncio.gather(working, ending, return_exceptions=True)
        try:
            await registration.leave()
        finally:
            await service.close()


async def config_of(watch: RunWatch, **sections: BaseModel | None) -> PipelineConfig:
    """The config of a run with other operational sections, waiting until somebody has begun it, and
    for as long as somebody prepares it.

    UserError when nobody did within the watch's idle time.
    """
    store, key, began_at = watch.store, record_key(watch.run), time.monotonic()
    if not await asyncio.to_thread(store.exists, key):
        known = ", ".join(await asyncio.to_thread(run_names, store)) or "none"
        log.info("waiting for run %s, which nobody has begun in %s (runs: %s)", watch.run, store.url, known)
    while not await asyncio.to_thread(store.exists, key) and not await watch.is_over(time.monotonic() - began_at):
        await asyncio.sleep(RUN_POLL_S)
    config = (await asyncio.to_thread(open_existing, store, watch.run)).config
    return config.model_copy(update={"store": store.url, **{name: given for name, given in sections.items() if given}})
