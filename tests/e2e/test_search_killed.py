"""A search that is killed five times at random ends as one that was not."""

from __future__ import annotations

import json
import random
import time

import pytest

from rlpipe.store.opening import open_existing
from tests.e2e.test_search import SETS, decided, search
from tests.pipeline import Folder, kill_group

KILLS, SEED = 5, 20261130
VARY = ["--vary", "rl.clip_high=0.2,0.28"]  # beside two learning rates: four candidates


@pytest.mark.e2e
@pytest.mark.nightly
def test_a_search_that_is_killed_five_times_has_the_same_winner(folder: Folder) -> None:
    folder.complete("a", *SETS)
    began = time.monotonic()
    code, output = folder.rlpipe(*search(folder, "whole", *VARY))
    assert code == 0, output[-3000:]
    whole_s, draw = time.monotonic() - began, random.Random(SEED)
    for _ in range(KILLS):
        process = folder.start(*search(folder, "killed", *VARY))
        time.sleep(draw.uniform(0.05, 0.35) * whole_s)
        assert process.poll() is None, folder.said()
        kill_group(process)
    code, output = folder.rlpipe(*search(folder, "killed", *VARY))
    assert code == 0, output[-3000:]
    assert decided(folder, "killed") == decided(folder, "whole")
    kept = [
        json.loads(folder.open_store().read(f"searches/{name}/rung-1.json"))["kept"] for name in ("whole", "killed")
    ]
    assert kept[0] == [kept[1][0].replace("killed", "whole")]
    last = open_existing(folder.open_store(), kept[0][0]).config.rl.num_iterations
    assert len({folder.final_sha256(winner, last) for (winner,) in kept}) == 1
