"""The tiny preset learns on S3: the one learning run of `make test-all`, half as long as the
preset's own (the others: `make learning`)."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlpipe.store.opening import open_existing
from tests.conftest import S3Server
from tests.pipeline import Folder

pytestmark = pytest.mark.e2e
TWO_OF_EVERYTHING = ["trainer.ranks=2", "engines.count=2"]


@pytest.mark.parametrize(
    "sets",
    [["rl.num_iterations=35"], pytest.param(TWO_OF_EVERYTHING, marks=pytest.mark.learning)],
    ids=["half", "two ranks and two engines"],
)
def test_tiny_learns_on_s3(sets: list[str], tmp_path: Path, s3_server: S3Server, prefect_api: dict[str, str]) -> None:
    folder = Folder(tmp_path, s3_server.url(), {**s3_server.environment, **prefect_api})
    folder.complete("a", "seed=1", *sets)
    num_iterations = open_existing(folder.open_store(), "a").config.rl.num_iterations
    before, after = folder.evaluation("a", 0), folder.evaluation("a", num_iterations)
    assert after["words_pass_at_1"] - before["words_pass_at_1"] >= 0.15
    assert after["words_greedy"] >= 0.85
    assert min(before["words_format_rate"], after["words_format_rate"]) >= 0.97
    assert folder.rlpipe("verify", "a", "--store", folder.store)[0] == 0
