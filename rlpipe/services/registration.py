"""Services: trainer processes and engine hosts that run on their own, elsewhere.

This module has their records in the store, and the rules by which they end.

A service writes a record to `runs/<run>/services/<kind>/<name>.json`, and works for the run for as
long as that record is its own. Deleting or replacing the record dismisses the service, without a
connection to it. With a services' key only records that were written with it are accepted. Each
start of a service has a bearer key of its own, which both sides derive from the services' key: a
process that listens at the URL of a dead service learns no key that another service accepts.
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
from rlpipe.store.opening import open_existing
from rlpipe.store.run_record import record_key, run_names

log = logging.getLogger(__name__)
KEY_VARIABLE, ADDRESS_VARIABLE = "RLPIPE_SERVICE_KEY", "RLPIPE_ADDRESS"
LOOPBACK = ("127.0.0.1", "localhost", "::1")
FILES = "/files"  # the path, below a service's URL, of the files that it published or fetched last
WATCH_S = 2.0
RUN_POLL_S = 5.0
TRAINER, ENGINES = "trainer", "engines"
_refused: set[str] = set()  # the ids of refused records, for one log line each


@dataclass(frozen=True)
class ServiceRecord:
    """The record that a service leaves in the store. `engine`: the kind of its engines;
    `rendezvous`: host:port of trainer processes on several nodes."""

    name: str
    url: str
    engine: str = ""
    rendezvous: str = ""
    # random, so that no two starts have the same record
    start: str = field(default_factory=lambda: secrets.token_hex(8))
    proof: str = ""  # proves that its writer has the services' key

    def proved(self, place: str) -> ServiceRecord:
        """The record with its proof: the HMAC, by the services' key, of its content and its place
        in the store; empty without a key.
        """
        return replace(self, proof=_derived("proof", {**asdict(self), "proof": "", "place": place}))

    @property
    def key(self) -> str:
        """The bearer key of this start alone; trainer processes that their service starts again
        have another one.

        Empty without a services' key.
        """
        return _derived("key", {"start": self.start, "rendezvous": self.rendezvous})

    @property
    def files_url(self) -> str:
        return self.url + FILES


def node_name(node: int) -> str:
    """The name of the service that a run starts for one of its nodes: a second start replaces the
    first.
    """
    return f"node-{node}"


def service_key() -> str:
    """The secret that flow, trainers and hosts share, and never send; empty: no key is required.

    UserError when it is not plain text.
    """
    key = os.environ.get(KEY_VARIABLE, "").strip()
    if not (key.isascii() and key.isprintable()):
        raise UserError(
            f"{KEY_VARIABLE} has characters that an HTTP header cannot carry; make one with `openssl rand -hex 32`"
        )
    return key


def _derived(purpose: str, of: dict[str, str]) -> str:
    """The HMAC of these values by the services' key, different for each purpose, which only a
    process with the key can compute; empty without a key.
    """
    key, text = service_key(), json.dumps([purpose, of], sort_keys=True)
    return hmac.new(key.encode(), text.encode(), "sha256").hexdigest() if key else ""


def own_address(address: str = "") -> str:
    """The address to listen on: the given one, else this node's ($RLPIPE_ADDRESS), else loopback.

    UserError when other machines could reach it without a key.
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
    """The records of a kind, ordered by name; if this process has the services' key, only those
    that were written with it.
    """
    records = []
    for key in _places(store, run_root, kind):
        # deleted between the two calls, or written by another version
        with contextlib.suppress(StoreError):
            record = read_document(store, key, ServiceRecord)
            if service_key() and not hmac.compare_digest(record.proof.encode(), record.proved(key).proof.encode()):
                _refuse(store.address(key), record)
            else:
                records.append(record)
    return records


def file_keys(store: Store, run_root: str) -> dict[str, str]:
    """The bearer keys of the trainer nodes and hosts that serve files to a run, by the URLs of
    their files.
    """
    return {record.files_url: record.key for kind in (TRAINER, ENGINES) for record in registered(store, run_root, kind)}


def anybody_registered(store: Store, run_root: str, kind: str) -> bool:
    """True when there is a record of a kind, accepted or not."""
    return bool(_places(store, run_root, kind))


def _places(store: Store, run_root: str, kind: str) -> list[str]:
    keys = store.list(services_folder(run_root, kind))
    # a dot file is still being written
    return [key for key in keys if not key.rsplit("/", 1)[-1].startswith(".")]


def _refuse(address: str, record: ServiceRecord) -> None:
    """Logs, once, that a record is refused."""
    if record.start not in _refused:
        _refused.add(record.start)
        log.warning(
            "%s was not signed with this %s, so the address in it (%s) is not used; start that service again with the "
            "key and the rlpipe version of the flow",
            address, KEY_VARIABLE, record.url,
        )  # fmt: skip


