"""SGLang's HTTP protocol in front of the scheduler: `python -m rlpipe.engines.local.server --model-path ... --port ...`."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import traceback
from typing import Annotated, Literal

import torch
import typer
from aiohttp import web

from rlpipe.config import LOCAL_THREADS
from rlpipe.engines.local.model import LocalModel
from rlpipe.engines.local.protocol import Job, Limits, settle
from rlpipe.engines.local.routes import Routes
from rlpipe.engines.local.scheduler import Scheduler
from rlpipe.launch import check_port_free, die_with_parent
from rlpipe.types import UserError

SHUTDOWN_S = 2.0
SWITCH_INTERVAL_S = 0.0005  # every torch call gives the GIL away; at the default 5 ms the model would wait for JSON


def main(
    model_path: Annotated[str, typer.Option(help="Folder in Hugging Face format.")],
    host: str = "127.0.0.1",
    port: int = 30000,
    weight_version: str = "0",
    threads: int = 1,
    context_tokens_max: int = 2048,
    requests_max: Annotated[int, typer.Option(help="Requests that come at once; fewer make a step faster.")] = 128,
    device: Literal["cpu", "cuda"] = "cpu",
) -> None:
    """Serves SGLang's protocol on transformers, until SIGTERM or SIGINT. Keys come from RLPIPE_API_KEY and RLPIPE_ADMIN_API_KEY."""
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
            raise UserError(f"threads={threads}: choose one of {LOCAL_THREADS}, so that results do not depend on the batch")
        torch.set_num_threads(threads)
        with torch.inference_mode():
            model = LocalModel(model_path, device, requests_max)
        if context_tokens_max > model.positions_max:
            raise UserError(f"context_tokens_max={context_tokens_max}: this model has {model.positions_max} positions")
    except UserError as error:
        print(f"rlpipe engine: {error}", file=sys.stderr)
        raise SystemExit(2) from error
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    threading.excepthook = _end_process
    asyncio.run(_serve(model, Limits(model.vocab_size, context_tokens_max, model.eos_token_ids), weight_version, host, port))


def _end_process(fault: threading.ExceptHookArgs) -> None:
    """A server without its scheduler would accept requests forever: better that it is seen dead and restarted."""
    traceback.print_exception(fault.exc_type, fault.exc_value, fault.exc_traceback)
    sys.stderr.flush()
    os._exit(1)


async def _serve(model: LocalModel, limits: Limits, weight_version: str, host: str, port: int) -> None:
    loop = asyncio.get_running_loop()

    def deliver(jobs: list[Job]) -> None:
        loop.call_soon_threadsafe(settle, jobs)

    scheduler = Scheduler(model, weight_version, torch.get_num_threads(), deliver)
    thread = threading.Thread(target=scheduler.run, name="scheduler", daemon=True)
    thread.start()
    keys = (os.environ.get(name, "") for name in ("RLPIPE_API_KEY", "RLPIPE_ADMIN_API_KEY"))
    routes = Routes(scheduler, limits, *keys)
    runner = web.AppRunner(routes.app(), access_log=None, handler_cancellation=True, shutdown_timeout=SHUTDOWN_S)
    await runner.setup()
    await web.TCPSite(runner, host, port).start()
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    print(f"serving {model.folder} on http://{host}:{port}", flush=True)
    await stopped.wait()
    scheduler.ask(lambda: scheduler.abort(None))
    await runner.cleanup()
    scheduler.stop()
    await asyncio.to_thread(thread.join, SHUTDOWN_S)


app = typer.Typer(
    add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False
)  # a pretty traceback would show the keys
app.command()(main)

if __name__ == "__main__":
    app()
