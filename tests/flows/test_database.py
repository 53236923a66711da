"""The database of a local run: one for the runs of a store, unless the user's settings of Prefect
say otherwise; a deleted row ends no run."""

from __future__ import annotations

import os
import socket
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from prefect.context import use_profile
from prefect.settings import (
    PREFECT_API_URL,
    PREFECT_SERVER_DATABASE_CONNECTION_URL,
    PREFECT_SERVER_DATABASE_TIMEOUT,
    Profile,
    get_current_settings,
)
from sqlalchemy.engine import create_engine

from flows.database import environment_of, existing_database, own_database
from rlpipe.base.errors import UserError
from rlpipe.config.pipeline import PipelineConfig
from rlpipe.config.source import change_config, read_config
from tests.deadlines import DEADLINE_S
from tests.paths import ROOT
from tests.pipeline import BIN

THEIRS = "sqlite+aiosqlite:////tmp/theirs.db"


def config(path: Path, store: str = "store") -> PipelineConfig:
    tiny = read_config("tiny", [], ROOT / "flows" / "presets")
    return change_config(tiny, {"run": "a", "store": store, "scratch": f"{path}/scratch"})


@pytest.mark.parametrize(
    ("environment", "profile", "is_ours"),
    [
        ({}, {}, True),
        ({}, {PREFECT_SERVER_DATABASE_TIMEOUT: 30}, True),
        ({}, {PREFECT_API_URL: "http://127.0.0.1:4200/api"}, False),
        ({}, {PREFECT_SERVER_DATABASE_CONNECTION_URL: THEIRS}, False),
        ({"PREFECT_HOME": "/tmp/home"}, {}, False),
        ({"PREFECT_API_DATABASE_CONNECTION_URL": THEIRS}, {}, False),
        ({"PREFECT_API_URL": "http://127.0.0.1:4200/api"}, {}, False),
    ],
)
def test_what_the_user_says_of_prefect_wins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], profile: dict[Any, Any], is_ours: bool
) -> None:
    for name in [name for name in os.environ if name.startswith("PREFECT_")]:
        monkeypatch.delenv(name)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with use_profile(Profile(name="theirs", settings=profile), include_current_context=False):
        path = own_database(config(tmp_path))
        assert (path is not None) == is_ours, get_current_settings().model_fields_set
        if path:
            assert path.parent == tmp_path / "scratch" / "prefect" and path.name.startswith(f"{socket.gethostname()}-")
            assert not path.parent.exists()  # nothing is made before a server starts
            assert (
                own_database(config(tmp_path, f"file://{Path('store').absolute()}")) == path
            )  # the same store, written otherwise
            assert own_database(config(tmp_path, "store2")) != path
            with pytest.raises(UserError, match="too long a path"):
                own_database(config(tmp_path / ("x" * 200) / ("y" * 200) / ("z" * 200)))


@pytest.mark.parametrize("name", ["a.db", "a b.db", "a?b#c%20d.db", "ü@:.db"])
def test_any_path_names_its_file(tmp_path: Path, name: str) -> None:
    (url,) = environment_of(tmp_path / name).values()
    with create_engine(url.replace("+aiosqlite", "")).connect() as connection:
        connection.exec_driver_sql("create table t (x)")
    assert existing_database(tmp_path / name) == tmp_path / name


def test_a_server_is_started_on_a_database_only(tmp_path: Path) -> None:
    sqlite3.connect(tmp_path / "empty.db").close()  # without a table: no byte is written
    (tmp_path / "text.db").write_text("no database")
    for name, said in (
        ("none.db", "No such file"),
        ("text.db", "no database of SQLite"),
        ("empty.db", "no database of SQLite"),
    ):
        told = subprocess.run(
            [BIN / "rlpipe", "server", "--database", tmp_path / name],
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
        )
        assert told.returncode == 2 and said in told.stderr and "Traceback" not in told.stderr, told.stderr


FLOWS = """
import asyncio, sys
import flows.vanished
from prefect import flow, get_client, task
from prefect.runtime import flow_run

async def delete(name):
    if name in sys.argv[1:]:
        async with get_client() as client:
            await client.delete_flow_run(flow_run.id)

@task
async def work():
    return 1

@flow(persist_result=False)
async def iteration():
    await delete("iteration")
    return await work()

@flow(persist_result=False)
async def phase():
    await delete("phase")
    return await iteration() + await iteration()

@flow(persist_result=False)
async def pipeline():
    await delete("pipeline")
    done = await phase() + await work()
    if "fails" in sys.argv:
        raise ValueError("the cause")
    return done

print("done", asyncio.run(pipeline()))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "deleted", [["pipeline"], ["phase"], ["iteration"], ["pipeline", "phase", "iteration"], ["pipeline", "fails"]]
)
def test_a_deleted_flow_run_is_a_warning(deleted: list[str], prefect_api: dict[str, str], tmp_path: Path) -> None:
    environment = {**os.environ, **prefect_api, "PREFECT_HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    told = subprocess.run(
        [sys.executable, "-c", FLOWS, *deleted], env=environment, capture_output=True, text=True, timeout=DEADLINE_S
    )
    output = told.stdout + told.stderr
    rows = [name for name in deleted if name != "fails"]
    assert output.count("is gone from Prefect's server: it was deleted") == len(rows) + rows.count("iteration"), output
    assert "ObjectNotFound" not in output and "409 Conflict" not in output, output
    assert "ValueError: the cause" in output if "fails" in deleted else "done 3" in told.stdout, output
