"""An `EngineClient` for the HTTP protocol of SGLang, which rlpipe's local engine speaks, too."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rlpipe.base.errors import EngineError
from rlpipe.engines.adapters import ADAPTER
from rlpipe.engines.client import (
    CONTROL_TIMEOUT_S,
    LOAD_TIMEOUT_S,
    MEMORY_TIMEOUT_S,
    SCORE_TIMEOUT_S,
    Completion,
    EngineClient,
    EngineUnavailable,
    Heard,
    RequestRefused,
    SampleRequest,
    ScoredTokens,
    number_of,
)
from rlpipe.engines.weights import reading_s
from rlpipe.records.sending import Group, TensorBucket

log = logging.getLogger(__name__)
UPDATES_MAX = 3
# more than the trainer waits for all receivers, or for a bucket to reach them
RECEIVE_TIMEOUT_S = 90.0
IDLE_S = 20  # an aborted request may take so long to end
BATCH_MAX = 64  # requests per call: an engine accepts bodies of at most 64 MiB


@dataclass(eq=False)
class Order:
    """A request in flight, its tokens so far, and the future of its completion."""

    request: SampleRequest
    heard: Heard
    answer: asyncio.Future[Completion]


@dataclass(eq=False)
class SglangClient(EngineClient):
    """Control calls use the admin key, /generate the API key: with both set, each accepts only its
    own.

    Requests to the local engine that are made at the same moment go as one call: its completions
    are short, and its HTTP server shares a CPU with the model. SGLang gets one call per request, so
    that each can fail alone.
    """

    health_path = "/health"
    ready_path = "/ready"
    _gathered: list[Order] = field(default_factory=list)

    @property
    def repeats_prompts(self) -> bool:
        # vLLM has a prompt's blocks in its cache as soon as they are scheduled
        return not self.exact

    async def sample(self, request: SampleRequest, heard: Heard) -> Completion:
        loop = asyncio.get_running_loop()
        order = Order(request, heard, loop.create_future())
        self._gathered.append(order)
        if not self.exact or len(self._gathered) == BATCH_MAX:
            self._send()
        elif len(self._gathered) == 1:
            # after all tasks that are ready to run, which may add requests
            loop.call_soon(self._send)
        return await order.answer

    def _send(self) -> None:
        """Sends the gathered requests as one call, which is cancelled when nobody waits for it any
        more.
        """
        batch, self._gathered = self._gathered, []
        if not batch:
            return  # the batch was full, and has been sent
        sending = asyncio.create_task(self._stream(batch))

        def left(answer: asyncio.Future[Completion]) -> None:
            if answer.cancelled() and all(order.answer.done() for order in batch):
                sending.cancel()

        def ended(sending: asyncio.Task[None]) -> None:
            fault = None if sending.cancelled() else sending.exception()
            for order in batch:
                if not order.answer.done():
                    order.answer.set_exception(fault or EngineUnavailable(f"{self.url} ended its answer too early"))

        sending.add_done_callback(ended)
        for order in batch:
            order.answer.add_done_callback(left)

    async def _stream(self, batch: list[Order]) -> None:
        async with contextlib.aclosing(self.events("/generate", self._body(batch))) as parts:
            async for events in parts:
                for event in events:
                    order = batch[event.get("index", 0)]
                    completion = self._hear(event, order.heard)
                    if completion is not None and not order.answer.done():
                        order.answer.set_result(completion)

    def _body(self, batch: list[Order]) -> object:
        params = [{**vars(order.request.params)} for order in batch]
        return {
            "rid": [order.request.request_id for order in batch],
            "input_ids": [order.request.tokens for order in batch],
            "sampling_params": [{"sampling_seed": fields.pop("seed"), **fields} for fields in params],
            "return_logprob": True,
            "stream": True,
            **self._adapted,
        }

    def _hear(self, event: Any, heard: Heard) -> Completion | None:
        """Adds the tokens of an event to `heard`; returns the completion once it is whole."""
        tokens, meta = event["output_ids"], event["meta_info"]
        reason, triples = meta["finish_reason"] or {"type": ""}, meta.get("output_token_logprobs") or []
        if reason["type"] == "abort":
            if int(reason.get("status_code") or 0) >= 500:
                raise EngineUnavailable(f"{self.url}: {reason.get('message')}")
            tokens = tokens[: len(triples)]  # an abort may occur between a token and its logprob
        assert [triple[1] for triple in triples] == tokens, f"{self.url}: logprobs and tokens of a completion differ"
        heard.add(tokens, [triple[0] for triple in triples])
        if not reason["type"]:
            return None
        num_tokens = len(heard.tokens)
        spans = [
            (int(span["version"]), min(span["end"], num_tokens) - span["start"])
            for span in meta["weight_versions"]
            if span["start"] < min(span["end"], num_tokens)
        ]
        assert sum(count for _, count in spans) == num_tokens, f"{self.url}: spans {spans} of {num_tokens} tokens"
        return heard.completion(reason["type"], spans, self.name)

    async def score_top(self, tokens: list[int], num_scored: int, top_k: int) -> ScoredTokens:
        body = {
            "input_ids": tokens,
            "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": len(tokens) - num_scored - 1,
            **({"top_logprobs_num": top_k} if top_k else {}),
            **self._adapted,
        }
        answer = json.loads(await self.call("POST", "/generate", self.api_key, body, SCORE_TIMEOUT_S))
        scored = answer["meta_info"]["input_token_logprobs"][-num_scored:]
        top = answer["meta_info"]["input_top_logprobs"][-num_scored:] if top_k else []
        # the token ids with them cannot be compared: SGLang reports the last token of the
        # vocabulary as 0
        if len(scored) != num_scored:
            raise EngineUnavailable(f"{self.url} scored {len(scored)} of {num_scored} tokens")
        return ScoredTokens(
            [number_of(triple[0]) for triple in scored],
            [[(token, number_of(logprob)) for logprob, token, _ in entries] for entries in top],
        )

    async def load(self, model_path: str, version: int) -> None:
        body = {"model_path": model_path, "weight_version": str(version), "flush_cache": True}
        timeout_s = LOAD_TIMEOUT_S + reading_s(Path(model_path))
        # a hung scheduler accepts a pause, and the load would then wait for its full timeout. This
        # call goes through the scheduler and, unlike /health, samples no token: an engine that was
        # just resumed has no weights
        await self.read("/server_info", CONTROL_TIMEOUT_S)
        await self.control("/pause_generation", {"mode": "retract"})
        try:
            for attempt in range(UPDATES_MAX):
                # a refused update may have changed the weights anyway: it is sent again before
                # anything is sampled
                try:
                    await self.control("/update_weights_from_disk", body, timeout_s)
                    break
                except RequestRefused:
                    if attempt == UPDATES_MAX - 1:
                        raise
        finally:
            await self.control("/continue_generation", {})

    async def receive(self, group: Group, rank: int, buckets: list[TensorBucket], version: int) -> None:
        await self.read("/server_info", CONTROL_TIMEOUT_S)
        await self.control("/pause_generation", {"mode": "retract"})
        place = {
            "master_address": group.address,
            "master_port": group.port,
            "rank_offset": rank,
            "world_size": group.size,
        }
        group_name = {"group_name": group.name}
        await self.control(
            "/init_weights_update_group", place | group_name | {"backend": group.backend}, RECEIVE_TIMEOUT_S
        )
        await self.control("/begin_weight_update", {})
        for bucket in buckets:
            body = {
                **asdict(bucket),
                **group_name,
                "flush_cache": bucket is buckets[-1],
                "weight_version": str(version),
            }
            await self.control("/update_weights_from_distributed", body, RECEIVE_TIMEOUT_S)
        await self.control("/end_weight_update", {}, RECEIVE_TIMEOUT_S)

    async def leave(self, group: Group, *, go_on: bool) -> None:
        # there may be no update to end; the next load detects an engine that hangs
        if not go_on:
            with contextlib.suppress(EngineError):
                await self.control("/end_weight_update", {})
        with contextlib.suppress(EngineError):
            await self.control("/destroy_weights_update_group", {"group_name": group.name})
        if go_on:
            await self.control("/continue_generation", {})

    @property
    def _adapted(self) -> dict[str, object]:
        """The part of a request that names the adapter; empty without one. Otherwise the engine
        would use the weights that it was started on."""
        return {"lora_path": ADAPTER} if self.adapted else {}

    async def load_adapter(self, path: str, version: int) -> None:
        await self.read("/server_info", CONTROL_TIMEOUT_S)
        # running requests keep the adapter that they began with, and SGLang unloads no adapter that
        # is in use
        await self.control("/pause_generation", {"mode": "abort"}, IDLE_S)
        try:
            if self.adapted:
                await self.control("/unload_lora_adapter", {"lora_name": ADAPTER}, IDLE_S)
            self.adapted = bool(path)
            if path:
                body = {"lora_name": ADAPTER, "lora_path": path}
                await self.control("/load_lora_adapter", body, LOAD_TIMEOUT_S + reading_s(Path(path)))
            await self.control("/flush_cache")
            await self.control("/update_weight_version", {"new_version": str(version), "abort_all_requests": False})
        finally:
            await self.control("/continue_generation", {})

    async def release(self) -> None:
        # a release with a request left kills SGLang: a flush is refused until there is none
        await self.control("/abort_request", {"abort_all": True})
        await self.control(f"/flush_cache?timeout={IDLE_S}", timeout_s=IDLE_S + CONTROL_TIMEOUT_S)
        await self.control("/release_memory_occupation", {}, MEMORY_TIMEOUT_S)

    async def resume(self) -> None:
        await self.control("/resume_memory_occupation", {}, MEMORY_TIMEOUT_S)

    async def weight_version(self) -> int:
        return int(json.loads(await self.read("/model_info"))["weight_version"])

    async def checksum(self) -> str:
        try:
            answer = await self.control("/weights_checker", {"action": "checksum"}, SCORE_TIMEOUT_S)
        except RequestRefused as error:  # weights that it cannot hash
            log.warning("%s: %s; its reloads are proved by the probe alone", self.name, error)
            return ""
        return json.loads(answer)["per_engine_checksum"]

    async def abort(self, request_ids: list[str]) -> None:
        await asyncio.gather(*(self.control("/abort_request", {"rid": request_id}) for request_id in request_ids))
