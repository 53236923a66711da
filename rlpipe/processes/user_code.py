"""A user's code: found by its path, run so that whatever it raises is one exception of ours, and
served by a process of its own.

Such a process, in which it may crash, print or never return, answers its owner (`pool`) in JSON
lines.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import contextmanager
from functools import partial
from types import ModuleType, TracebackType
from typing import Any, BinaryIO, TypeVar

from rlpipe.base.errors import UserError
from rlpipe.base.futures import settle
from rlpipe.processes.kernel import adopt_orphans, kill_descendants, leave_rights, seclude, thread_ids, work_of

MESSAGE_CHARS_MAX = 1000
# an import that does nothing for so long hangs; libraries wait 10 s for a hub that does not answer
IDLE_S = 15.0
IDLE_CPU_S = 0.005
OWNER_POLL_S = 0.5
ORPHAN_GRACE_S = 3.0  # after its owner's deadline, the kernel ends code that never returns

Record = Mapping[str, object]  # what JSON can carry
# what the owner learns when it is ready, and what answers its requests, which have
# the fields that their module says
Loaded = tuple[Record, Callable[[Any], Record]]

T = TypeVar("T")


class CodeRaised(Exception):
    """A user's code raised: the message says what, and where."""


class InvalidAnswer(Exception):
    """A user's code, or a service, gave an answer that cannot be used."""


@contextmanager
def user_code() -> Iterator[None]:
    """For code that is not ours: whatever it raises is CodeRaised;
    an InvalidAnswer of ours passes."""
    try:
        yield
    except InvalidAnswer:
        raise
    except (Exception, SystemExit) as error:  # a user's code may raise anything
        places = traceback.extract_tb(error.__traceback__)
        place = next((place for place in reversed(places) if place.filename != __file__), places[-1])
        message = f"{type(error).__name__}: {str(error)[:MESSAGE_CHARS_MAX]} ({place.filename}:{place.lineno})"
        raise CodeRaised(message) from error


def cause_of(error: CodeRaised, what: str) -> str:
    """One line: what a UserError of ours says, else `what` and what was raised."""
    text = str(error.__cause__) if isinstance(error.__cause__, UserError) else f"{what}: {error}"
    return " ".join(text.split())[:MESSAGE_CHARS_MAX]


def _import(name: str) -> ModuleType:
    """Imports a module; TimeoutError where it waits.

    The main thread, in which a process that runs a user's code loads it, is interrupted. For any
    other (preflight's, in a flow) a thread imports that is left behind when it waits: nobody can
    interrupt it.
    """
    if threading.current_thread() is threading.main_thread():
        with _alarms(_idle_check(thread_ids() - {threading.get_native_id()})):
            return importlib.import_module(name)
    loaded: Future[ModuleType] = Future()
    load = partial(settle, loaded, partial(importlib.import_module, name))
    thread = threading.Thread(target=load, daemon=True, name=f"import {name}")
    check = _idle_check(thread_ids())
    thread.start()
    while wait([loaded], IDLE_S / 15).not_done:
        try:
            check()
        except TimeoutError as error:
            if (frame := sys._current_frames().get(thread.ident or 0)) is not None:
                raise error.with_traceback(TracebackType(None, frame, frame.f_lasti, frame.f_lineno)) from None
    return loaded.result()


def _idle_check(others: set[int]) -> Callable[..., None]:
    """Returns a check, to call every now and then. It raises TimeoutError once code has waited: for
    IDLE_S no thread but the `others` used processor time, none of them has a child process that was
    not there before, and no module was added."""
    num_modules, cpu_s, since_s, before = 0, 0.0, time.monotonic(), work_of(thread_ids() - others).children

    def check(*_: object) -> None:
        nonlocal num_modules, cpu_s, since_s
        work = work_of(thread_ids() - others)
        # less: of a thread that has ended
        works = len(sys.modules) != num_modules or abs(work.cpu_s - cpu_s) > IDLE_CPU_S
        if works or work.children - before:
            num_modules, cpu_s, since_s = len(sys.modules), work.cpu_s, time.monotonic()
        elif time.monotonic() > since_s + IDLE_S:
            raise TimeoutError(f"it has waited for {IDLE_S:g} s")

    return check


@contextmanager
def _alarms(check: Callable[..., None]) -> Iterator[None]:
    """Calls `check` in the main thread, again and again."""
    before = signal.signal(signal.SIGALRM, check)
    signal.setitimer(signal.ITIMER_REAL, IDLE_S / 15, IDLE_S / 15)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before or signal.SIG_DFL)


def load_function(field: str, path: str) -> Callable[..., Any]:
    """The function at `path`; the working directory is importable.

    UserError names `field` and what was tried.
    """
    module_name, colon, function_name = path.partition(":")
    if not (colon and module_name and function_name):
        raise UserError(f"{field}: {path!r} is no path; write it as package.module:function")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        with user_code():  # importing runs the module
            module = _import(module_name)
    except CodeRaised as error:
        raise UserError(
            f"{field}: {path!r} does not import ({error}); tried module {module_name!r} from {os.getcwd()} and the"
            " installed packages"
        ) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        what = "has no" if function is None else "has something that cannot be called named"
        raise UserError(
            f"{field}: {path!r}: {module.__file__} {what} {function_name!r}; write it as package.module:function"
        )
    return function


def serve(load: Callable[[Any], Loaded]) -> None:
    """The life of a process that runs a user's code, until its stdin closes.

    `load` gets the owner's first request; UserError when the code cannot be loaded.
    """
    requests, answers = take_pipes()
    answer = greeted(requests, answers, load)
    if answer is None:
        return
    for line in requests:
        message = json.loads(line)
        # if the owner is gone too, the kernel ends code that never
        # returns, even when it holds the GIL
        signal.setitimer(signal.ITIMER_REAL, message["timeout_s"] + ORPHAN_GRACE_S)
        value = answer(message["request"])
        signal.setitimer(signal.ITIMER_REAL, 0)
        _send(answers, value)
    kill_descendants(os.getpid())


def take_pipes() -> tuple[BinaryIO, BinaryIO]:
    """The pipes (from, to) the owner, out of reach of code that prints or reads: it gets stderr and
    an empty stdin. From here on the code cannot read what other processes have in their
    environment, where the kernel can see to that (`kernel.seclude`).
    """
    seclude()
    adopt_orphans()
    end_with_owner()
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.close(empty)
    os.dup2(2, 1)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    return requests, answers


def end_with_owner() -> None:
    """Kills this process and all that it started when the owner ends, however that ended."""
    owner = os.getppid()

    def watch() -> None:
        while os.getppid() == owner:
            time.sleep(OWNER_POLL_S)
        kill_descendants(os.getpid())
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, daemon=True, name="end-with-owner").start()


def greeted(requests: BinaryIO, answers: BinaryIO, load: Callable[[Any], tuple[Record, T]]) -> T | None:
    """Returns the object that `load` makes of the owner's first request, once the owner was told
    that it is ready; None, once the owner was told the error, when it cannot be loaded."""
    hello = json.loads(requests.readline())["request"]
    if not hello.get("may_mount"):
        leave_rights()
    try:
        ready, loaded = load(hello)
    except UserError as error:
        _send(answers, {"error": str(error)})
        return None
    _send(answers, ready)
    return loaded


def _send(answers: BinaryIO, value: Record) -> None:
    answers.write(json.dumps(value).encode() + b"\n")
    answers.flush()
