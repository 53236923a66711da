"""The places where trainer processes run: child processes of this process (`TrainerProcesses`), or
services of the run on nodes of their own. Imports no torch.

`TrainerService` is one node of the latter (`rlpipe trainer`, the deployment serve-trainer),
`RegisteredTrainer` is the flow's view of all nodes. Node 0 writes the meeting point into its
record, a new one at each start: trainer processes that lost a node start again on all nodes, or not
at all.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Never

from pydantic import BaseModel

from rlpipe.base.errors import TrainerError, UserError
from rlpipe.config.operational import TrainerConfig
from rlpipe.config.pipeline import PipelineConfig
from rlpipe.processes.gpus import check_compiler, gpu_environment
from rlpipe.processes.launch import Service, answers, free_port
from rlpipe.services.finder import Peer, ServiceFinder, StartService
from rlpipe.services.registration import (
    KEY_VARIABLE,
    LOOPBACK,
    TRAINER,
    WATCH_S,
    Registration,
    ServiceRecord,
    node_name,
    registered,
)
from rlpipe.store import cache
from rlpipe.store.backend import Store
from rlpipe.store.run import Run
from rlpipe.trainer.held import VARIABLE, Hold

log = logging.getLogger(__name__)
RESTARTS_MAX = 5  # of the trainer processes of a service
DYING_S = 60.0
# a user who sets one of them has made the choice
ALLOCATOR = {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"}
ANSWER_TIMEOUT_S = 5.0


class TrainerOptions(BaseModel, frozen=True):
    """The options of the trainer processes.

    Example: TrainerOptions(store="file:///data/store", run="a", host="127.0.0.1", port=8123,
    work_dir="/tmp/trainer").

    The bearer key is not among them, as it must never be on a command line.
    """

    store: str
    run: str  # the run into whose folder the trainer writes
    host: str
    port: int
    work_dir: str  # scratch on local disk, shared by the ranks of a node
    cache: str = ""  # of what this node reads from the store, shared with its flow; empty: none
    dtype: str = "float32"
    trainer: TrainerConfig = TrainerConfig()
    # a rank without a heartbeat for so long counts as lost, which ends all ranks
    silent_s_max: float = 120.0


def launcher_argv(options: TrainerOptions, node: int = 0, rendezvous: str = "") -> list[str]:
    """The command that starts the trainer processes of one node.

    `rendezvous`: host:port on node 0, at which several nodes meet.

    The launcher restarts nothing: its caller does, within one budget of restarts.
    """
    ranks, nodes = options.trainer.ranks, options.trainer.nodes
    assert 0 <= node < nodes, f"node {node} of {nodes}"
    launch = ["--nnodes", str(nodes), "--nproc-per-node", str(ranks)]
    # the ranks of node 0 are the first ones; rank 0 answers HTTP
    host, port = rendezvous.rsplit(":", 1) if nodes > 1 else (LOOPBACK[0], "0")
    launch += ["--node-rank", str(node), "--master-addr", host, "--master-port", port]
    return [
        sys.executable,
        "-m",
        "rlpipe.trainer.launcher",
        *launch,
        "--",
        "-m",
        "rlpipe.trainer.server",
        options.model_dump_json(),
    ]


@dataclass(eq=False, repr=False)  # it holds a key
class TrainerProcesses:
    """The trainer processes of one node, as child processes. Node 0 answers HTTP at `url`; the
    other nodes take part in its jobs.

    `rendezvous`: host:port at which several nodes meet; not read for a single node.
    """

    config: PipelineConfig
    work_dir: Path
    key: str
    host: str = LOOPBACK[0]
    node: int = 0
    rendezvous: str = ""
    url: str = field(default="", init=False)
    _service: Service | None = field(default=None, init=False)
    _hold: Hold | None = field(default=None, init=False)  # of processes that may not work yet

    def prepare(self) -> None:
        """Starts the processes, which import, and touch nothing until `start`. UserError where this
        node cannot train.
        """
        assert self._service is None, "the trainer runs already"
        self._service, self._hold = self._new_service(), Hold()
        self._service.descriptors = (self._hold.read_end,)
        self._service.environment[VARIABLE] = str(self._hold.read_end)
        self._service.start()

    async def start(self) -> str:
        """Starts the processes, or lets those of `prepare` work; returns `url` once node 0 answers.

        TrainerError when they do not start, UserError where this node cannot train.
        """
        assert self._service is None or self._hold is not None, "the trainer runs already"
        self._service = self._service or self._new_service()
        try:
            return await self._until_ready(self._begin)
        except TrainerError:
            # a retry needs a new port: another process may have taken this one
            await self.close()
            self._service = None
            raise

    def _begin(self) -> None:
        service = self._service
        assert service is not None
        if self._hold is not None:
            self._free(self._hold)
        if not service.alive():
            service.start()

    def _free(self, hold: Hold) -> None:
        """Lets held processes work; those after them are not held."""
        assert self._service is not None, "held processes are a service"
        self._hold, self._service.descriptors = None, ()
        del self._service.environment[VARIABLE]
        hold.free(self.config.trainer.ranks)

    def _new_service(self) -> Service:
        trainer, port = self.config.trainer, free_port()
        if trainer.gpu_ids:
            check_compiler()
        options = TrainerOptions(
            store=self.config.store,
            run=self.config.run,
            host=self.host,
            port=port,
            work_dir=str(self.work_dir / "trainer"),
            cache=str(self.work_dir / cache.FOLDER),
            dtype=self.config.model.dtype,
            trainer=trainer,
        )
        self.url = f"http://{self.host}:{port}"
        return Service(
            name="trainer",
            argv=launcher_argv(options, self.node, self.rendezvous),
            log_path=self.work_dir / "trainer.log",
            ready=lambda: self.node > 0 or answers(f"{self.url}/health", self.key, ANSWER_TIMEOUT_S),
            environment=self._environment(),
        )

    def _environment(self) -> dict[str, str]:
        trainer = self.config.trainer
        environment = {KEY_VARIABLE: self.key, "OMP_NUM_THREADS": str(trainer.threads), "HF_HUB_OFFLINE": "1"}
        # rows of many lengths would fragment the memory
        if trainer.gpu_ids and not ALLOCATOR.intersection(os.environ):
            environment["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
        return environment | gpu_environment("trainer.gpu_ids", trainer.gpu_ids)

    @property
    def alive(self) -> bool:
        return self._service is not None and self._service.alive()

    async def running(self) -> str:
        """Returns an empty URL: no other process of the run uses the child processes of this
        one.
        """
        return ""

    async def bring_back(self) -> str:
        """Restarts the trainer processes, which all end when one rank dies, within the budget.

        Processes that neither end nor answer are ended first.
        """
        service = self._service
        assert service is not None, "start comes first"
        await asyncio.sleep(1.0)  # a launcher that ends takes a moment
        deadline = time.monotonic() + DYING_S
        while service.alive() and not await asyncio.to_thread(service.ready):
            if time.monotonic() > deadline:
                await asyncio.to_thread(service.stop)
            await asyncio.sleep(0.5)
        return await self._until_ready(service.ensure)

    async def close(self) -> None:
        """Ends the processes and deletes their files on this disk, which can be made again from the
        store; keeps the log.
        """
        if self._service is not None:
            await asyncio.to_thread(self.end)
            for name in ("trainer", cache.FOLDER):
                await asyncio.to_thread(shutil.rmtree, self.work_dir / name, ignore_errors=True)

    def end(self) -> None:
        """Ends the processes."""
        if self._service is not None:
            self._service.stop()
        if self._hold is not None:
            self._free(self._hold)

    async def _until_ready(self, start: Callable[[], object]) -> str:
        """Calls `start`; returns `url` once the trainer answers."""
        assert self._service is not None
        try:
            start()
            await asyncio.to_thread(self._service.wait_ready)
        except RuntimeError as error:
            raise TrainerError(str(error)) from error
        return self.url


class RegisteredTrainer:
    """Trainer processes whose nodes are services of the run; with `trainer.place = "deployment"`
    missing nodes are started.
    """

    def __init__(self, run: Run, start_service: StartService) -> None:
        self.key = ""  # the key of the trainer that was found last
        self._services = ServiceFinder(run, TRAINER, start_service)

    async def start(self) -> str:
        """Returns the URL of node 0, once it answers; TrainerError when there is no node left to
        wait for.
        """
        peers = await self._services.find()
        record = next(peer.record for peer in peers if peer.record.name == node_name(0))
        self.key = record.key
        return record.url

    bring_back = start

    async def running(self) -> str:
        """Returns the URL of node 0 of a trainer that has registered, once it answers; empty where
        there is none, it is still starting, or it is lost.
        """
        while peers := [
            peer for peer in await self._services.current() if peer.record.name == node_name(0) and peer.record.url
        ]:
            (peer,) = peers
            if await peer.answers():
                self.key = peer.record.key
                return peer.record.url
            if peer.lost:
                return ""
            await asyncio.sleep(WATCH_S)
        return ""

    async def close(self) -> None:
        await self._services.close()


TrainerPlace = TrainerProcesses | RegisteredTrainer


_prepared: list[TrainerProcesses] = []  # one at most


@contextlib.contextmanager
def trainer_beside(config: PipelineConfig, work_dir: Path) -> Iterator[None]:
    """Prepares the trainer processes of a config for the session that the body opens; ends those
    that none took. Does nothing for a trainer elsewhere. UserError where this node cannot train.
    """
    if config.trainer.place != "process":
        yield
        return
    place = TrainerProcesses(config, work_dir, secrets.token_hex(16))
    _prepared.append(place)
    try:
        place.prepare()
        yield
    finally:
        if place in _prepared:
            _prepared.remove(place)
            place.end()


def trainer_place(run: Run, work_dir: Path, start_service: StartService) -> TrainerPlace:
    """Returns the place that `trainer.place` names, with the processes that were prepared for it
    where there are some.
    """
    if run.config.trainer.place != "process":
        return RegisteredTrainer(run, start_service)
    while _prepared:
        place = _prepared.pop()
        if (place.config, place.work_dir) == (run.config, work_dir):
            return place
        place.end()
    return TrainerProcesses(run.config, work_dir, secrets.token_hex(16))


class TrainerService:
    """The trainer processes of one node as a service: restarted when they end, RESTARTS_MAX times
    at most.
    """

    def __init__(self, store: Store, config: PipelineConfig, node: int, address: str) -> None:
        if node >= (nodes := config.trainer.nodes):
            raise UserError(
                f"--node {node}: trainer.nodes={nodes} of run {config.run} are numbered from 0; give --node a number"
                f" from 0 to {nodes - 1}"
            )
        self.registration = Registration(store, f"runs/{config.run}", TRAINER, ServiceRecord(node_name(node), ""))
        self._config = config
        self._node = node
        self._address = address
        self._work_dir = self.registration.work_dir(config.scratch_folder)
        self._processes: TrainerProcesses | None = None
        self._ran_at = time.monotonic()  # the time at which this node's trainer processes ran last

    async def work(self) -> Never:
        """Starts this node's trainer processes, again whenever they have ended. TrainerError after
        RESTARTS_MAX restarts.
        """
        met_at = ""
        for _start in range(RESTARTS_MAX + 1):
            met_at = await self._meeting_point(met_at)
            key = self.registration.record.key  # a new key for each new meeting point
            self._processes = processes = TrainerProcesses(
                self._config, self._work_dir, key, self._address, self._node, met_at
            )
            try:
                await self.registration.change(url=await processes.start(), rendezvous=met_at)
                while processes.alive and (self._node == 0 or await self._announced() in ("", met_at)):
                    await asyncio.sleep(WATCH_S)
            except TrainerError as error:
                log.warning("the trainer processes did not start: %s", error)
            finally:
                self._ran_at = time.monotonic()
                await processes.close()
                self._processes = None  # another process may have its address now
            log.warning("the trainer processes of node %d ended", self._node)
        raise TrainerError(f"the trainer processes ended {RESTARTS_MAX + 1} times; see {self._work_dir}/trainer.log")

    async def idle_s(self) -> float:
        """Seconds since the trainer's last job; 0 while it is starting.

        A node other than the first counts from the end of its own trainer processes: while they
        run, it is node 0 that counts.
        """
        if self._node > 0:
            return 0.0 if self._processes is not None and self._processes.alive else time.monotonic() - self._ran_at
        if self._processes is None:
            return 0.0
        try:
            status, answer = await Peer(replace(self.registration.record, url=self._processes.url)).call(
                "GET", "/status"
            )
        except ConnectionError:
            return 0.0
        # a trainer that has lost a node answers with that, and ends
        return answer["idle_s"] if status == 200 else 0.0

    async def close(self) -> None:
        if self._processes is not None:
            await self._processes.close()

    async def _meeting_point(self, before: str) -> str:
        """Returns the address at which the nodes meet. Node 0 chooses a new one and registers it;
        the other nodes wait for one that is not `before`.
        """
        if self._node == 0:
            met_at = f"{self._address}:{free_port()}"
            await self.registration.change(url="", rendezvous=met_at)
            return met_at
        while (met_at := await self._announced()) in ("", before):
            await asyncio.sleep(WATCH_S)
        # this also sets the key of what this node serves
        await self.registration.change(url="", rendezvous=met_at)
        return met_at

    async def _announced(self) -> str:
        """The meeting point in the record of node 0; empty when there is none, or the store cannot
        be read now.
        """
        try:
            records = await asyncio.to_thread(registered, self.registration.store, self.registration.run_root, TRAINER)
        except OSError as error:
            log.warning("cannot read from the store where the trainer processes meet, and tries again: %s", error)
            return ""
        return next((record.rendezvous for record in records if record.name == node_name(0)), "")
