"""`rlpipe` as processes in a folder of their own, on a machine where it is not
installed but found on the path."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from rlpipe.store.backend import open_store

ROOT = Path(__file__).parent.parent
DEADLINE_S = 3600.0


@dataclass(frozen=True)
class Commands:
    """They write into `folder`: a store, a log, Prefect's home."""

    folder: Path

    @property
    def store(self) -> str:
        return f"{self.folder}/store"

    def start(self, *arguments: str) -> subprocess.Popen[bytes]:
        """`rlpipe ARGUMENTS` in a process group of its own."""
        environment = {
            **os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path[1:]]),
            "PREFECT_HOME": str(self.folder / "prefect")
        }  # fmt: skip
        with (self.folder / "output.log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "flows.cli", *arguments],
                cwd=self.folder, env=environment, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip

    @contextmanager
    def running(self, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
        """A process that is killed with all that it started, however this ends."""
        process = self.start(*arguments)
        try:
            yield process
        finally:
            kill(process)

    def complete(self, *arguments: str) -> float:
        """Seconds that it took; SystemExit with the end of the log when it failed."""
        began = time.monotonic()
        with self.running(*arguments) as process:
            if process.wait(timeout=DEADLINE_S) != 0:
                raise self.fail(f"rlpipe {' '.join(arguments[:4])} failed")
        return time.monotonic() - began

    def until_committed(self, flow: subprocess.Popen[bytes], key: str) -> None:
        """Returns when the store has the key; SystemExit when the flow
        ends, or the time is up, first."""
        store, deadline = open_store(self.store), time.monotonic() + DEADLINE_S
        while not store.exists(key):
            if flow.poll() is not None or time.monotonic() > deadline:
                raise self.fail(f"{key} was not committed")
            time.sleep(0.2)

    def fail(self, what: str) -> SystemExit:
        """What ends this with the end of the log."""
        log = self.folder / "output.log"
        return SystemExit(f"{what}; the log: {log}\n{log.read_text()[-3000:]}")


def kill(process: subprocess.Popen[bytes]) -> None:
    """SIGKILL to a process and to all that it started, whatever their sessions, as
    a machine that loses its power."""
    if process.poll() is None:
        family = psutil.Process(process.pid).children(recursive=True)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for each in family:
            with suppress(psutil.NoSuchProcess):
                each.kill()
