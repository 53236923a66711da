"""A played SGLang: speaks the part of its HTTP protocol that rlpipe uses, over a model of
transformers on the CPU. For tests of the core, where rlpipe's own engine is not installed.

It is started as SGLang is (`python -m sglang.launch_server`), takes its flags, and samples slowly:
token by token, one completion at a time. Its logprobs and weight versions are real ones.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import torch
from aiohttp import web
from transformers import AutoModelForCausalLM
from transformers.cache_utils import DynamicCache

EVENT_TOKENS = 8  # of a stream


class PlayedServer:
    """One model, its weight version, and the requests that were aborted."""

    def __init__(self, folder: str, version: str, keys: tuple[str, str]) -> None:
        self.keys, self.paused = keys, asyncio.Event()
        self.paused.set()  # set: it goes on
        self._lock = threading.Lock()
        self._aborted: set[str] = set()
        self.load(folder, version)

    def load(self, folder: str, version: str) -> None:
        with self._lock:
            self.lm = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
            self.version = version

    @torch.inference_mode()
    def score(self, tokens: list[int], start: int) -> list[list[Any]]:
        """[logprob, token, None] of the tokens from `start` on; the first has none."""
        with self._lock:
            logprobs = self.lm(torch.tensor([tokens])).logits[0].float().log_softmax(-1)
        scored = [[logprobs[at - 1, tokens[at]].item(), tokens[at], None] for at in range(start + 1, len(tokens))]
        return [[None, tokens[start], None], *scored]

    @torch.inference_mode()
    def next_tokens(self, state: Sampled) -> None:
        """Samples up to EVENT_TOKENS more tokens of a completion."""
        params = state.params
        with self._lock:
            for _ in range(EVENT_TOKENS):
                fed = state.tokens[state.cached :]
                logits = self.lm(torch.tensor([fed]), past_key_values=state.cache).logits[0, -1].float()
                state.cached = len(state.tokens)
                is_greedy = params["temperature"] == 0.0
                logprobs = (logits if is_greedy else logits / params["temperature"]).log_softmax(-1)
                drawn = logprobs.argmax() if is_greedy else logprobs.exp().multinomial(1, generator=state.generator)
                token = int(drawn)
                state.add(token, logprobs[token].item(), self.version)
                if token in params["stop_token_ids"]:
                    state.reason = "stop"
                elif len(state.logprobs) == params["max_new_tokens"]:
                    state.reason = "length"
                if state.reason:
                    return

    def abort(self, request_id: str) -> None:
        self._aborted.add(request_id)

    def is_aborted(self, request_id: str) -> bool:
        return any(request_id.startswith(name) for name in self._aborted)


class Sampled:
    """One completion on its way."""

    def __init__(self, prompt: list[int], params: dict[str, Any]) -> None:
        self.tokens, self.params, self.num_said, self.cached = list(prompt), params, 0, 0
        self.logprobs: list[list[Any]] = []
        self.spans: list[dict[str, Any]] = []
        self.reason = ""
        self.cache = DynamicCache()
        self.generator = torch.Generator().manual_seed(params["sampling_seed"] % (1 << 63))

    def add(self, token: int, logprob: float, version: str) -> None:
        self.tokens.append(token)
        self.logprobs.append([logprob, token, None])
        if not self.spans or self.spans[-1]["version"] != version:
            self.spans.append({"version": version, "start": len(self.logprobs) - 1})
        self.spans[-1]["end"] = len(self.logprobs)

    def event(self) -> bytes:
        """The tokens since the event before."""
        fresh, self.num_said = self.logprobs[self.num_said :], len(self.logprobs)
        meta = {
            "finish_reason": {"type": self.reason} if self.reason else None,
            "output_token_logprobs": fresh,
            "weight_versions": self.spans,
        }
        said = {"index": 0, "output_ids": [triple[1] for triple in fresh], "meta_info": meta}
        return b"data: " + json.dumps(said).encode() + b"\n\n"


def app_of(server: PlayedServer) -> web.Application:
    """The calls that `rlpipe.engines.sglang_client` makes."""

    @web.middleware
    async def keyed(request: web.Request, handler: Any) -> web.StreamResponse:
        given = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if request.path != "/ready" and given not in server.keys:
            raise web.HTTPUnauthorized
        return await handler(request)

    async def generate(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if "logprob_start_len" in body:
            scored = await asyncio.to_thread(server.score, body["input_ids"], body["logprob_start_len"])
            return web.json_response({"meta_info": {"input_token_logprobs": scored}})
        (request_id,), (prompt,), (params,) = body["rid"], body["input_ids"], body["sampling_params"]
        state, response = Sampled(prompt, params), web.StreamResponse()
        await response.prepare(request)
        while not state.reason:
            await server.paused.wait()
            if server.is_aborted(request_id):
                state.reason = "abort"
            else:
                await asyncio.to_thread(server.next_tokens, state)
            await response.write(state.event())
        await response.write(b"data: [DONE]\n\n")
        return response

    async def update(request: web.Request) -> web.Response:
        body = await request.json()
        if not (Path(body["model_path"]) / "config.json").is_file():
            raise web.HTTPBadRequest(text=f"no model in {body['model_path']}")
        await asyncio.to_thread(server.load, body["model_path"], body["weight_version"])
        return web.json_response({"success": True})

    async def pause(request: web.Request) -> web.Response:
        server.paused.clear()
        return web.json_response({})

    async def go_on(request: web.Request) -> web.Response:
        server.paused.set()
        return web.json_response({})

    async def abort(request: web.Request) -> web.Response:
        server.abort((await request.json())["rid"])
        return web.json_response({})

    async def info(request: web.Request) -> web.Response:
        return web.json_response({"weight_version": server.version})

    async def refuse(request: web.Request) -> web.Response:
        raise web.HTTPBadRequest(text="a played engine hashes nothing")

    app = web.Application(middlewares=[keyed], client_max_size=1 << 26)
    app.add_routes([web.get(path, info) for path in ("/health", "/ready", "/server_info", "/model_info")])
    app.add_routes([
        web.post("/generate", generate), web.post("/update_weights_from_disk", update),
        web.post("/pause_generation", pause),
        web.post("/continue_generation", go_on), web.post("/abort_request", abort), web.post("/flush_cache", info),
        web.post("/weights_checker", refuse),
    ])  # fmt: skip
    return app


def main() -> None:
    """Serves until it is ended; flags that it does not know are SGLang's."""
    parser = argparse.ArgumentParser()
    for flag in ("--model-path", "--weight-version", "--host", "--api-key", "--admin-api-key"):
        parser.add_argument(flag, required=True)
    parser.add_argument("--port", type=int, required=True)
    flags, _ = parser.parse_known_args()
    torch.set_num_threads(1)
    server = PlayedServer(flags.model_path, flags.weight_version, (flags.api_key, flags.admin_api_key))
    web.run_app(app_of(server), host=flags.host, port=flags.port, print=None)


if __name__ == "__main__":
    main()
