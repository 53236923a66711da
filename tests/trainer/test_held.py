"""Trainer processes that are started before their run is held import, and touch nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil

from flows import PRESETS
from rlpipe.config.pipeline import PipelineConfig
from rlpipe.config.source import read_config
from rlpipe.store.backend import open_store
from rlpipe.store.run import Run
from rlpipe.trainer.held import VARIABLE, Hold
from rlpipe.trainer.process import TrainerProcesses, trainer_beside, trainer_place
from tests.deadlines import until
from tests.living import descendants, signal_all, until_all_gone

WAITS = "from rlpipe.trainer.held import wait_until_freed; wait_until_freed(); print('works')"


def config_in(folder: Path, *sets: str) -> PipelineConfig:
    return read_config("tiny", ["run=a", f"store=file://{folder}/store", *sets], PRESETS)


def place_of(config: PipelineConfig, work_dir: Path) -> TrainerProcesses:
    async def nobody(kind: str, node: int, lost: bool) -> None:
        raise AssertionError((kind, node, lost))

    place = trainer_place(Run(open_store(config.store), config), work_dir, nobody)
    assert isinstance(place, TrainerProcesses)
    return place


def trainers() -> list[psutil.Process]:
    """The launchers and ranks that this process has started; other tests have children, too."""
    return descendants(os.getpid(), "rlpipe.trainer")


def held(hold: Hold) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", WAITS], env={VARIABLE: str(hold.read_end)}, pass_fds=[hold.read_end],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip


def test_held_ranks_work_once_they_may_and_end_where_nobody_will_free_them() -> None:
    both, none = Hold(), Hold()
    ranks, lost = [held(both), held(both)], held(none)
    both.free(2)
    assert [rank.communicate()[0] for rank in ranks] == ["works\n", "works\n"]
    none.free(0)  # the pipe closes, as when its process has died
    assert (lost.communicate()[0], lost.returncode) == ("", 0)


def test_a_session_takes_the_trainer_that_was_prepared_for_it(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    left = tmp_path / "work" / "trainer" / "of_another_process"
    left.parent.mkdir(parents=True)
    left.touch()
    with trainer_beside(config, tmp_path / "work"):
        place = place_of(config, tmp_path / "work")
    started = until(trainers)
    assert place.alive, "it is the session's, which ends it"
    assert left.exists(), "nothing was touched before the run is held"
    place.end()
    until_all_gone(started)


def test_a_trainer_that_no_session_took_ends(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    with trainer_beside(config, tmp_path / "work"):
        started = until(trainers)
    until_all_gone(started)
    with trainer_beside(config, tmp_path / "work"):
        started = until(trainers)
        other = place_of(config_in(tmp_path, "trainer.tokens_max=4096"), tmp_path / "work")
        until_all_gone(started)
    assert not other.alive


async def test_a_prepared_trainer_that_is_lost_comes_back(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    place = TrainerProcesses(config, tmp_path / "work", "key")
    place.prepare()
    try:
        url = await place.start()
        signal_all(descendants(os.getpid(), "rlpipe.trainer.server"))
        assert await place.bring_back() == url
    finally:
        await place.close()
