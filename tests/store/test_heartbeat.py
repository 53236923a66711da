"""A heartbeat beats for as long as its process lives and works, whatever
that process does, and not longer."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import psutil
import pytest

from rlpipe.store import lease
from rlpipe.store.backend import Store, open_store
from rlpipe.store.documents import read_document
from rlpipe.store.holder import Holder, this_process
from tests.deadlines import DEADLINE_S, until
from tests.living import descendants, until_gone

KEY = "runs/a/lease/000000.json"
BEGIN = """import ctypes, os, sys, time
from rlpipe.store import lease
from rlpipe.store.backend import open_store
lease.HEARTBEAT_S = 0.05
held = lease.acquire(open_store(sys.argv[1]), "runs/a")
while not held._heartbeat.holder.beats: time.sleep(0.01)
print(flush=True)
"""
# `PyDLL` keeps the interpreter's lock, as a library may: no thread of the process moves
WORKS = {
    "sleeps": "time.sleep(600)",
    "holds the lock": "ctypes.PyDLL(None).sleep(600)",
    "forked": "os.fork(); time.sleep(600)",
}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(f"file://{tmp_path}")


@contextlib.contextmanager
def holder_that(work: str, store: Store) -> Iterator[psutil.Process]:
    """A process that has the lease and has beaten, and then does this;
    `heartbeat_of` finds its heartbeat."""
    with subprocess.Popen(
        [sys.executable, "-c", BEGIN + work, store.url], stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            assert process.stdout and process.stdout.readline() == "\n"
            yield psutil.Process(process.pid)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def heartbeat_of(holder: psutil.Process) -> psutil.Process:
    (found,) = descendants(holder, "rlpipe.store.heartbeat")
    return found


def beats(store: Store) -> int:
    return read_document(store, KEY, Holder).beats


@pytest.mark.slow
@pytest.mark.parametrize("work", WORKS)
def test_it_beats_whatever_its_process_does_and_ends_with_it(work: str, store: Store) -> None:
    with holder_that(WORKS[work], store) as holder:
        before, heart = beats(store), heartbeat_of(holder)
        until(lambda: beats(store) >= before + 5)
        holder.kill()
        until_gone(heart.pid)
        last = beats(store)
        time.sleep(0.3)
        assert beats(store) == last, "a beat of the dead"


def test_it_stands_still_while_its_process_does(store: Store) -> None:
    with holder_that(WORKS["sleeps"], store) as holder:
        holder.suspend()
        before = beats(store) + 1  # one may be under way
        time.sleep(0.5)
        assert beats(store) <= before
        holder.resume()
        until(lambda: beats(store) > before)


def test_one_that_somebody_ended_is_started_again(store: Store) -> None:
    with holder_that(WORKS["sleeps"], store) as holder:
        first, before = heartbeat_of(holder), beats(store)
        first.kill()
        until(lambda: beats(store) > before + 1)
        assert heartbeat_of(holder).pid != first.pid


def test_a_lease_that_is_given_back_stays_so(store: Store) -> None:
    with holder_that("held.release()", store) as holder:
        heart = heartbeat_of(holder)
        until_gone(heart.pid)
        until(lambda: read_document(store, KEY, Holder).released)
        time.sleep(0.3)
        assert read_document(store, KEY, Holder).released


def test_one_that_is_told_to_end_before_it_begins_ends(store: Store) -> None:
    """A run that was given back while its heartbeat started waited ten seconds for it: the word was
    read along with the order, and not seen."""
    order = {
        "store": store.url,
        "key": KEY,
        "holder": asdict(this_process()),
        "every_s": 3600.0,
        "fence": "",
        "parent": os.getpid(),
    }
    with subprocess.Popen(
        [sys.executable, "-m", "rlpipe.store.heartbeat"], stdin=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        process.stdin.write(json.dumps(order) + "\nend\n")
        process.stdin.flush()
        try:
            assert process.wait(DEADLINE_S) == 0
        finally:
            process.kill()
    assert not store.exists(KEY)


def test_what_its_interpreter_prints_is_passed_over(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('hello'); print('{}'); print(1)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(lease, "HEARTBEAT_S", 0.05)
    held = lease.acquire(store, "runs/a")
    try:
        until(lambda: beats(store) > 1)
    finally:
        held.release()


def test_one_that_cannot_be_started_is_said_once_and_tried_again(
    store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(lease, "HEARTBEAT_S", 0.05)
    with monkeypatch.context() as broken, caplog.at_level(logging.WARNING):
        broken.setattr(sys, "executable", "/no/such/python")
        held = lease.acquire(store, "runs/a")
        until(lambda: "its heartbeat cannot work" in caplog.text)
        time.sleep(0.2)
    try:
        until(lambda: beats(store) > 1)
    finally:
        held.release()
    assert caplog.text.count("its heartbeat cannot work") == 1
