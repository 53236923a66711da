"""Every shell and Python block of README and docs runs as written, page by
page, in a checkout of its own.

A prefix shortens runs: `rlpipe run tiny ...` gets a few settings before the page's own, which win.
Before that its settings have to be valid as they are on the page. All runs have the Prefect server
that all tests of this process share: it is what takes most of the time to start. Only the run `a`
of the pages that speak of MLflow has one: it takes a quarter of a short run.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlpipe.processes.launch import free_port
from tests.deadlines import DEADLINE_S, PIPELINE_S, until
from tests.docs_blocks import LONG, PAGES, PLANNED, ROOT, Block, blocks
from tests.pipeline import BIN, MINI
from tests.prefect_stand import call, kill_tree

pytestmark = pytest.mark.e2e
SHORT = [*MINI, "rl.num_iterations=3", "sft.segment_steps=20"]
TRACKED = ("README.md", "docs/tracking.md")  # the pages that show what MLflow has
STAMP = "{ pwd -P; cat constraints.txt pyproject.toml scripts/install.sh; } | cksum"  # as scripts/install.sh leaves it
# the end of a block that goes on until Ctrl-C
WORKER_READY = re.compile(r"^Worker .* started!$", re.M)
RLPIPE = f"""#!{sys.executable}
import os, pathlib, sys
from rlpipe.config.source import read_config
rlpipe, arguments = {str(BIN / "rlpipe")!r}, sys.argv[1:]
if arguments[:2] == ["run", "tiny"]:  # a page's own config is short
    sets = [part for name, part in zip([""] + arguments, arguments) if part != "--run" and name != "--run"][2:]
    read_config("tiny", [part for part in sets if part != "--set"], pathlib.Path({str(ROOT / "flows" / "presets")!r}))
    arguments[2:2] = {[part for setting in SHORT for part in ("--set", setting)]!r}
at = arguments.index("--run") if "--run" in arguments else len(arguments)
if arguments[:1] in (["run"], ["fork"]) and ("UNTRACKED" in os.environ or arguments[at + 1:at + 2] != ["a"]):
    arguments[2:2], at = ["--set", "tracking.uri="], at + 2
if arguments[:1] == ["run"] and "PLANNED" in os.environ:
    arguments = ["plan", *arguments[1:at], *arguments[at + 2:]]
os.execv(rlpipe, [rlpipe, *arguments])
"""


def runnable(page: str) -> list[Block]:
    return [block for block in blocks(page) if not block.why_not]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of this repository, the commands in .venv/bin, and a config of the user's own.

    Where a page runs `a` again, it is there.
    """
    tmp_path = tmp_path_factory.mktemp("checkout")
    files = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for name in filter(lambda name: (ROOT / name).is_file(), files.stdout.splitlines()):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    commands = tmp_path / ".venv" / "bin"
    commands.mkdir(parents=True)
    for name in ("python", "prefect", "mlflow"):
        (commands / name).write_text(f'#!/bin/sh\nexec {BIN / name} "$@"\n')
    (commands / "rlpipe").write_text(RLPIPE)
    for command in commands.iterdir():
        command.chmod(0o755)
    # scripts/install.sh is to find all installed: it would install rlpipe again, from this folder,
    # into the .venv of all tests
    for extras in ("", "-agents"):
        (tmp_path / f".venv/.installed{extras}").write_bytes(subprocess.check_output(STAMP, shell=True, cwd=tmp_path))
    shutil.copy(ROOT / "flows" / "presets" / "tiny.toml", tmp_path / "my.toml")
    return tmp_path


def script(page: str) -> str:
    """All blocks of a page as one shell session; a Python block is a file that is run."""
    lines = ["set -euo pipefail"]
    for block in runnable(page):
        lines.append(f"echo '=== {block.page}:{block.line}'")
        if block.language == "python":
            command = f"cat >{block.file_name}" if block.file_name else ".venv/bin/python -"
            lines.append(f"{command} <<'END_OF_BLOCK'\n{block.text}END_OF_BLOCK")
        else:
            lines.append(block.text)
    return "\n".join(lines)


def run_page(page: str, checkout: Path, environment: dict[str, str]) -> str:
    """Pastes the blocks of a page into a shell; what it printed."""
    # somebody else's server may have the page's port
    log_path, port = checkout / "page.log", str(free_port())
    here = {
        "PREFECT_HOME": str(checkout / "prefect"),
        "PYTHONPATH": str(checkout),
        "PREFECT_SERVER_API_PORT": port,
        **environment,
    }
    text = script(page).replace("4200", port)
    with log_path.open("w") as log:
        process = subprocess.Popen(["bash", "-c", text], cwd=checkout,
                                   env={**os.environ, **here}, stdout=log, stderr=log,
                                   stdin=subprocess.DEVNULL, text=True, start_new_session=True)  # fmt: skip

    def done() -> bool:
        return process.poll() is not None or WORKER_READY.search(log_path.read_text()) is not None

    try:
        until(done, lambda: log_path.read_text()[-4000:], within_s=PIPELINE_S, look_s=0.5)
        assert process.returncode in (None, 0), log_path.read_text()[-4000:]
    finally:
        kill_tree(process)
    return log_path.read_text()


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=[pytest.mark.nightly] if page in (*LONG, *PLANNED) else [])
        for page in PAGES
        if runnable(page) and page not in ("docs/nights.md", "docs/cluster.md")
    ],
)
def test_the_blocks_of_a_page_run(page: str, checkout: Path, prefect_api: dict[str, str]) -> None:
    untracked = {} if page in TRACKED else {"UNTRACKED": "1"}
    output = run_page(page, checkout, {**prefect_api, **untracked})
    assert output.count("=== ") == len(runnable(page)), output[-4000:]


@pytest.mark.parametrize("page", PLANNED)
def test_what_a_page_runs_can_be_planned(page: str, checkout: Path) -> None:
    output = run_page(page, checkout, {"PLANNED": "1"})
    assert output.count("=== ") == len(runnable(page)) and "in all: at most " in output, output[-4000:]


@pytest.fixture
def deployed(checkout: Path, prefect_api: dict[str, str]) -> Callable[..., Any]:
    """Asks the API of a server that has the deployment post-train, and nobody who works on it."""
    environment = {**os.environ, **prefect_api, "PREFECT_HOME": str(checkout / "prefect")}
    for arguments in ("work-pool create cpu --type process", "deploy --name post-train"):
        command = [str(BIN / "prefect"), "--no-prompt", *arguments.split()]
        done = subprocess.run(command, cwd=checkout, env=environment,
                              capture_output=True, text=True, timeout=DEADLINE_S,
                              stdin=subprocess.DEVNULL)  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
    return lambda method, path, body=None: call(method, prefect_api["PREFECT_API_URL"] + path, body)


def test_flow_runs_and_the_schedule_are_made_as_written(
    checkout: Path, prefect_api: dict[str, str], deployed: Callable[..., Any]
) -> None:
    for page in ("docs/nights.md", "docs/cluster.md"):
        run_page(page, checkout, prefect_api)
    flow_runs = deployed("POST", "/flow_runs/filter", {"flow_runs": {"state": {"type": {"any_": ["SCHEDULED"]}}}})
    assert {"run": "monday", "rl.num_iterations": 30, "data.words.rows_max": 500} in [
        run["parameters"].get("changes") for run in flow_runs
    ]
    (schedule,) = deployed("GET", "/deployments/name/post-train/post-train")["schedules"]
    assert schedule["active"] and schedule["parameters"] == {"changes": {"budget.wall_clock_h": 6}}
