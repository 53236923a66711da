"""vLLM's HTTP protocol (0.32, started with --enable-scale-out and VLLM_SERVER_DEV_MODE=1).

Its one key guards only /inference and /v1: the control calls answer anyone who reaches the port. A tied model reloads without an
error and with a stale lm_head: give `load` what `rlpipe.weights.untied` makes.
"""

from __future__ import annotations

import asyncio
import uuid

from rlpipe.engines.client import (
    INFO_TIMEOUT_S,
    LOAD_TIMEOUT_S,
    SCORE_TIMEOUT_S,
    Completion,
    EngineClient,
    EngineUnavailable,
    RequestRefused,
    SampleRequest,
)
from rlpipe.types import JsonDict

GENERATE = "/inference/v1/generate"
ID_PREFIX = "generate-tokens-"  # what vLLM puts before our request ids; an abort of an id without it does nothing


class VllmClient(EngineClient):
    """Requests of one `sample` go as one HTTP request each: vLLM has no call for several prompts. Seeds are honoured."""

    health_path = "/weight_info"  # /health says 200 while the scheduler hangs; this has to go through it

    async def sample(self, requests: list[SampleRequest], timeout_s: float) -> list[Completion | EngineUnavailable]:
        assert requests, "nothing to sample"
        return await asyncio.gather(*(self._sample(request, timeout_s) for request in requests))

    async def _sample(self, request: SampleRequest, timeout_s: float) -> Completion | EngineUnavailable:
        try:
            answer = await self._generate(request.request_id, request.tokens, _sampling_params(request), timeout_s)
            return self._sampled(request, answer["choices"][0])
        except EngineUnavailable as error:
            return error

    def _sampled(self, request: SampleRequest, choice: JsonDict) -> Completion:
        tokens, reason, scored = choice["token_ids"], choice["finish_reason"], choice["logprobs"]["content"]
        assert [entry["token_id"] for entry in scored] == tokens, f"{self.url}: logprobs and tokens of a completion differ"
        assert reason in ("stop", "length", "abort"), f"{self.url}: finish reason {reason}"
        if reason == "length" and len(tokens) < request.params.max_new_tokens:
            raise RequestRefused(
                f"{self.url} cut max_new_tokens={request.params.max_new_tokens} to {len(tokens)} after {len(request.tokens)} tokens: "
                "together they are more than the engine's --max-model-len"
            )
        spans = [(self._version(span["version"]), span["end"] - span["start"]) for span in choice["weight_versions"] or []]
        assert sum(count for _, count in spans) == len(tokens), f"spans {spans} of {len(tokens)} tokens"
        return Completion(tokens, [entry["logprob"] for entry in scored], reason, spans, self.name)

    async def score(self, tokens: list[int], num_scored: int) -> list[float]:
        # one token has to be sampled; prompt_logprobs are never taken from the prefix cache
        params = {"max_tokens": 1, "prompt_logprobs": 0, "detokenize": False}
        answer = await self._generate(f"score-{uuid.uuid4().hex}", tokens, params, SCORE_TIMEOUT_S)
        entries = answer["prompt_logprobs"][-num_scored:]
        return [entry[str(token)]["logprob"] for entry, token in zip(entries, tokens[-num_scored:], strict=True)]

    async def load(self, model_path: str, version: int) -> None:
        try:
            await self.control("/pause?mode=keep")
            reload = {"method": "reload_weights", "kwargs": {"weights_path": model_path}}
            await self.control("/collective_rpc", reload, LOAD_TIMEOUT_S)
            await self.adopt(version)
            # what is in flight goes on, its tokens so far computed again with the new weights
            if not (await self.control("/reset_prefix_cache?reset_running_requests=true"))["success"]:
                raise EngineUnavailable(f"{self.url} keeps a cache of the old weights after a reload to {version}")
        finally:
            await self._resume()

    async def _resume(self) -> None:
        """Sent twice if need be: vLLM closes the connection after a 500, and the next call may still be given that one."""
        try:
            await self.control("/resume")
        except EngineUnavailable:
            await self.control("/resume")

    async def adopt(self, version: int) -> None:
        await self.control("/update_weight_version", {"new_version": str(version)})

    async def weight_version(self) -> int:
        return self._version((await self.call("GET", "/weight_info", self.api_key, None, INFO_TIMEOUT_S))["weight_version"])

    async def abort(self, request_ids: list[str]) -> None:
        ids = [ID_PREFIX + request_id for request_id in request_ids]
        await self.control("/inference/v1/abort_requests", {"request_ids": ids})

    def _version(self, label: str) -> int:
        if not label.isdecimal():
            raise EngineUnavailable(f"{self.url} reports weight version {label!r}: nobody told it, it was started just now")
        return int(label)

    async def _generate(self, request_id: str, tokens: list[int], params: JsonDict, timeout_s: float) -> JsonDict:
        body = {"request_id": request_id, "token_ids": tokens, "sampling_params": params}
        return await self.call("POST", GENERATE, self.api_key, body, timeout_s)


def _sampling_params(request: SampleRequest) -> JsonDict:
    params = request.params
    return {
        "max_tokens": params.max_new_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "seed": params.seed,
        "stop_token_ids": list(params.stop_token_ids),
        "ignore_eos": params.ignore_eos,
        "logprobs": 0,
        "detokenize": False,
    }
