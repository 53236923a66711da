"""Child processes: no orphan, a bounded number of restarts, a taken port said so."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from rlpipe.base.errors import UserError
from rlpipe.processes import launch
from rlpipe.processes.launch import Service, check_port_free, free_port, wrapped
from tests.deadlines import DEADLINE_S, until
from tests.living import until_gone


def test_a_port_for_a_server_is_none_of_a_connection_s_and_none_that_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    every, ports = launch.PORTS, [free_port() for _ in range(200)]
    assert len({*ports}) == 200 and max(ports) < int(launch.CONNECTION_PORTS.read_text().split()[0])
    # SGLang 0.5.23 derives seven more of its port where attention is divided:
    # those of two engines do not meet
    taken_too = [each for port in ports[:20] for each in (port, *range(port + 233, port + 240))]
    assert len({*taken_too}) == len(taken_too)
    # somebody else has ten, at one address or at all
    monkeypatch.setattr(launch, "PORTS", range(min(ports), min(ports) + 20))
    with contextlib.ExitStack() as others:
        taken = []
        for port in range(min(ports), min(ports) + 10):
            with contextlib.suppress(OSError):
                others.enter_context(socket.create_server(("127.0.0.1" if port % 2 else "", port)))
            taken.append(port)
        assert not {*taken} & {free_port() for _ in range(30)}
    # a system of another range, of all ports; what Kubernetes takes is never given
    for first, given in (
        (14_000, range(10_000, 14_000)),
        (32_768, range(10_000, 30_000)),
        (1_024, range(10_000, 30_000)),
    ):
        (tmp_path / "range").write_text(f"{first}\t60999\n")
        with monkeypatch.context() as system:
            system.setattr(launch, "PORTS", every)
            system.setattr(launch, "CONNECTION_PORTS", tmp_path / "range")
            assert all(free_port() in given for _ in range(50))
    monkeypatch.setattr(launch, "PORTS", range(ports[-1], ports[-1] + 1))
    with socket.create_server(("127.0.0.1", ports[-1])), pytest.raises(OSError, match="no TCP port from"):
        free_port()


def start_parent_of(child_argv: list[str]) -> tuple[subprocess.Popen[str], int]:
    """A process with one child in a session of its own, which has said something; returns both."""
    program = (
        "import subprocess, sys, time\n"
        f"child = subprocess.Popen({child_argv!r}, start_new_session=True)\n"
        "print(child.pid, flush=True)\ntime.sleep(600)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    parent.stdout.readline()
    parent.stdout.close()
    return parent, pid


def test_a_service_dies_with_a_parent_that_was_killed() -> None:
    child = (
        "from rlpipe.processes.launch import die_with_parent; import time; die_with_parent(); print('watching', "
        "flush=True); time.sleep(600)"
    )
    parent, pid = start_parent_of([sys.executable, "-c", child])
    parent.kill()
    parent.wait(timeout=DEADLINE_S)
    until_gone(pid)


def test_a_foreign_program_and_its_children_die_with_the_wrapper_s_parent() -> None:
    parent, pid = start_parent_of(wrapped(["sh", "-c", "sleep 600 & echo begun; sleep 600"]))
    family = [process.pid for process in psutil.Process(pid).children(recursive=True)]
    assert len(family) >= 2
    parent.kill()
    parent.wait(timeout=DEADLINE_S)
    for each in [pid, *family]:
        until_gone(each)


def service(tmp_path: Path, program: str, **options: object) -> Service:
    return Service("thing", [sys.executable, "-c", program], tmp_path / "thing.log", lambda: True, **options)  # type: ignore[arg-type]


def test_a_killed_service_is_restarted_until_the_budget_is_spent(tmp_path: Path) -> None:
    thing = service(tmp_path, "import time; time.sleep(600)", restarts_max=2)
    thing.start()
    for _ in range(2):
        assert not thing.ensure()
        assert thing.process is not None
        os.kill(thing.process.pid, signal.SIGKILL)
        thing.process.wait(timeout=DEADLINE_S)
        assert thing.ensure()
    assert thing.process is not None
    thing.process.kill()
    thing.process.wait(timeout=DEADLINE_S)
    with pytest.raises(RuntimeError, match="ended 3 times"):
        thing.ensure()


def test_a_service_that_ends_while_starting_shows_the_end_of_its_log(tmp_path: Path) -> None:
    thing = service(tmp_path, "raise SystemExit('no such model')")
    thing.ready = lambda: False
    thing.start()
    with pytest.raises(RuntimeError, match="no such model"):
        thing.wait_ready()


def test_a_service_has_the_time_to_start_that_it_needs(tmp_path: Path) -> None:
    thing = service(tmp_path, "import time; time.sleep(600)", ready_timeout_s=0.2)  # short: it is given up
    thing.ready = lambda: False
    thing.start()
    with pytest.raises(RuntimeError, match=r"was not ready after 0\.2 s"):
        thing.wait_ready()
    thing.stop()


def test_a_process_that_boots_for_long_is_said_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("rlpipe.processes.launch.SAY_S", 0.01)
    thing = service(tmp_path, "import time; time.sleep(600)")
    thing.ready = lambda: len(caplog.messages) == 2
    thing.start()
    thing.wait_ready()
    thing.stop()
    assert all(
        re.search(r"thing has been starting for \d+ s \(limit 600 s\); its log: ", said) for said in caplog.messages
    )


def test_stop_ends_a_service_that_ignores_sigterm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlpipe.processes.launch.STOP_GRACE_S", 1.0)
    thing = service(tmp_path, "import signal, time; signal.signal(15, 1); print('deaf', flush=True); time.sleep(600)")
    thing.start()
    until(lambda: "deaf" in (tmp_path / "thing.log").read_text())
    thing.stop()
    assert not thing.alive()


def test_a_taken_port_names_the_field() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(UserError, match=r"port=\d+: the port is taken"):
            check_port_free("port", taken.getsockname()[1])
    check_port_free("port", free_port())


def test_as_many_files_may_be_open_as_the_system_allows() -> None:
    """Also by the processes that are started; a shell's usual 1,024 would not
    hold the sockets of a large pool."""
    program = (
        "import resource, subprocess, sys; from rlpipe.processes.launch import raise_file_limit\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (100, 5000)); raise_file_limit(); raise_file_limit()\n"
        "print(subprocess.run(['sh', '-c', 'ulimit -n; ulimit -Hn'], capture_output=True, text=True).stdout.split())"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=DEADLINE_S, check=True
    )
    assert ended.stdout.strip() == "['5000', '5000']"
