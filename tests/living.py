"""Looks at processes that may end in the middle of the look: such a one counts as ended.

A pid that exists is gone at the next line; psutil raises then (tests/project/test_deadlines.py
looks for some of its forms).
"""

from __future__ import annotations

import contextlib
import signal
import subprocess

import psutil

from tests.deadlines import DEADLINE_S, until


def is_alive(pid: int) -> bool:
    """A process that has ended and that nobody has waited for is not."""
    try:
        return psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False


def until_gone(pid: int) -> None:
    until(lambda: not is_alive(pid), f"{pid} lives on")


def words_of(process: psutil.Process) -> list[str]:
    """Its command line; no words when it has ended."""
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []


def descendants(parent: int | psutil.Process | subprocess.Popen[str], word: str) -> list[psutil.Process]:
    """The living descendants of a process, one of whose words holds `word`."""
    try:
        family = psutil.Process(parent if isinstance(parent, int) else parent.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []
    return [child for child in family if any(word in part for part in words_of(child))]


def signal_all(processes: list[psutil.Process], number: signal.Signals = signal.SIGKILL) -> None:
    """A signal to those that have not ended."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def until_all_gone(processes: list[psutil.Process]) -> None:
    """Until they have ended and are waited for."""
    _gone, alive = psutil.wait_procs(processes, timeout=DEADLINE_S)
    assert not alive, f"{alive} live on"
