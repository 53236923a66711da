"""SGLang's HTTP protocol, spoken by SGLang and by rlpipe's local engine."""

from __future__ import annotations

import asyncio

import aiohttp

from rlpipe.engines.client import (
    CONTROL_TIMEOUT_S,
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

UPDATES_MAX = 3


class SglangClient(EngineClient):
    """Control calls carry the admin key, /generate the API key: with both set, each takes only its own.

    `together`: requests of one `sample` go as one HTTP request, and are answered (or lost) together. That suits the local engine,
    whose completions are short and whose HTTP side shares a CPU with the model.
    """

    health_path = "/health"

    def __init__(
        self, name: str, url: str, session: aiohttp.ClientSession, api_key: str, admin_api_key: str, together: bool
    ) -> None:
        super().__init__(name, url, session, api_key, admin_api_key)
        self.together = together

    async def sample(self, requests: list[SampleRequest], timeout_s: float) -> list[Completion | EngineUnavailable]:
        assert requests, "nothing to sample"
        batches = [requests] if self.together else [[request] for request in requests]
        answers = await asyncio.gather(*(self._sample(batch, timeout_s) for batch in batches))
        return [outcome for batch in answers for outcome in batch]

    async def _sample(self, batch: list[SampleRequest], timeout_s: float) -> list[Completion | EngineUnavailable]:
        body: JsonDict = {
            "rid": [request.request_id for request in batch],
            "input_ids": [request.tokens for request in batch],
            "sampling_params": [_sampling_params(request) for request in batch],
            "return_logprob": True,
        }
        try:
            answers = await self.call("POST", "/generate", self.api_key, body, timeout_s)
            if len(answers) != len(batch):
                raise EngineUnavailable(f"{self.url} answered {len(answers)} of {len(batch)} requests")
            return [self._sampled(answer) for answer in answers]
        except EngineUnavailable as error:
            return [error] * len(batch)

    def _sampled(self, answer: JsonDict) -> Completion:
        meta = answer["meta_info"]
        tokens, reason = answer["output_ids"], meta["finish_reason"]
        if reason["type"] == "abort" and int(reason.get("status_code") or 0) >= 500:
            raise EngineUnavailable(f"{self.url}: {reason.get('message')}")
        triples = meta.get("output_token_logprobs") or []
        # an abort may come between a token and its logprob
        tokens = tokens[: len(triples)] if reason["type"] == "abort" else tokens
        assert [triple[1] for triple in triples] == tokens, f"{self.url}: logprobs and tokens of a completion differ"
        return Completion(tokens, [triple[0] for triple in triples], reason["type"], _spans(meta, len(tokens)), self.name)

    async def score(self, tokens: list[int], num_scored: int) -> list[float]:
        body: JsonDict = {
            "input_ids": tokens,
            "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": len(tokens) - num_scored - 1,
        }
        answer = await self.call("POST", "/generate", self.api_key, body, SCORE_TIMEOUT_S)
        scored = answer["meta_info"]["input_token_logprobs"][-num_scored:]
        # the token ids beside them are no proof: SGLang reports the last token of the vocabulary as 0
        if len(scored) != num_scored:
            raise EngineUnavailable(f"{self.url} scored {len(scored)} of {num_scored} tokens")
        return [triple[0] for triple in scored]

    async def load(self, model_path: str, version: int) -> None:
        body = {"model_path": model_path, "weight_version": str(version), "flush_cache": True}
        # a hung scheduler lets itself be paused, and would then be waited for as long as large weights may take
        await self.call("GET", self.health_path, self.api_key, None, CONTROL_TIMEOUT_S)
        await self.control("/pause_generation", {"mode": "retract"})
        try:
            for attempt in range(UPDATES_MAX):
                # a refused update may have changed the weights all the same: it is sent again before anything is sampled
                try:
                    await self.control("/update_weights_from_disk", body, LOAD_TIMEOUT_S)
                    break
                except RequestRefused:
                    if attempt == UPDATES_MAX - 1:
                        raise
        finally:
            await self.control("/continue_generation", {})

    async def weight_version(self) -> int:
        return int((await self.call("GET", "/model_info", self.api_key, None, INFO_TIMEOUT_S))["weight_version"])

    async def abort(self, request_ids: list[str]) -> None:
        await asyncio.gather(*(self.control("/abort_request", {"rid": request_id}) for request_id in request_ids))


def _sampling_params(request: SampleRequest) -> JsonDict:
    params = request.params
    return {
        "max_new_tokens": params.max_new_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "sampling_seed": params.seed,
        "ignore_eos": params.ignore_eos,
        **({"stop_token_ids": list(params.stop_token_ids)} if params.stop_token_ids else {}),
    }


def _spans(meta: JsonDict, num_tokens: int) -> list[tuple[int, int]]:
    """(version, tokens) of a completion, cut to the tokens that it has."""
    told = [(int(span["version"]), min(span["end"], num_tokens) - span["start"]) for span in meta["weight_versions"]]
    spans = [(version, count) for version, count in told if count > 0]
    assert sum(count for _, count in spans) == num_tokens, f"spans {meta['weight_versions']} of {num_tokens} tokens"
    return spans
