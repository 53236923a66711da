"""SGLang's HTTP protocol in front of the scheduler: `python -m rlpipe.engines.local.server --model-path ... --port ...`."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import traceback
from typing import Annotated

import torch
import typer
from aiohttp import web

from rlpipe.engines.local.auth import auth_middleware
from rlpipe.engines.local.model import LocalModel
from rlpipe.engines.local.options import EngineOptions
from rlpipe.engines.local.protocol import Job, Limits
from rlpipe.engines.local.routes import Routes
from rlpipe.engines.local.scheduler import Scheduler
from rlpipe.launch import check_port_free, die_with_parent
from rlpipe.types import UserError

BODY_BYTES_MAX = 1 << 30
SHUTDOWN_S = 2.0
SWITCH_INTERVAL_S = 0.0005  # every torch call gives the GIL away; at the default 5 ms the model would wait for JSON


def serve(options: EngineOptions) -> None:
    """Serves until SIGTERM or SIGINT. UserError for a model or port that cannot be used."""
    check_port_free("port", options.port)  # before the model is loaded
    if os.environ.get("RLPIPE_DIE_WITH_PARENT") == "1":
        die_with_parent()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    torch.set_num_threads(options.threads)
    with torch.inference_mode():
        model = LocalModel(options.model_path, options.device, options.requests_max)
    if options.context_tokens_max > model.positions_max:
        raise UserError(f"context_tokens_max={options.context_tokens_max}: this model has {model.positions_max} positions")
    threading.excepthook = _end_process
    asyncio.run(_serve(options, model))


def _end_process(fault: threading.ExceptHookArgs) -> None:
    """A server without its scheduler would accept requests forever: better that it is seen dead and restarted."""
    traceback.print_exception(fault.exc_type, fault.exc_value, fault.exc_traceback)
    sys.stderr.flush()
    os._exit(1)


async def _serve(options: EngineOptions, model: LocalModel) -> None:
    loop = asyncio.get_running_loop()
    routes = Routes(options, Limits(model.vocab_size, options.context_tokens_max, model.eos_token_ids))

    def deliver(jobs: list[Job]) -> None:
        loop.call_soon_threadsafe(routes.settle, jobs)

    routes.scheduler = Scheduler(model, options.weight_version, options.threads, deliver)
    thread = threading.Thread(target=routes.scheduler.run, name="scheduler", daemon=True)
    thread.start()
    app = web.Application(client_max_size=BODY_BYTES_MAX, middlewares=[auth_middleware(options.api_key, options.admin_api_key)])
    routes.add_to(app)
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=SHUTDOWN_S)
    await runner.setup()
    await web.TCPSite(runner, options.host, options.port).start()
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    print(f"serving {options.model_path} on http://{options.host}:{options.port}", flush=True)
    await stopped.wait()
    scheduler = routes.scheduler
    scheduler.ask(lambda: scheduler.abort(None))
    await runner.cleanup()
    scheduler.stop()
    await asyncio.to_thread(thread.join, SHUTDOWN_S)


def main(
    model_path: Annotated[str, typer.Option(help="Folder in Hugging Face format.")],
    host: str = "127.0.0.1",
    port: int = 30000,
    weight_version: str = "0",
    threads: int = 1,
    context_tokens_max: int = 2048,
    requests_max: Annotated[int, typer.Option(help="Requests that come at once; fewer make a step faster.")] = 128,
    device: str = "cpu",
) -> None:
    """Serves SGLang's protocol on transformers. Keys come from RLPIPE_API_KEY and RLPIPE_ADMIN_API_KEY."""
    keys = {name: os.environ.get(f"RLPIPE_{name.upper()}") or None for name in ("api_key", "admin_api_key")}
    try:
        serve(
            EngineOptions(
                model_path=model_path,
                host=host,
                port=port,
                weight_version=weight_version,
                threads=threads,
                context_tokens_max=context_tokens_max,
                requests_max=requests_max,
                device=device,
                **keys,
            )
        )
    except UserError as error:
        print(f"rlpipe engine: {error}", file=sys.stderr)
        raise SystemExit(2) from error


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)  # a pretty traceback would show the keys
    app.command()(main)
    app()
