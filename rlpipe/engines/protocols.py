"""The HTTP protocols behind `EngineClient`: SGLang's, spoken by SGLang and by rlpipe's local engine, and vLLM's."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

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
)
from rlpipe.engines.weights import reading_s

UPDATES_MAX = 3
IDLE_S = 20  # a request that was aborted may take so long to end
BATCH_MAX = 64  # requests of one call: an engine takes bodies of at most 64 MiB
GENERATE = "/inference/v1/generate"
VLLM_ID_PREFIX = "generate-tokens-"  # what vLLM puts before our request ids; an abort of an id without it does nothing


def client_of(kind: str, name: str, url: str, session: aiohttp.ClientSession, keys: tuple[str, str]) -> EngineClient:
    """The client that speaks an engine's protocol."""
    if kind == "vllm":
        return VllmClient(name, url, session, keys[0], keys[0])  # it has one key
    return SglangClient(name, url, session, *keys, exact=kind == "local")


def _number(logprob: float | None) -> float:
    """A NaN comes as null."""
    return math.nan if logprob is None else logprob


@dataclass(eq=False)
class Order:
    """A request on its way, what is heard of it, and the completion that is waited for."""

    request: SampleRequest
    heard: Heard
    answer: asyncio.Future[Completion]


@dataclass(eq=False)
class SglangClient(EngineClient):
    """Control calls carry the admin key, /generate the API key: with both set, each takes only its own.

    What is asked of the local engine in one breath goes as one call: its completions are short, and its HTTP side shares a CPU with the
    model. SGLang gets a call for each request, so that each can be lost alone.
    """

    health_path = "/health"
    ready_path = "/ready"
    _gathered: list[Order] = field(default_factory=list)

    async def sample(self, request: SampleRequest, heard: Heard) -> Completion:
        loop = asyncio.get_running_loop()
        order = Order(request, heard, loop.create_future())
        self._gathered.append(order)
        if not self.exact or len(self._gathered) == BATCH_MAX:
            self._send()
        elif len(self._gathered) == 1:
            loop.call_soon(self._send)  # after all that is ready to run, and may ask too
        return await order.answer

    def _send(self) -> None:
        """Sends what was gathered as one call, which ends when nobody waits for it any more."""
        batch, self._gathered = self._gathered, []
        if not batch:
            return  # it was full, and is on its way
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
        }

    def _hear(self, event: Any, heard: Heard) -> Completion | None:
        """The completion, once it is whole: until then its tokens are added to what was heard."""
        tokens, meta = event["output_ids"], event["meta_info"]
        reason, triples = meta["finish_reason"] or {"type": ""}, meta.get("output_token_logprobs") or []
        if reason["type"] == "abort":
            if int(reason.get("status_code") or 0) >= 500:
                raise EngineUnavailable(f"{self.url}: {reason.get('message')}")
            tokens = tokens[: len(triples)]  # an abort may come between a token and its logprob
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

    async def score(self, tokens: list[int], num_scored: int) -> list[float]:
        body = {
            "input_ids": tokens,
            "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": len(tokens) - num_scored - 1,
        }
        answer = json.loads(await self.call("POST", "/generate", self.api_key, body, SCORE_TIMEOUT_S))
        scored = answer["meta_info"]["input_token_logprobs"][-num_scored:]
        # the token ids beside them are no proof: SGLang reports the last token of the vocabulary as 0
        if len(scored) != num_scored:
            raise EngineUnavailable(f"{self.url} scored {len(scored)} of {num_scored} tokens")
        return [_number(triple[0]) for triple in scored]

    async def load(self, model_path: str, version: int) -> None:
        body = {"model_path": model_path, "weight_version": str(version), "flush_cache": True}
        timeout_s = LOAD_TIMEOUT_S + reading_s(Path(model_path))
        # a hung scheduler lets itself be paused, and would then be waited for as long as large weights may take. This goes through it, and
        # unlike /health samples no token: an engine that was just woken has no weights
        await self.read("/server_info", CONTROL_TIMEOUT_S)
        await self.control("/pause_generation", {"mode": "retract"})
        try:
            for attempt in range(UPDATES_MAX):
                # a refused update may have changed the weights all the same: it is sent again before anything is sampled
                try:
                    await self.control("/update_weights_from_disk", body, timeout_s)
                    break
                except RequestRefused:
                    if attempt == UPDATES_MAX - 1:
                        raise
        finally:
            await self.control("/continue_generation", {})

    async def release(self) -> None:
        # with a request left in it SGLang dies of a release: a flush is refused until there is none
        await self.control("/abort_request", {"abort_all": True})
        await self.control(f"/flush_cache?timeout={IDLE_S}", timeout_s=IDLE_S + CONTROL_TIMEOUT_S)
        await self.control("/release_memory_occupation", {}, MEMORY_TIMEOUT_S)

    async def resume(self) -> None:
        await self.control("/resume_memory_occupation", {}, MEMORY_TIMEOUT_S)

    async def weight_version(self) -> int:
        return int(json.loads(await self.read("/model_info"))["weight_version"])

    async def abort(self, request_ids: list[str]) -> None:
        await asyncio.gather(*(self.control("/abort_request", {"rid": request_id}) for request_id in request_ids))


