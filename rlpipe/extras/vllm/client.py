"""The HTTP protocol of vLLM as an `EngineClient`."""

from __future__ import annotations

import contextlib
import json
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from rlpipe.engines.adapters import ADAPTER
from rlpipe.engines.client import (
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

GENERATE = "/inference/v1/generate"
# what vLLM puts before our request ids; an abort of an id without it does nothing
VLLM_ID_PREFIX = "generate-tokens-"


class VllmClient(EngineClient):
    """vLLM 0.32, started with --enable-scale-out and VLLM_SERVER_DEV_MODE=1.

    It has no call for several prompts. Seeds are honoured.

    Its one key guards only /inference and /v1: the control calls answer every client that reaches
    the port. A tied model reloads without an error and with a stale lm_head: pass `load` the result
    of `rlpipe.extras.vllm.untied.untied`.
    """

    # /health says 200 while the scheduler hangs; this has to go through it
    health_path = "/weight_info"
    ready_path = "/health"

    async def sample(self, request: SampleRequest, heard: Heard) -> Completion:
        fields, tokens_max = {**vars(request.params)}, request.params.max_new_tokens
        params = {"max_tokens": fields.pop("max_new_tokens"), **fields, "logprobs": 0}
        body = {**self._body(request.request_id, request.tokens, params), "stream": True}
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
        spans = [
            (self._version(span["version"]), span["end"] - span["start"]) for span in choice["weight_versions"] or []
        ]
        assert sum(count for _, count in spans) == num_tokens, f"spans {spans} of {num_tokens} tokens"
        return heard.completion(reason, spans, self.name)

    async def score_top(self, tokens: list[int], num_scored: int, top_k: int) -> ScoredTokens:
        # one token has to be sampled; prompt_logprobs are never taken from the prefix cache
        body = self._body(f"score-{uuid.uuid4().hex}", tokens, {"max_tokens": 1, "prompt_logprobs": top_k})
        try:
            answer = json.loads(await self.call("POST", GENERATE, self.api_key, body, SCORE_TIMEOUT_S))
        except RequestRefused as error:
            if "greater than max allowed" not in str(error):
                raise
            raise RequestRefused(
                f"{self.url} gives fewer than {top_k} top tokens; start it with --max-logprobs {top_k}"
            ) from error
        entries = answer["prompt_logprobs"][-num_scored:]
        own = [
            number_of(entry[str(token)]["logprob"]) for entry, token in zip(entries, tokens[-num_scored:], strict=True)
        ]
        # the token itself is an entry too, wherever it ranks
        top = [[(int(token), number_of(one["logprob"])) for token, one in entry.items()] for entry in entries]
        return ScoredTokens(own, [sorted(entry, key=lambda pair: -pair[1])[:top_k] for entry in top] if top_k else [])

    async def load(self, model_path: str, version: int) -> None:
        reload = {"method": "reload_weights", "kwargs": {"weights_path": model_path}}
        async with self._paused("keep", version):
            await self.control("/collective_rpc", reload, LOAD_TIMEOUT_S + reading_s(Path(model_path)))

    async def load_adapter(self, path: str, version: int) -> None:
        # what runs would go on with what was computed with the adapter before
        async with self._paused("abort", version):
            if path:
                body = {"lora_name": ADAPTER, "lora_path": path, "load_inplace": True}
                await self.call(
                    "POST", "/v1/load_lora_adapter", self.api_key, body, LOAD_TIMEOUT_S + reading_s(Path(path))
                )
            self.adapted = bool(path)

    @contextlib.asynccontextmanager
    async def _paused(self, mode: str, version: int) -> AsyncIterator[None]:
        """Pauses the engine while the body loads weights; afterwards they are `version`, and no
        cache of the previous ones is left.
        """
        try:
            await self.control(f"/pause?mode={mode}")
            yield
            await self.adopt(version)
            # what is in flight goes on, its tokens so far computed again with the new weights
            if not json.loads(await self.control("/reset_prefix_cache?reset_running_requests=true"))["success"]:
                raise EngineUnavailable(f"{self.url} keeps a cache of the old weights after a reload to {version}")
        finally:
            try:
                await self.control("/resume")
            except (
                EngineUnavailable
            ):  # vLLM closes the connection after a 500, and this call may have been given that one
                await self.control("/resume")

    async def release(self) -> None:
        # level 1 would keep a copy of the weights on the host, and others
        # come before anything is sampled
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
            raise EngineUnavailable(
                f"{self.url} reports weight version {label!r}, so it was started just now and has not got its weights"
            )
        return int(label)

    def _body(self, request_id: str, tokens: list[int], params: dict[str, Any]) -> dict[str, object]:
        """The body of /inference/v1/generate."""
        body: dict[str, object] = {
            "request_id": request_id,
            "token_ids": tokens,
            "sampling_params": {**params, "detokenize": False},
        }
        return body | {"model": ADAPTER} if self.adapted else body
