"""Runs a user's code: finds it by its path, turns any exception of it into one type of ours, and
serves it in a process of its own.

Such a process, in which the code may crash, print or never return, answers its owner (`worker`) in
JSON lines.
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
from rlpipe.config.extras import MOVED
from rlpipe.processes.away import is_outage
from rlpipe.processes.kernel import adopt_orphans, kill_descendants, leave_rights, seclude, thread_ids, work_of

MESSAGE_CHARS_MAX = 1000
# an import that is idle for so long hangs; libraries wait 10 s for a hub that does not answer
IDLE_S = 15.0
IDLE_CPU_S = 0.005
OWNER_POLL_S = 0.5
ORPHAN_GRACE_S = 3.0  # the kernel kills code that never returns so long after its owner's deadline

Record = Mapping[str, object]  # a JSON object
# the message to the owner when it is ready, and the function that answers its requests, whose
# fields the module defines
Loaded = tuple[Record, Callable[[Any], Record]]

T = TypeVar("T")


class CodeRaised(Exception):
    """A user's code raised an exception; the message has the exception and its place."""


class CodeLacks(CodeRaised):
    """A user's code raised because something that it needs is away: a connection failed, or a
    service answered 429 or 5xx.
    """


class InvalidAnswer(Exception):
    """A user's code, or a service, gave an invalid answer."""


@contextmanager
def user_code() -> Iterator[None]:
    """A context for a user's code: turns every exception into CodeRaised, or CodeLacks; except our
    own InvalidAnswer.
    """
    try:
        yield
    except InvalidAnswer:
        raise
    except (Exception, SystemExit) as error:  # a user's code may raise any of these
        places = traceback.extract_tb(error.__traceback__)
        place = next((place for place in reversed(places) if place.filename != __file__), places[-1])
        message = f"{type(error).__name__}: {str(error)[:MESSAGE_CHARS_MAX]} ({place.filename}:{place.lineno})"
        raise (CodeLacks if is_outage(error) else CodeRaised)(message) from error


def cause_of(error: CodeRaised, what: str) -> str:
    """Describes an exception in one line: the message of our own UserError, else `what` and the
    exception.
    """
    text = str(error.__cause__) if isinstance(error.__cause__, UserError) else f"{what}: {error}"
    return " ".join(text.split())[:MESSAGE_CHARS_MAX]


def _import(name: str) -> ModuleType:
    """Imports a module. TimeoutError when the import hangs.

    In the main thread (in which a process loads a user's code) the import is interrupted. For any
    other thread (preflight's, in a flow) a helper thread imports, which cannot be interrupted and
    is abandoned when it hangs.
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
    """Returns a check to be called regularly. It raises TimeoutError once the code was idle for
    IDLE_S: no thread other than the `others` used processor time or has a new child process, and no
    module was added.
    """
    num_modules, cpu_s, since_s, before = 0, 0.0, time.monotonic(), work_of(thread_ids() - others).children

    def check(*_: object) -> None:
        nonlocal num_modules, cpu_s, since_s
        work = work_of(thread_ids() - others)
        # abs: it may fall when a thread ends
        works = len(sys.modules) != num_modules or abs(work.cpu_s - cpu_s) > IDLE_CPU_S
        if works or work.children - before:
            num_modules, cpu_s, since_s = len(sys.modules), work.cpu_s, time.monotonic()
        elif time.monotonic() > since_s + IDLE_S:
            raise TimeoutError(f"it has waited for {IDLE_S:g} s")

    return check


@contextmanager
def _alarms(check: Callable[..., None]) -> Iterator[None]:
    """Calls `check` in the main thread regularly within the body."""
    before = signal.signal(signal.SIGALRM, check)
    signal.setitimer(signal.ITIMER_REAL, IDLE_S / 15, IDLE_S / 15)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before or signal.SIG_DFL)


def load_function(field: str, path: str) -> Callable[..., Any]:
    """Loads the function at `path`; the working directory is importable.

    UserError names `field` and what was tried to find it.
    """
    module_name, colon, function_name = path.partition(":")
    if not (colon and module_name and function_name):
        raise UserError(f"{field}: {path!r} is no path; write it as package.module:function")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        with user_code():  # an import runs the module's code
            module = _import(MOVED.get(module_name, module_name))
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
    """Runs the loop of a process with a user's code, until its stdin closes.

    `load`: gets the owner's first request; raises UserError when the code cannot be loaded.
    """
    requests, answers = take_pipes()
    answer = greeted(requests, answers, load)
    if answer is None:
        return
    for line in requests:
        message = json.loads(line)
        # if the owner has ended, too, the kernel kills code that never returns, even when it holds
        # the GIL
        signal.setitimer(signal.ITIMER_REAL, message["timeout_s"] + ORPHAN_GRACE_S)
        value = answer(message["request"])
        signal.setitimer(signal.ITIMER_REAL, 0)
        _send(answers, {**value, "key": message["key"]})
    kill_descendants(os.getpid())


def take_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Takes over the pipes (from, to) the owner, so that code that prints or reads does not disturb
    them: its stdout is stderr, and its stdin is empty. The code can then no longer read the
    environment of other processes, where the kernel supports that (`kernel.seclude`).
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
    """Makes this process and its descendants die when the owner ends in any way."""
    owner = os.getppid()

    def watch() -> None:
        while os.getppid() == owner:
            time.sleep(OWNER_POLL_S)
        kill_descendants(os.getpid())
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, daemon=True, name="end-with-owner").start()


def greeted(requests: BinaryIO, answers: BinaryIO, load: Callable[[Any], tuple[Record, T]]) -> T | None:
    """Loads the object that `load` makes of the owner's first request, tells the owner that it is
    ready, and returns it. When it cannot be loaded, sends the owner the error and returns None.
    """
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
