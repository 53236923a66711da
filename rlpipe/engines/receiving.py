"""Engines get a policy from the trainer's memory: this host asks the trainer to send, and engines
to receive, one bucket after the other.

    the trainer offers: where to meet, and what it will send; nothing has changed yet
    engines: paused, in the group -> a bucket each time the trainer sends one -> flushed, labelled;
        still paused
    the trainer: the hashes of what it sent, which must be those of the policy's files
    engines: out of the group, go on; then they are proved, as after a load from disk

A group is made for one policy and ended behind it: an engine that was restarted has none to join
again. After a fault engines stay paused, as they may hold parts of two policies, until they have
read one from disk, or were restarted.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from rlpipe.base.errors import EngineError
from rlpipe.base.values import JsonDict
from rlpipe.config.pipeline import PipelineConfig
from rlpipe.engines.engine import Engine
from rlpipe.engines.weights import check_shapes
from rlpipe.records.sending import Group, Offer, Sender
from rlpipe.services.calls import http_call, json_of
from rlpipe.services.registration import FILES

log = logging.getLogger(__name__)
CALL_TIMEOUT_S = 60.0  # the gang answers within 20 s, "running" if it must
SEND_TIMEOUT_S = 1800.0  # for all of a policy; the trainer gives up far earlier where nothing moves
BUSY_RETRY_S = 0.2
# policies in a row that are lost in the middle: each may cost engines,
# which wait for the rest, a restart
SPOILT_MAX = 2
OFFER: TypeAdapter[Offer] = TypeAdapter(Offer)


class Transfer:
    """One policy on its way from the memory of a gang to engines of this host, whose `control` the
    caller holds. `keys`: bearer keys by the URL of files.
    """

    def __init__(
        self,
        config: PipelineConfig,
        sender: Sender,
        keys: dict[str, str],
        engines: list[Engine],
    ) -> None:
        self._sender, self._engines = sender, engines
        self._key = sender.key or keys.get(sender.url + FILES, "")
        self._ranks = max(1, len(config.engines.gpu_ids) // config.engines.count)  # of an engine
        self._backend = "nccl" if config.engines.gpu_ids else "gloo"

    async def receive(self, serving: Path, version: int, files: dict[str, str]) -> None:
        """Puts the policy in place of the one before on all engines, and lets them go on.

        They have to be proved.

        `serving`: a folder with tensors of the same names and shapes; `files`: the sha256 of the
        policy's files of weights. StoreError where the policy does not fit, EngineError where it
        did not arrive whole, or another one did: whoever had begun is not proved any more.
        """
        name, began = secrets.token_hex(8), time.monotonic()
        receivers = self._ranks * len(self._engines)
        offer = self._offer(await self._ask("offer", {"position": self._sender.position, "group": name}))
        await asyncio.to_thread(check_shapes, serving, offer.shapes, f"what {self._sender.url} offers")
        group = Group(name, offer.address, offer.port, 1 + receivers, self._backend)
        body = {"position": self._sender.position, "group": name, "receivers": receivers, "backend": self._backend}
        sending = asyncio.create_task(self._ask("send", body))
        for engine in self._engines:
            engine.proved = None
        receiving = (
            engine.client.receive(group, 1 + index * self._ranks, offer.buckets, version)
            for index, engine in enumerate(self._engines)
        )
        try:
            received = await asyncio.gather(*receiving, return_exceptions=True)
            if any(received):  # nobody is left to send to: the gang may have other work first
                sending.cancel()
            outcomes = [*await asyncio.gather(sending, return_exceptions=True), *received]
        finally:
            sending.cancel()
        fault = next((outcome for outcome in reversed(outcomes) if isinstance(outcome, BaseException)), None)
        if fault is None and (sent := _hashes(outcomes[0])) != files:
            fault = EngineError(f"it sent files {sent}, the policy has {files}")
        await asyncio.gather(*(engine.client.leave(group, go_on=fault is None) for engine in self._engines))
        if fault is not None:
            raise fault if isinstance(fault, EngineError) else EngineError(repr(fault))
        log.info("weight version %d came from the trainer's memory in %.2f s", version, time.monotonic() - began)

    def _offer(self, answer: JsonDict) -> Offer:
        try:
            return OFFER.validate_python(answer["offer"])
        except (ValidationError, LookupError) as error:
            raise EngineError(f"{self._sender.url} offers what is not understood: {error!s:.300}") from error

    async def _ask(self, job: str, body: JsonDict) -> JsonDict:
        """The result of a job of the gang, which is done once however often it is asked;
        EngineError where it does not do it.
        """
        url, deadline = f"{self._sender.url}/{job}", time.monotonic() + SEND_TIMEOUT_S
        while time.monotonic() < deadline:
            try:
                status, content = await http_call(
                    self._engines[0].client.session, "POST", url, self._key, body, CALL_TIMEOUT_S
                )
                answer = json_of(url, status, content)
            except ConnectionError as error:
                raise EngineError(f"the trainer does not answer: {error}") from error
            if status == 200:
                return answer["result"]
            # of a gang that is busy with its policy another host has its
            # turn; of one that trains it is gone
            waits = answer.get("error") == "busy" and answer.get("position") == self._sender.position
            if status != 202 and not waits:
                raise EngineError(f"the trainer does not {job} it: {answer.get('error')}")
            await asyncio.sleep(BUSY_RETRY_S if status != 202 else 0)
        raise EngineError(f"the trainer did not {job} within {SEND_TIMEOUT_S:g} s")


def _hashes(result: Any) -> dict[str, str]:
    return {record["name"]: record["sha256"] for record in result["sent"]}
