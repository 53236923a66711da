"""docs/cluster.md: every command in it is run by a test, or is listed here with why not."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

from rlpipe.config.pipeline import PipelineConfig
from tests.deadlines import DEADLINE_S
from tests.paths import ROOT

PAGE = (ROOT / "docs" / "cluster.md").read_text()
# how a command begins -> the test that runs it
RUN_BY = {
    "install -m 600 infra/.env.example": "project/test_docs_cluster.py::test_the_secrets_are_made",
    "for name in POSTGRES_PASSWORD": "project/test_docs_cluster.py::test_the_secrets_are_made",
    'sed -i "s|^PREFECT_API_AUTH_STRING': "project/test_docs_cluster.py::test_the_secrets_are_made",
    "set -a; . infra/.env": "project/test_docs_cluster.py::test_the_secrets_are_made",
    "PATH=$PWD/.venv/bin:$PATH infra/deploy.sh process": (
        "e2e/test_infra.py::test_the_worker_polls_the_pool_of_the_authenticated_server"
    ),
    ".venv/bin/prefect worker start --pool cpu": (
        "e2e/test_infra.py::test_the_worker_polls_the_pool_of_the_authenticated_server"
    ),
    "sed -i 's/active: false": "e2e/test_docs.py::test_flow_runs_and_the_schedule_are_made_as_written",
    ".venv/bin/prefect --no-prompt deploy": "e2e/test_docs.py::test_flow_runs_and_the_schedule_are_made_as_written",
    ".venv/bin/prefect deployment run": "e2e/test_docs.py::test_flow_runs_and_the_schedule_are_made_as_written",
    "sbatch --job-name=rlpipe-first infra/slurm/flow.sbatch": (
        "e2e/test_slurm.py::test_a_run_on_slurm_ends_and_its_services_leave"
    ),
    "squeue --me": "e2e/test_slurm.py::test_a_run_on_slurm_ends_and_its_services_leave",
}
# how a command begins -> why no test can run it here
NOT_HERE = {
    "docker": "no Docker: its services' commands are run by e2e/test_infra.py, what its images run is not built",
    "for kind in flow trainer engine": "no Docker",
    "kubectl": "no cluster: project/test_infra.py holds what is sent to it against the schemas",
    "scripts/install.sh": "it installs from the network: `make` does it before every test",
    "RLPIPE_ADDRESS=10.0.0.": (
        "the address of a machine that is not here; the same worker without it is run by e2e/test_infra.py"
    ),
    "(scrontab -l": "scrontab is off in Debian's Slurm; what it starts is run by e2e/test_slurm.py",
}


def commands() -> list[str]:
    """The commands of the page's bash blocks; loops and continued lines are one."""
    found: list[str] = []
    for block in re.findall(r"```bash\n(.*?)```", PAGE, re.S):
        joined = re.sub(
            r"\bdo\n.*?\bdone", lambda loop: loop[0].replace("\n", " "), block.replace("\\\n", " "), flags=re.S
        )
        found += [line for line in joined.splitlines() if line.strip()]
    return found


def test_the_page_has_commands_for_all_three() -> None:
    assert len(commands()) > 15
    assert all(f"## {title}" in PAGE for title in ("Kubernetes", "Slurm", "Two plain machines"))
    for part in PAGE.split("\n## ")[1:]:
        assert len(part.splitlines()) < 60, "under one page each"


@pytest.mark.parametrize("command", commands())
def test_every_command_is_run_by_a_test_or_listed(command: str) -> None:
    hits = [start for start in (*RUN_BY, *NOT_HERE) if command.startswith(start)]
    assert len(hits) == 1, f"{command!r}: name the test that runs it, or why none can"


def test_the_lists_name_what_is_there() -> None:
    for start in (*RUN_BY, *NOT_HERE):
        assert any(command.startswith(start) for command in commands()), f"{start!r} is on the page no more"
    for where in RUN_BY.values():
        module, _, test = where.partition("::")
        assert f"def {test}(" in (ROOT / "tests" / module).read_text()


def test_the_files_of_the_page_are_there() -> None:
    for path in re.findall(r"infra/[\w./-]+\w", PAGE):
        assert path in ("infra/.env", "infra/slurm") or "*" in path or (ROOT / path).exists(), path


def test_the_secrets_are_made(tmp_path: Path) -> None:
    (tmp_path / "infra").mkdir()
    shutil.copy(ROOT / "infra" / ".env.example", tmp_path / "infra")
    block = next(each for each in re.findall(r"```bash\n(.*?)```", PAGE, re.S) if each.startswith("install -m 600"))
    read = "set -a; . infra/.env; set +a; env"
    clean = {"PATH": os.environ["PATH"]}
    told = subprocess.run(
        ["bash", "-euc", block + read],
        cwd=tmp_path,
        env=clean,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=True,
    )
    found = dict(line.split("=", 1) for line in told.stdout.splitlines())
    for name in ("POSTGRES_PASSWORD", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "RLPIPE_SERVICE_KEY"):
        assert re.fullmatch("[0-9a-f]{48}", found[name])
    assert re.fullmatch("admin:[0-9a-f]{48}", found["PREFECT_API_AUTH_STRING"])
    assert (tmp_path / "infra" / ".env").stat().st_mode & 0o777 == 0o600


def test_the_config_of_the_page_is_taken() -> None:
    given = tomllib.loads(next(iter(re.findall(r"```toml\n(.*?)```", PAGE, re.S))))
    base = tomllib.loads((ROOT / "flows" / "presets" / "tiny.toml").read_text())
    for section, value in given.items():
        base[section] = {**base.get(section, {}), **value} if isinstance(value, dict) else value
    PipelineConfig.model_validate(base)
