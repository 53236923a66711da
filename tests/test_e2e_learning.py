"""The tiny preset learns: SFT teaches the format, RL the skill; on local disk, on S3, and with two of everything."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import S3Server
from tests.pipeline import Folder

pytestmark = pytest.mark.e2e
ITERATIONS = 70


def check_learning(folder: Folder, run: str) -> None:
    before, after = folder.evaluation(run, 0), folder.evaluation(run, ITERATIONS)
    assert after["words_pass_at_1"] - before["words_pass_at_1"] >= 0.15
    assert after["words_greedy"] >= 0.85
    assert min(before["words_format_rate"], after["words_format_rate"]) >= 0.97


def test_tiny_learns_and_shows_it(tmp_path: Path) -> None:
    folder = Folder(tmp_path, f"file://{tmp_path}/store")
    output = folder.complete("a")
    check_learning(folder, "a")
    assert "words_greedy" in output
    assert (tmp_path / "a-curves.png").stat().st_size > 10_000
    assert folder.rlpipe("verify", "a", "--store", folder.store)[0] == 0


def test_tiny_learns_on_s3_with_two_ranks_and_two_engines(tmp_path: Path, s3_server: S3Server) -> None:
    folder = Folder(tmp_path, s3_server.url(), s3_server.environment)
    folder.complete("a", "trainer.ranks=2", "engines.count=2", "seed=1", timeout_s=900)
    check_learning(folder, "a")
    assert folder.rlpipe("verify", "a", "--store", folder.store)[0] == 0
