"""The Prefect server of a run starts beside its preflight, and leaves nothing of a refused run."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path

import psutil
import pytest

from flows import PRESETS, early_server, server
from flows.database import copy_template, creating, delete_unused, files_of, keep_template, template, using
from flows.early_server import EarlyServer, server_beside
from flows.server import OwnServer
from rlpipe.config.pipeline import PipelineConfig
from rlpipe.config.source import read_config
from tests.deadlines import DEADLINE_S, until
from tests.living import words_of
from tests.pipeline import BIN

# data that ends the preflight when there is a file `go`, with a fault
REFUSED_LATE = """
import os, time
def rows(**_):
    while not os.path.exists("go"):
        time.sleep(0.05)
    return []
"""
CONFIG = """
sft = { num_steps = 0 }
rl = { rewards = { exact = 1.0 } }
[[data]]
name = "none"
use = "rl"
source = "refused_late:rows"
"""


def servers(folder: Path) -> list[psutil.Process]:
    """The Prefect servers that were started in a folder."""
    found = []
    for process in psutil.process_iter():
        try:
            if "flows.prefect_server" in words_of(process) and process.cwd() == str(folder):
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


@contextmanager
def started(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """`rlpipe run` in its preflight, which a file `go` ends, with a server beside it."""
    (folder / "refused_late.py").write_text(REFUSED_LATE)
    (folder / "late.toml").write_text(CONFIG)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    process = subprocess.Popen(
        [str(BIN / "rlpipe"), "run", "late.toml", "--run", "a"],
        cwd=folder, env=environment | {"HOME": str(folder / "home")}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        # the tests may run in the background of a shell, which lets all ignore it
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    try:
        until(lambda: servers(folder), running=process)
        yield process
    finally:
        process.kill()
        process.communicate()


def test_a_refused_run_ends_the_server_that_was_started_beside_its_preflight(tmp_path: Path) -> None:
    with started(tmp_path) as process:
        until(lambda: list((tmp_path / ".rlpipe").glob("prefect/*.db")))
        (tmp_path / "go").touch()
        _, said = process.communicate(timeout=DEADLINE_S)
        assert process.returncode == 2, said
        # a busy machine hears of the server that takes long
        (line,) = (line for line in said.splitlines() if "has been starting for" not in line)
        assert "refused_late:rows" in line
    assert not servers(tmp_path)
    assert not (tmp_path / ".rlpipe").exists()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_run_that_is_ended_in_its_preflight_leaves_no_server(tmp_path: Path, number: int) -> None:
    with started(tmp_path) as process:
        process.send_signal(number)
        process.wait(timeout=DEADLINE_S)
        until(lambda: not servers(tmp_path))


def see_database(server: OwnServer) -> None:
    """In the place of a start."""
    server.has_new_database = server.database is not None and not server.database.exists()


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PipelineConfig:
    """A config in an empty folder, of a user without settings of Prefect."""
    for name in [name for name in os.environ if name.startswith("PREFECT_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(early_server.OwnServer, "start", see_database)
    return read_config("tiny", ["run=a", "store=store", "scratch=scratch"], PRESETS)


def test_no_server_is_started_early_where_the_user_may_have_named_one(
    config: PipelineConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert EarlyServer(config).server is not None
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "mine"\n')
    assert EarlyServer(config).server is not None
    profiles = tmp_path / "home" / ".prefect" / "profiles.toml"
    profiles.parent.mkdir(parents=True)
    profiles.write_text('active = "mine"\n[profiles.mine]\nPREFECT_API_URL = "http://127.0.0.1:1/api"\n')
    assert EarlyServer(config).server is None
    profiles.write_text('active = "ephemeral"\n[profiles.ephemeral]\nPREFECT_SERVER_ALLOW_EPHEMERAL_MODE = "true"\n')
    assert EarlyServer(config).server is not None
    (tmp_path / "pyproject.toml").write_text('[tool.prefect.api]\nurl = "http://127.0.0.1:1/api"\n')
    assert EarlyServer(config).server is None
    (tmp_path / "pyproject.toml").unlink()
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:1/api")
    assert EarlyServer(config).server is None


def test_a_server_with_another_database_than_the_user_named_is_not_taken(config: PipelineConfig) -> None:
    with server_beside(config) as early:
        assert early.server is not None and early.server.has_new_database
        assert early.take(None) is None
    with server_beside(config) as early:
        assert early.server is not None
        taken = early.take(early.server.database)
        assert taken is not None
        assert early.server is None


def test_what_was_there_before_a_refused_run_stays(config: PipelineConfig) -> None:
    with server_beside(config) as early:
        assert early.server is not None
        database = early.server.database
    assert database is not None
    database.parent.mkdir(parents=True)
    for file in files_of(database):
        file.touch()
    (database.parent / "another.db").touch()
    with server_beside(config) as early:
        assert early.server is not None and not early.server.has_new_database
    assert all(file.exists() for file in files_of(database))


def test_a_new_database_is_deleted_unless_another_server_uses_it(tmp_path: Path) -> None:
    database = tmp_path / "prefect" / "a.db"
    with using(database):
        database.touch()
        delete_unused(database)
        assert database.exists()
        with using(database), creating(database):  # as the servers of two runs
            pass
    (tmp_path / "prefect" / "b.db").touch()
    delete_unused(database)
    assert [path.name for path in database.parent.iterdir()] == ["b.db"]
    (tmp_path / "prefect" / "b.db").unlink()
    delete_unused(database)
    assert not database.parent.exists()
    delete_unused(database)  # nothing is there


def tables(database: Path) -> set[str]:
    with closing(sqlite3.connect(database)) as opened:
        return {name for (name,) in opened.execute("SELECT name FROM sqlite_master")}


def test_a_users_second_database_is_a_copy_of_the_first_before_it_had_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    first, second = (OwnServer(tmp_path / name, tmp_path / name / "a.db") for name in ("a", "b"))
    for own in (first, second):
        try:
            own.start()
            own.wait_ready()
        finally:
            own.stop()
    assert first.makes_tables and second.has_new_database and not second.makes_tables
    assert "flow_run" in tables(template())
    assert tables(tmp_path / "b" / "a.db") == tables(template())


def test_a_damaged_template_is_not_used_and_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    made, new = tmp_path / "made.db", tmp_path / "new.db"
    assert not copy_template(new) and not new.exists()
    with closing(sqlite3.connect(made)) as database:
        database.execute("CREATE TABLE alembic_version (version_num TEXT)")
    keep_template(made)
    assert copy_template(new) and tables(new) == {"alembic_version"}
    new.unlink()
    for damage in (b"", b"not a database, but long enough to look like a file of one" * 100):
        keep_template(made)
        template().write_bytes(damage)
        assert not copy_template(new)
        assert not template().exists()
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["made.db"]
    (tmp_path / "home" / ".cache" / "rlpipe").rmdir()
    (tmp_path / "home" / ".cache" / "rlpipe").touch()  # no place for it
    keep_template(made)
    assert not copy_template(new)


def test_another_run_waits_until_a_server_answers_and_no_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answering = threading.Event()
    monkeypatch.setattr(server, "SERVER", [sys.executable, "-c", "import time; time.sleep(1000)"])
    monkeypatch.setattr(server, "answers", lambda url: answering.is_set())
    first, second = (OwnServer(tmp_path / name, tmp_path / "prefect" / "a.db") for name in ("a", "b"))
    first.start()
    try:
        assert first.has_new_database
        with pytest.raises(BlockingIOError):
            second.start()
        with ThreadPoolExecutor(1) as thread:
            waiting = thread.submit(server._start_alone, second)
            until(lambda: "waiting for it" in capsys.readouterr().err)
            answering.set()  # while the first run is still in its preflight
            waiting.result(timeout=DEADLINE_S)
        first.wait_ready()
        second.wait_ready()
    finally:
        first.stop()
        second.stop()
