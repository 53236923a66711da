"""A process that runs a user's code: how it starts, is written to and read from in an event loop,
and ends with all that it has started.
"""

from __future__ import annotations

import asyncio
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from rlpipe.processes.kernel import kill_descendants
from rlpipe.processes.launch import signal_group
from rlpipe.processes.lines import LineReader, line_of
from rlpipe.processes.printed import Printed
from rlpipe.processes.user_code import Record

END_S, END_POLL_S = 2.0, 0.01


class ChildProcess:
    """`python -m <module>`, as a child of a keeper, with JSON lines to and from it. Belongs to one
    event loop.
    """

    def __init__(self, name: str, module: str, environment: Mapping[str, str]) -> None:
        """Starts it; its output is logged under `name`."""
        self.keeper = subprocess.Popen(
            [sys.executable, "-m", "rlpipe.processes.keeper", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            env=environment,
            start_new_session=True,  # so a kill reaches children of the code, too
        )
        assert self.keeper.stdout is not None and self.keeper.stderr is not None
        # only the thread of Printed reads and closes it
        self._printed, self.keeper.stderr = Printed(name, self.keeper.stderr), None
        self._answers = self.keeper.stdout
        # when the process has closed its pipe, or has written something other than a message
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._pipes: list[asyncio.ReadTransport | asyncio.WriteTransport] = []

    async def open(self, on_message: Callable[[Any], None]) -> None:
        """Connects the pipes; `on_message` gets each message, and raises ValueError for one that
        cannot be.
        """
        loop = asyncio.get_running_loop()
        self._reader = LineReader(on_message, self.leave)
        self._writing, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, self.keeper.stdin)
        self._pipes.append(self._writing)
        reading, _ = await loop.connect_read_pipe(lambda: self._reader, self._answers)
        self._pipes.append(reading)

    def write(self, message: Record) -> None:
        """Sends a message, as soon as the process reads it."""
        self._writing.write(line_of(message))

    def leave(self) -> None:
        """Lets those that wait for `ended` go on."""
        if not self.ended.done():
            self.ended.set_result(None)

    @property
    def fault(self) -> str:
        """The reason why the process is of no use any more."""
        return self._reader.fault or "its process died"

    @property
    def has_unread(self) -> bool:
        """True when bytes wait to be read: then this process was stopped, or had no CPU time."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._answers, selectors.EVENT_READ)
            return bool(selector.select(0))

    @property
    def has_ended(self) -> bool:
        """True when the process has ended, also where a child of its own holds the pipe open."""
        return has_ended(self.keeper)

    async def end(self, *, by_itself: bool) -> int:
        """Ends the process and its children, and returns its exit code; `by_itself`: once it has
        ended, END_S at most.
        """
        for pipe in self._pipes:  # nothing that it still writes is read
            if not pipe.is_closing():
                pipe.abort() if isinstance(pipe, asyncio.WriteTransport) else pipe.close()
        return await asyncio.to_thread(self._end, by_itself)

    def _end(self, by_itself: bool) -> int:
        if by_itself:
            wait_for_end(self.keeper)
        kill(self.keeper)
        code = self.keeper.wait()
        self._printed.wait()
        return code


def kill(process: subprocess.Popen[bytes]) -> None:
    """Kills the process, its keeper and all their descendants, in any session, also if one of the
    two was killed from outside.
    """
    if process.returncode is None:  # once it is reaped, another process may have the pid
        signal_group(process, signal.SIGSTOP)  # so that it starts no other process meanwhile
        kill_descendants(process.pid)
        signal_group(process, signal.SIGKILL)


def has_ended(process: subprocess.Popen[bytes]) -> bool:
    """True when the process has ended. Does not reap it: until then its process group stays its
    own, so that a kill reaches its children.
    """
    if process.returncode is not None:
        return True
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def wait_for_end(process: subprocess.Popen[bytes]) -> None:
    """Waits until a process that closed its pipes has ended, END_S at most: its keeper gets the
    exit status a moment later.
    """
    deadline_s = time.monotonic() + END_S
    while not has_ended(process) and time.monotonic() < deadline_s:
        time.sleep(END_POLL_S)
