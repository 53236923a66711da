"""Runs a module with a user's code as a child process, and ends with it. It then kills all
processes that the code started, also if only the child was killed from outside (by the kernel, for
memory). `python -m rlpipe.processes.keeper MODULE`.
"""

from __future__ import annotations

import os
import resource
import runpy
import signal
import sys

from rlpipe.processes.kernel import adopt_orphans, kill_descendants
from rlpipe.processes.user_code import end_with_owner


def main(module: str) -> None:
    adopt_orphans()
    child = os.fork()
    if not child:
        sys.argv = sys.argv[1:]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        return
    nothing = os.open(os.devnull, os.O_RDWR)
    # only the child keeps the pipes, so that its owner sees them close when it ends
    for pipe in (0, 1):
        os.dup2(nothing, pipe)
    end_with_owner()
    ended, status = 0, 0
    while ended != child:  # others are orphans of the child
        ended, status = os.wait()
    kill_descendants(os.getpid())
    _end_like(status)


def _end_like(status: int) -> None:
    """Ends this process with the exit status of another one."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if number not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    main(sys.argv[1])
