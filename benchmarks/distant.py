"""A server that answers from afar: a proxy on this machine that passes bytes on half a round trip
later, in each direction. Of benchmarks/iteration.py.

    .venv/bin/python benchmarks/distant.py LISTEN_PORT SERVER_PORT ROUND_TRIP_MS
"""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from urllib.parse import urlsplit, urlunsplit

from rlpipe.processes.launch import answers, free_port

CHUNK, READY_S = 1 << 16, 60.0


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, delay_s: float) -> None:
    """Writes what is read, each part `delay_s` after it came; parts do not wait for one another."""
    loop, parts = asyncio.get_running_loop(), asyncio.Queue[tuple[float, bytes]]()

    async def read() -> None:
        data = b"-"
        while data:
            data = await reader.read(CHUNK)
            parts.put_nowait((loop.time() + delay_s, data))

    reading = asyncio.create_task(read())
    with contextlib.suppress(OSError):
        while True:
            due, data = await parts.get()
            await asyncio.sleep(max(0.0, due - loop.time()))
            if not data:
                break
            writer.write(data)
            await writer.drain()
    reading.cancel()
    writer.close()


async def _serve(listen: int, server: int, delay_s: float) -> None:
    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", server)
        await asyncio.gather(_pass_on(reader, far_writer, delay_s), _pass_on(far_reader, writer, delay_s))

    async with await asyncio.start_server(connected, "127.0.0.1", listen) as proxy:
        await proxy.serve_forever()


@contextlib.contextmanager
def distant(url: str, round_trip_ms: float) -> Iterator[str]:
    """Yields an address at which the server of `url` answers `round_trip_ms` later, from a process
    of its own.
    """
    parts, port = urlsplit(url), free_port()
    assert parts.port is not None, f"{url} has no port"
    command = [sys.executable, __file__, str(port), str(parts.port), str(round_trip_ms)]
    address = urlunsplit(parts._replace(netloc=f"127.0.0.1:{port}"))
    proxy = subprocess.Popen(command)
    try:
        deadline_s = time.monotonic() + READY_S
        while not answers(f"{address}/health"):
            assert proxy.poll() is None and time.monotonic() < deadline_s, "the proxy does not answer"
        yield address
    finally:
        proxy.terminate()
        proxy.wait()


if __name__ == "__main__":
    listen, server = map(int, sys.argv[1:3])
    asyncio.run(_serve(listen, server, float(sys.argv[3]) / 2000))
