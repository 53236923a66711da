"""The smoke test of a machine with GPUs, on this one: what is not there is refused in a line, and
the form for a CPU goes through it all."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.deadlines import DEADLINE_S, PIPELINE_S
from tests.paths import ROOT


def smoke(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "scripts" / "gpu_smoke.py"), *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, capture_output=True, text=True, timeout=PIPELINE_S, env=environment, check=False)


def test_gpus_that_are_not_there_are_refused_in_one_line() -> None:
    ended = smoke("--gpus", "1", "64")
    assert ended.returncode == 2 and ended.stdout == ""
    (line,) = ended.stderr.splitlines()
    assert line.startswith(f"gpu_smoke: --gpus 64: this machine has {torch.cuda.device_count()} GPUs")


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_shape_is_not_measured_without_a_gpu() -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "trainer.py"), "--shape", "qwen3-0.6b"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, env=environment, check=False)
    assert (ended.returncode, ended.stdout, len(ended.stderr.splitlines())) == (2, "", 1)
    assert "--shape needs a GPU" in ended.stderr


def test_sglang_for_gpus_is_refused_without_a_driver(tmp_path: Path) -> None:
    ended = subprocess.run(
        ["/bin/bash", str(ROOT / "scripts/sglang-gpu/install.sh"), str(tmp_path / "venv")],
        capture_output=True, text=True, env={"PATH": str(tmp_path), "HOME": str(tmp_path)}, check=False,
    )  # fmt: skip
    assert ended.returncode == 2 and len(ended.stderr.splitlines()) == 1 and "no NVIDIA driver" in ended.stderr
    assert not (tmp_path / "venv").exists()


@pytest.mark.e2e
@pytest.mark.nightly  # project/test_gpu_first.py is killed and resumed in CI, of one rank
def test_the_form_for_a_cpu_is_killed_resumed_verified_and_measured(tmp_path: Path) -> None:
    ended = smoke("--device", "cpu", "--preset", "tiny", "--gpus", "2", "--folder", str(tmp_path))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    header, _, row = ended.stdout.splitlines()[-3:]
    told = dict(zip(header.strip("| ").split(" | "), row.strip("| ").split(" | "), strict=True))
    assert (told["GPUs"], told["MFU, SFT"], told["verify"]) == ("2 (CPU)", "-", "0 faults")
    assert float(told["mismatch (mean / worst)"].split(" / ")[1]) < 1e-4
    assert all(float(told[name]) > 0 for name in told if "tokens/s" in name or "GiB" in name)