class VllmClient(EngineClient):
    """vLLM 0.32, started with --enable-scale-out and VLLM_SERVER_DEV_MODE=1. It has no call for several prompts. Seeds are honoured.

    Its one key guards only /inference and /v1: the control calls answer anyone who reaches the port. A tied model reloads without an
    error and with a stale lm_head: give `load` what `rlpipe.engines.weights.untied` makes.
    """

    health_path = "/weight_info"  # /health says 200 while the scheduler hangs; this has to go through it
    ready_path = "/health"

    async def sample(self, request: SampleRequest, heard: Heard) -> Completion:
        fields, tokens_max = {**vars(request.params)}, request.params.max_new_tokens
        params = {"max_tokens": fields.pop("max_new_tokens"), **fields, "logprobs": 0}
        body = {**_body(request.request_id, request.tokens, params), "stream": True}
        choice: Any = {}
        async with contextlib.aclosing(self.events(GENERATE, body)) as parts:
            async for events in parts:
                for event in events:
                    choice = event["choices"][0]
                    tokens, scored = choice["token_ids"] or [], (choice["logprobs"] or {"content": []})["content"]
                    assert [entry["token_id"] for entry in scored] == tokens, f"{self.url}: logprobs and tokens differ"
                    heard.add(tokens, [entry["logprob"] for entry in scored])
        num_tokens, reason = len(heard.tokens), choice.get("finish_reason")
        if reason is None:
            raise EngineUnavailable(f"{self.url} ended its answer too early")
        assert reason in ("stop", "length", "abort"), f"{self.url}: finish reason {reason}"
        if reason == "length" and num_tokens < tokens_max:
            raise RequestRefused(
                f"{self.url} cut max_new_tokens={tokens_max} to {num_tokens} after {len(request.tokens)} tokens: "
                "together they are more than the engine's --max-model-len"
            )
        spans = [(self._version(span["version"]), span["end"] - span["start"]) for span in choice["weight_versions"] or []]
        assert sum(count for _, count in spans) == num_tokens, f"spans {spans} of {num_tokens} tokens"
        return heard.completion(reason, spans, self.name)

    async def score(self, tokens: list[int], num_scored: int) -> list[float]:
        # one token has to be sampled; prompt_logprobs are never taken from the prefix cache
        body = _body(f"score-{uuid.uuid4().hex}", tokens, {"max_tokens": 1, "prompt_logprobs": 0})
        answer = json.loads(await self.call("POST", GENERATE, self.api_key, body, SCORE_TIMEOUT_S))
        entries = answer["prompt_logprobs"][-num_scored:]
        return [_number(entry[str(token)]["logprob"]) for entry, token in zip(entries, tokens[-num_scored:], strict=True)]

    async def load(self, model_path: str, version: int) -> None:
        try:
            await self.control("/pause?mode=keep")
            reload = {"method": "reload_weights", "kwargs": {"weights_path": model_path}}
            await self.control("/collective_rpc", reload, LOAD_TIMEOUT_S + reading_s(Path(model_path)))
            await self.adopt(version)
            # what is in flight goes on, its tokens so far computed again with the new weights
            if not json.loads(await self.control("/reset_prefix_cache?reset_running_requests=true"))["success"]:
                raise EngineUnavailable(f"{self.url} keeps a cache of the old weights after a reload to {version}")
        finally:
            try:
                await self.control("/resume")
            except EngineUnavailable:  # vLLM closes the connection after a 500, and this call may have been given that one
                await self.control("/resume")

    async def release(self) -> None:
        # level 1 would keep a copy of the weights on the host, and others come before anything is sampled
        await self.control("/sleep?level=2&mode=abort", timeout_s=MEMORY_TIMEOUT_S)

    async def resume(self) -> None:
        await self.control("/wake_up", timeout_s=MEMORY_TIMEOUT_S)

    async def adopt(self, version: int) -> None:
        await self.control("/update_weight_version", {"new_version": str(version)})

    async def weight_version(self) -> int:
        return self._version(json.loads(await self.read("/weight_info"))["weight_version"])

    async def abort(self, request_ids: list[str]) -> None:
        ids = [VLLM_ID_PREFIX + request_id for request_id in request_ids]
        await self.control("/inference/v1/abort_requests", {"request_ids": ids})

    def _version(self, label: str) -> int:
        if not label.isdecimal():
            raise EngineUnavailable(f"{self.url} reports weight version {label!r}: nobody told it, it was started just now")
        return int(label)


def _body(request_id: str, tokens: list[int], params: dict[str, Any]) -> dict[str, object]:
    """What vLLM's /inference/v1/generate takes."""
    return {"request_id": request_id, "token_ids": tokens, "sampling_params": {**params, "detokenize": False}}
