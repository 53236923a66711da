"""The first ten minutes on a GPU, on this machine: all its parts go through, and one that fails is
a line and stops none."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from scripts import gpu_first
from scripts.gpu_commands import kill
from tests.deadlines import DEADLINE_S, until
from tests.living import until_all_gone
from tests.paths import ROOT
from tests.project.test_gpu_smoke import smoke


@pytest.mark.e2e
@pytest.mark.nightly
def test_the_first_ten_minutes_go_through_on_a_cpu(tmp_path: Path) -> None:
    ended = smoke("--first", "--device", "cpu", "--folder", str(tmp_path))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    outcomes = {entry["part"]: entry for entry in json.loads((tmp_path / "first.json").read_text())}
    assert outcomes.keys() == gpu_first.PARTS.keys() - {*gpu_first.NOT_ON_CPU}
    assert not any(outcome["fault"] for outcome in outcomes.values())
    for name in ("killed", "apart"):
        assert outcomes[name]["figures"]["the undisturbed run's bits"] == "yes"
    assert ended.stdout.splitlines()[-1] == gpu_first.Outcome(**outcomes["apart"]).line


@pytest.mark.slow
def test_a_part_that_fails_or_hangs_is_a_line_and_stops_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(gpu_first.PARTS, "kernels", 0.0)
    monkeypatch.setitem(gpu_first.PARTS, "no_such_part", 120)
    assert gpu_first.first(["kernels", "no_such_part"], "cpu", tmp_path) == 1
    hung, failed = json.loads((tmp_path / "first.json").read_text())
    assert hung["fault"].startswith("not done after 0.0 s") and "KeyError: 'no_such_part'" in failed["fault"]
    rows = capsys.readouterr().out.splitlines()[-2:]
    assert all("FAILED: " in row for row in rows) and rows[0].startswith("| kernels | ")


def test_a_part_whose_time_is_up_ends_with_the_run_that_it_started() -> None:
    """Which has a session of its own: it went on on the GPU beside the next part."""
    program = "import subprocess, sys; subprocess.Popen(['sleep', '600'], start_new_session=True).wait()"
    part = subprocess.Popen([sys.executable, "-c", program], start_new_session=True)
    started = until(psutil.Process(part.pid).children, running=part)
    kill(part)
    until_all_gone(started)


def test_what_is_no_part_is_refused_in_one_line() -> None:
    ended = smoke("--first", "kernel", "--device", "cpu")
    assert (ended.returncode, ended.stdout) == (2, "") and ended.stderr.startswith(
        "gpu_smoke: --first kernel: the parts are kernels, lora,"
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [((), "usage: "), (("FOLDER", "--python", "2.7"), "usage: "), (("tests",), "name an empty folder")],
)
def test_an_offline_kit_is_refused_before_anything_is_fetched(
    tmp_path: Path, arguments: tuple[str, ...], said: str
) -> None:
    given = [
        str(ROOT / "tests") if part == "tests" else part.replace("FOLDER", str(tmp_path / "kit")) for part in arguments
    ]
    ended = subprocess.run(
        ["/bin/bash", str(ROOT / "scripts" / "offline_kit.sh"), *given],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert ended.returncode == 2 and ended.stdout == "" and said in ended.stderr and not (tmp_path / "kit").exists()


def test_a_package_that_is_not_installed_is_one_line(tmp_path: Path) -> None:
    """As on a machine with an offline kit; here plotly is hidden."""
    program = "import sys; sys.modules['plotly'] = None; from flows.cli import app; app()"
    command = [sys.executable, "-c", program, "view", "--store", str(tmp_path)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert ended.returncode == 2 and "rlpipe: view: needs the package plotly, which is not installed" in ended.stderr
    assert "Traceback" not in ended.stderr
