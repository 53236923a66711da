"""The command `rlpipe engine` (`python -m rlpipe.extras.local_engine.server`): SGLang's HTTP
protocol in front of the scheduler.

Each route is parse, ask the scheduler, answer. Torch is loaded after the options were checked.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from aiohttp import web
from aiohttp.typedefs import Handler

from rlpipe import __version__
from rlpipe.base.errors import UserError
from rlpipe.config.model import Dtype
from rlpipe.config.operational import LOCAL_THREADS
from rlpipe.config.secrecy import key_fits
from rlpipe.extras.local_engine import protocol
from rlpipe.processes.launch import check_port_free, die_with_parent
from rlpipe.processes.memory import lasting_objects, settle_heap

if TYPE_CHECKING:
    from rlpipe.extras.local_engine.scheduler import Scheduler

BODY_BYTES_MAX = 64 << 20
# clients that come at once; the default of 128 makes the others wait for a second try of TCP
BACKLOG = 1024
HEARTBEAT_MAX_S = 60.0
HEALTH_TIMEOUT_S = 20.0  # as SGLang's
HEALTH_POLL_S = 0.05
STREAM_S = 2.0
SHUTDOWN_S = 2.0
# every torch call gives the GIL away; at the default 5 ms the model would wait for JSON
SWITCH_INTERVAL_S = 0.0005
THREADS = ", ".join(map(str, LOCAL_THREADS))


class Routes:
    """The HTTP handlers of the scheduler.

    Runs on the event loop. Two keys: the API key samples, the admin key controls.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        limits: protocol.ModelLimits,
        api_key: str,
        admin_api_key: str,
        stream_s: float = STREAM_S,
    ) -> None:
        self.scheduler = scheduler
        self.limits = limits
        self.stream_s = stream_s
        self._api_key = api_key
        self._admin_api_key = admin_api_key
        self._tokenizer_path = scheduler.model.folder
        self._ids = itertools.count()
        self._seeds = itertools.count(secrets.randbits(63), 1 << 20)
        self.open = {"/health": self.health, "/ready": self.ready}
        self.information = {"/model_info": self.model_info, "/server_info": self.server_info, "/v1/loads": self.loads}
        self.control = {
            "/pause_generation": self.pause,
            "/continue_generation": self.resume,
            "/abort_request": self.abort,
            "/update_weights_from_disk": self.update_weights,
            "/flush_cache": self.flush,
            "/release_memory_occupation": self.release,
            "/resume_memory_occupation": self.take_back,
            "/weights_checker": self.check_weights,
        }

    def app(self) -> web.Application:
        app = web.Application(client_max_size=BODY_BYTES_MAX, middlewares=[self._guard])
        app.add_routes([web.get(path, handler) for path, handler in {**self.open, **self.information}.items()])
        app.add_routes(
            [web.post(path, handler) for path, handler in {**self.control, "/generate": self.generate}.items()]
        )
        return app

    def key_wanted(self, path: str) -> str:
        """The key that a path needs; empty when it is open.

        If only one key is set, it opens all paths that it guards.
        """
        if path in self.open:
            return ""
        return (self._admin_api_key or self._api_key) if path in self.control else self._api_key

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Answers 401 to requests without the key of their path, 400 to refused ones."""
        if not key_fits(request.headers.get("Authorization", ""), self.key_wanted(request.path)):
            return web.json_response({"error": "Unauthorized"}, status=401)
        try:
            return await handler(request)
        except protocol.BadRequest as error:
            return web.json_response(error.as_json(), status=400)
        except UserError as error:
            return web.json_response({"error": {"message": str(error)}}, status=400)

    async def _ask(self, action: Callable[[], Any]) -> Any:
        return await asyncio.wrap_future(self.scheduler.ask(action))

    # sampling

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """Answers when all jobs of the call are finished, or streams them; a client that
        disconnects ends them.
        """
        call = protocol.parse_generate(await _json(request), self.limits, f"local-{next(self._ids)}", next(self._seeds))
        ended = Wake()
        if call.stream:
            call.on_finish = ended.set
        try:
            await self._ask(lambda: self.scheduler.submit(call))
            if call.stream:
                return await _stream(request, call, ended, self.stream_s)
            await asyncio.wrap_future(call.answered)
        except (asyncio.CancelledError, ConnectionError):
            self.scheduler.ask(lambda: self.scheduler.abort_jobs(call.jobs))
            raise
        return web.json_response(protocol.answer(call))

    # control

    async def pause(self, request: web.Request) -> web.Response:
        mode = protocol.parse_body(protocol.PauseBody, await _json(request)).mode
        await self._ask(lambda: self.scheduler.pause(mode))
        return web.json_response({"status": "ok", "message": "Generation paused successfully."})

    async def resume(self, _: web.Request) -> web.Response:
        await self._ask(self.scheduler.resume)
        return web.json_response({"status": "ok", "message": "Generation continued successfully."})

    async def abort(self, request: web.Request) -> web.Response:
        """Answers 200, also when there was no such job."""
        body = protocol.parse_body(protocol.AbortBody, await _json(request))
        await self._ask(lambda: self.scheduler.abort(None if body.abort_all else body.rid))
        return web.Response()

    async def update_weights(self, request: web.Request) -> web.Response:
        body = protocol.parse_body(protocol.UpdateBody, await _json(request))
        label = f" Weight version updated to {body.weight_version}." if body.weight_version is not None else ""
        status, message = 200, f"Succeeded to update model weights.{label}"
        try:
            await self._ask(lambda: self.scheduler.update_weights(body.model_path, body.weight_version))
        except UserError as error:
            status, message = 400, str(error)
        return web.json_response(
            {"success": status == 200, "message": message, "num_paused_requests": 0}, status=status
        )

    async def flush(self, _: web.Request) -> web.Response:
        if await self._ask(self.scheduler.flush):
            return web.Response(text="Cache flushed.\n")
        return web.Response(text="Flush cache failed.\n", status=400)

    async def release(self, _: web.Request) -> web.Response:
        await self._ask(self.scheduler.release)
        return web.json_response(None)

    async def take_back(self, _: web.Request) -> web.Response:
        await self._ask(self.scheduler.take_back)
        return web.json_response(None)

    async def check_weights(self, request: web.Request) -> web.Response:
        action = protocol.parse_body(protocol.CheckBody, await _json(request)).action
        if action != "checksum":
            return web.json_response(
                {"success": False, "message": f"action={action!r:.100}: only checksum is known"}, status=400
            )
        by_name, overall = await self._ask(self.scheduler.checksums)
        ranks = [{"checksums": by_name, "per_gpu_checksum": overall}]
        return web.json_response(
            {"success": True, "message": "Success.", "ranks": ranks, "per_engine_checksum": overall}
        )

    # state

    async def health(self, _: web.Request) -> web.Response:
        """Answers 503 when the scheduler has not finished a step for a minute, or when the engine
        is still paused after HEALTH_TIMEOUT_S; as in SGLang, the end of a pause is waited for.
        """
        deadline_s = time.monotonic() + HEALTH_TIMEOUT_S
        while self.scheduler.paused is not None and time.monotonic() < deadline_s:
            await asyncio.sleep(HEALTH_POLL_S)
        steps = time.monotonic() - self.scheduler.heartbeat_s < HEARTBEAT_MAX_S
        return web.Response(status=200 if steps and self.scheduler.paused is None else 503)

    async def ready(self, _: web.Request) -> web.Response:
        return web.Response(status=200 if self.scheduler.paused is None else 503)

    async def model_info(self, _: web.Request) -> web.Response:
        model = self.scheduler.model
        info = {
            "model_path": model.folder,
            "tokenizer_path": self._tokenizer_path,
            "is_generation": True,
            "weight_version": self.scheduler.weight_version,
            "architectures": model.lm.config.architectures,
        }
        return web.json_response(info)

    async def server_info(self, _: web.Request) -> web.Response:
        # through the scheduler, as in SGLang: a hung one does not answer
        await self._ask(lambda: None)
        info = {
            "engine": "rlpipe-local",
            "version": __version__,
            "weight_version": self.scheduler.weight_version,
            "context_length": self.limits.context_tokens_max,
            "enable_deterministic_inference": True,
        }
        return web.json_response(info)

    async def loads(self, _: web.Request) -> web.Response:
        return web.json_response({"version": __version__, "loads": [await self._ask(self.scheduler.load)]})


class Wake:
    """An event of the loop that made it, which other threads set. It is sent once until it is
    cleared: each is a write to a socket, and many jobs end in a step.
    """

    def __init__(self) -> None:
        self._loop, self._event, self._is_sent = asyncio.get_running_loop(), asyncio.Event(), False

    def set(self) -> None:
        if not self._is_sent:
            self._is_sent = True
            self._loop.call_soon_threadsafe(self._event.set)

    async def wait(self) -> None:
        await self._event.wait()

    def clear(self) -> None:
        """What is looked at after this includes all that was set before."""
        self._event.clear()
        self._is_sent = False


async def _stream(request: web.Request, call: protocol.Call, ended: Wake, stream_s: float) -> web.StreamResponse:
    """Server-sent events: each job as soon as it ends, and the new tokens of the others every
    `stream_s`.
    """
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    num_said: dict[protocol.SamplingJob, int] = {}
    while not all(num_said.get(job) == -1 for job in call.jobs):
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(ended.wait(), stream_s)
        ended.clear()
        events = "".join(f"data: {json.dumps(event)}\n\n" for event in protocol.news(call, num_said))
        if events:
            await response.write(events.encode())
    await response.write(b"data: [DONE]\n\n")
    return response


async def _json(request: web.Request) -> Any:
    try:
        return json.loads(await request.read() or b"{}")
    except (ValueError, RecursionError) as error:  # RecursionError: a great many brackets
        raise protocol.BadRequest(f"the body is no JSON: {error}", "body") from error


def main(
    model_path: Annotated[str, typer.Option(help="Model folder in Hugging Face format.")],
    host: Annotated[
        str, typer.Option(help="Address to listen on; beyond this machine set RLPIPE_API_KEY.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on, 1 to 65535.")] = 30000,
    weight_version: Annotated[
        str, typer.Option(help="Version that answers carry until the weights are reloaded.")
    ] = "0",
    threads: Annotated[int, typer.Option(help=f"CPU threads, one of {THREADS}.")] = 1,
    context_tokens_max: Annotated[int, typer.Option(help="Longest prompt + completion, tokens.")] = 2048,
    requests_max: Annotated[int, typer.Option(help="Requests that come at once; fewer make a step faster.")] = 128,
    device: Annotated[Literal["cpu", "cuda"], typer.Option(help="Where the model computes.")] = "cpu",
    dtype: Annotated[Dtype, typer.Option(help="Number type of the forward pass.")] = "float32",
) -> None:
    """Serves a model over SGLang's HTTP protocol with rlpipe's own engine on transformers, until
    SIGTERM or SIGINT. Keys come from RLPIPE_API_KEY and RLPIPE_ADMIN_API_KEY of the environment.
    """
    if os.environ.get("RLPIPE_DIE_WITH_PARENT") == "1":
        die_with_parent()
    try:
        if not 0 < port < 65536:
            raise UserError(f"port={port}: must be between 1 and 65535")
        for name, value in (("context_tokens_max", context_tokens_max), ("requests_max", requests_max)):
            if value < 1:
                raise UserError(f"{name}={value}: must be at least 1")
        check_port_free("port", port)  # before the model is loaded
        if threads not in LOCAL_THREADS:
            raise UserError(
                f"threads={threads}: choose one of {LOCAL_THREADS}, so that results do not depend on the batch"
            )
        with lasting_objects():
            import torch

            from rlpipe.extras.local_engine.model import LocalModel
            from rlpipe.extras.local_engine.scheduler import Scheduler

        torch.set_num_threads(threads)
        with torch.inference_mode():
            model = LocalModel(model_path, device, requests_max, dtype)
        if context_tokens_max > model.positions_max:
            raise UserError(f"context_tokens_max={context_tokens_max}: this model has {model.positions_max} positions")
    except UserError as error:
        print(f"rlpipe engine: {error}", file=sys.stderr)
        raise SystemExit(2) from error
    limits = protocol.ModelLimits(model.vocab_size, context_tokens_max, model.eos_token_ids)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    threading.excepthook = end_process
    settle_heap()
    asyncio.run(_serve(Scheduler(model, weight_version, threads), limits, host, port))


def end_process(fault: threading.ExceptHookArgs) -> None:
    """Ends the process: a server without its scheduler would accept requests forever, while a dead
    one is seen and restarted.
    """
    threading.__excepthook__(fault)
    os._exit(1)


async def _serve(scheduler: Scheduler, limits: protocol.ModelLimits, host: str, port: int) -> None:
    thread = threading.Thread(target=scheduler.run, name="scheduler", daemon=True)
    thread.start()
    keys = (os.environ.get("RLPIPE_API_KEY", ""), os.environ.get("RLPIPE_ADMIN_API_KEY", ""))
    # whoever serves people wants tokens as they come (rlpipe/extras/serve/policy.py)
    routes = Routes(scheduler, limits, *keys, float(os.environ.get("RLPIPE_STREAM_S", STREAM_S)))
    runner = web.AppRunner(routes.app(), access_log=None, handler_cancellation=True, shutdown_timeout=SHUTDOWN_S)
    await runner.setup()
    await web.TCPSite(runner, host, port, backlog=BACKLOG).start()
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    print(f"serving {scheduler.model.folder} on http://{host}:{port}", flush=True)
    await stopped.wait()
    scheduler.ask(lambda: scheduler.abort(None))
    await runner.cleanup()
    scheduler.stop()
    await asyncio.to_thread(thread.join, SHUTDOWN_S)


# a pretty traceback would show the keys
app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
app.command()(main)

if __name__ == "__main__":
    app(prog_name="rlpipe engine")
