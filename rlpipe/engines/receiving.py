"""Transfers a policy from the trainer's memory to engines, bucket by bucket: this host requests the
trainer to send, and the engines to receive.

    trainer: offers the address of the group, and the tensors to come; nothing has changed yet
    engines: pause, join the group -> receive each bucket that the trainer sends -> flush their
        caches, set the version label; still paused
    trainer: answers with the hashes of what it sent, which must be those of the policy's files
    engines: leave the group, continue; then they are proved, as after a load from disk

A group is made for one policy and ended after it, so an engine that was restarted need not join
again. After a fault engines stay paused, as they may have parts of two policies, until they have
loaded one from disk, or were restarted.
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
CALL_TIMEOUT_S = 60.0  # rank 0 answers within 20 s, with "running" for a job that takes longer
SEND_TIMEOUT_S = 1800.0  # for a whole policy; without progress the trainer gives up far earlier
BUSY_RETRY_S = 0.2
# consecutive policies whose transfer fails: after each, engines that wait for the rest may need a
# restart
SPOILT_MAX = 2
OFFER: TypeAdapter[Offer] = TypeAdapter(Offer)


class Transfer:
    """The transfer of one policy from the trainer's memory to engines of this host, whose `control`
    the caller holds. `keys`: bearer keys by the URL of files.
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
        self._ranks = max(1, len(config.engines.gpu_ids) // config.engines.count)  # per engine
        self._backend = "nccl" if config.engines.gpu_ids else "gloo"

    async def receive(self, serving: Path, version: int, files: dict[str, str]) -> None:
        """Loads the policy on all engines in place of the one before, and continues generation.

        The caller must prove them afterwards.

        `serving`: a folder with tensors of the same names and shapes; `files`: the sha256 of the
        policy's files of weights. StoreError when the policy does not fit; EngineError when it did
        not arrive whole, or was another one: engines that had begun are then not proved any more.
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
            if any(received):  # no receiver is left: the trainer may be busy with another job first
                sending.cancel()
            outcomes = [*await asyncio.gather(sending, return_exceptions=True), *received]
        finally:
            sending.cancel()
        fault = next((outcome for outcome in reversed(outcomes) if isinstance(outcome, BaseException)), None)
        if fault is None and (sent := _hashes(outcomes[0])) != files:
            fault = EngineError(f"the trainer sent the files {sent}, but the policy has {files}")
        await asyncio.gather(*(engine.client.leave(group, go_on=fault is None) for engine in self._engines))
        if fault is not None:
            raise fault if isinstance(fault, EngineError) else EngineError(repr(fault))
        log.info("weight version %d came from the trainer's memory in %.2f s", version, time.monotonic() - began)

    def _offer(self, answer: JsonDict) -> Offer:
        try:
            return OFFER.validate_python(answer["offer"])
        except (ValidationError, LookupError) as error:
            raise EngineError(f"cannot read the answer of the trainer at {self._sender.url}: {error!s:.300}") from error

    async def _ask(self, job: str, body: JsonDict) -> JsonDict:
        """Requests a job of the trainer until it is done (the trainer does it once); returns its
        result. EngineError when the trainer refuses it.
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
            # a trainer that is busy at this position sends to another host, so wait; one that
            # trains has no longer this policy
            waits = answer.get("error") == "busy" and answer.get("position") == self._sender.position
            if status != 202 and not waits:
                raise EngineError(f"the trainer refused to {job} weights: {answer.get('error')}")
            await asyncio.sleep(BUSY_RETRY_S if status != 202 else 0)
        raise EngineError(f"the trainer did not {job} weights within {SEND_TIMEOUT_S:g} s")


def _hashes(result: Any) -> dict[str, str]:
    return {record["name"]: record["sha256"] for record in result["sent"]}