def dismiss(store: Store, run_root: str, kind: str, name: str) -> None:
    """Makes a service end, wherever it runs, within a few seconds."""
    with contextlib.suppress(FileNotFoundError):  # it has left, or was dismissed already
        store.delete(f"{services_folder(run_root, kind)}/{name}.json")


@dataclass
class Registration:
    """A service's own record."""

    store: Store
    run_root: str
    kind: str
    record: ServiceRecord

    def work_dir(self, below: Path) -> Path:
        """This start's own folder for logs and local copies. Deletes those of earlier starts, which
        were killed.
        """
        folder = below / f"{self.kind}-{self.run_root.rsplit('/', 1)[-1]}-{self.record.name}"
        for scratch in folder.glob("*/*/"):
            shutil.rmtree(scratch, ignore_errors=True)
        return folder / self.record.start

    async def enter(self) -> None:
        """Writes the record; a service that had one in its place is dismissed by that."""
        key = f"{services_folder(self.run_root, self.kind)}/{self.record.name}.json"
        self.record = self.record.proved(key)
        await asyncio.to_thread(self.store.put, key, sealed(self.record))

    async def change(self, **fields: str) -> None:
        """Changes the record, but only while it stands: a dismissed service must not register
        again.
        """
        self.record = replace(self.record, **fields)
        if await self.stands():
            await self.enter()

    async def stands(self) -> bool:
        """True when the record is still this service's own."""
        records = await asyncio.to_thread(registered, self.store, self.run_root, self.kind)
        return self.record.start in (record.start for record in records)

    async def leave(self) -> None:
        """Deletes the record, unless another service has replaced it."""
        if await self.stands():
            await asyncio.to_thread(dismiss, self.store, self.run_root, self.kind, self.record.name)


class RunService(Protocol):
    """A service that `serve` keeps registered: HostService, TrainerService."""

    registration: Registration

    async def work(self) -> Never:
        """Serves until it is cancelled; raises the fault that prevents it."""
        ...

    async def idle_s(self) -> float:
        """The seconds since the run's last request."""
        ...

    async def close(self) -> None:
        """Ends all that `work` has started."""


# (seconds without work) -> True when the service is to end
IsOver = Callable[[float], Awaitable[bool]]


def past(idle_timeout_s: float) -> IsOver:
    """Returns the rule for a service that its run starts again when needed: it ends after more than
    `idle_timeout_s` seconds without work; 0: never.
    """

    async def is_over(idle_s: float) -> bool:
        return 0 < idle_timeout_s < idle_s

    return is_over


async def serve(service: RunService, is_over: IsOver, ended: asyncio.Event) -> str:
    """Serves a run until the service is to end, then leaves the run and returns the reason: told to
    end, dismissed, or without work for too long (`past`, or `RunWatch.is_over` for a service that
    is not started again). Raises the fault that ended the work.
    """
    raise_file_limit()
    with patience.working() as work:
        return await _served(service, is_over, ended, work)


async def _served(service: RunService, is_over: IsOver, ended: asyncio.Event, work: patience.Errand) -> str:
    registration = service.registration
    # before `work` changes the record: two concurrent writes have no order
    await registration.enter()
    working, ending = asyncio.create_task(service.work()), asyncio.create_task(ended.wait())
    try:
        while True:
            await asyncio.wait({working, ending}, timeout=WATCH_S, return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                await working
            if ended.is_set():
                return "it was told to end"
            with patience.hurrying():  # without long retries, as the loop asks again anyway
                try:
                    if not await registration.stands():
                        return "the run dismissed it"
                except (OSError, StoreError) as error:
                    # a service that gets requests goes on working
                    log.warning("the store does not answer: %s", error)
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
    """Waits until a run has begun, and for as long as a process prepares it; returns its config,
    with these operational sections replaced.

    UserError when it has not begun within the watch's idle time.
    """
    store, key, began_at = watch.store, record_key(watch.run), time.monotonic()
    if not await asyncio.to_thread(store.exists, key):
        known = ", ".join(await asyncio.to_thread(run_names, store)) or "none"
        log.info("waiting for run %s, which nobody has begun in %s (runs: %s)", watch.run, store.url, known)
    while not await asyncio.to_thread(store.exists, key) and not await watch.is_over(time.monotonic() - began_at):
        await asyncio.sleep(RUN_POLL_S)
    config = (await asyncio.to_thread(open_existing, store, watch.run)).config
    return config.model_copy(update={"store": store.url, **{name: given for name, given in sections.items() if given}})
