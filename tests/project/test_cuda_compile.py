"""The kernels of flex_attention for a card that is not there.

Skipped, visibly, where `make test-cuda-compile` has installed no Triton.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.deadlines import PIPELINE_S

TRITON = Path(os.environ.get("TRITON", Path.home() / ".cache/rlpipe/triton-3.7.1"))


@pytest.mark.nightly
@pytest.mark.skipif(not (TRITON / ".installed").exists(), reason="no Triton: make test-cuda-compile installs it")
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_kernels_for_an_h100_are_made_and_fit() -> None:
    argv = [
        sys.executable,
        "scripts/cuda-compile/kernels.py",
        "--cards",
        "sm_90",
        "--head-dims",
        "64",
        "--dtypes",
        "bf16",
    ]
    done = subprocess.run(
        argv,
        env={**os.environ, "PYTHONPATH": str(TRITON)},
        capture_output=True,
        text=True,
        timeout=PIPELINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "flex_attention_backward" in done.stderr and "DOES NOT FIT" not in done.stderr
    *_, row = done.stdout.splitlines()
    assert row.startswith("| sm_90 (H100, H200) | 227 |") and " / " in row
