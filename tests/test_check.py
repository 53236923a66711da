"""scripts/check.sh, with tools that are played: which parts run, and
what it says of them in the end."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.deadlines import DEADLINE_S

ROOT = Path(__file__).parent.parent
ALL = ["ruff check .", "ruff format --check .", "pyright", "unit", "end-to-end"]


@pytest.mark.parametrize(
    ("failing", "parts", "last"),
    [
        ([], ALL, "passed: lint, types, unit tests, end-to-end tests"),
        (["unit"], ALL, "failed: unit tests"),
        (["end-to-end"], ALL, "failed: end-to-end tests"),
        (["unit", "end-to-end"], ALL, "failed: unit tests, end-to-end tests"),
        (["ruff format --check ."], ALL[:2], ""),
        (["pyright", "unit"], ALL[:3], ""),
    ],
)
def test_both_parts_of_the_tests_run_and_the_last_line_says_which_failed(
    tmp_path: Path, failing: list[str], parts: list[str], last: str
) -> None:
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "check.sh", tmp_path / "scripts")
    tools = tmp_path / ".venv" / "bin"
    tools.mkdir(parents=True)
    (tmp_path / "failing").write_text("".join(f"{part}\n" for part in failing))
    tool = (
        'part="${0##*/}${*:+ $*}"\ncase $part in "python -c"*) echo 1; exit;; "python -m compileall"*) exit;; '
        '*"not e2e"*) part=unit;; *"(e2e or"*) part=end-to-end;; esac\n'
    )
    for name in ("ruff", "pyright", "python"):
        (tools / name).write_text(f'#!/bin/bash\n{tool}echo "$part" >> began\n! grep -qxF "$part" failing\n')
        (tools / name).chmod(0o755)
    ended = subprocess.run(
        [tmp_path / "scripts" / "check.sh"], capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert (tmp_path / "began").read_text().splitlines() == parts
    assert (ended.stdout + ended.stderr).strip() == last
    assert ended.returncode == (1 if failing else 0)
