"""Files that a machine decodes once, and whose pages its processes share: the same records as those
that are read whole; and who reads which rows."""

from __future__ import annotations

import dataclasses
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from rlpipe.base.errors import StoreError
from rlpipe.records.columns import to_parquet, to_table
from rlpipe.records.rollout import BRANCHES_FILE, Branch, Conversation
from rlpipe.store.artifacts import read_manifest, read_records
from rlpipe.store.backend import Store, open_store
from rlpipe.store.mapped import map_records, map_records_if_any
from rlpipe.trainer.batches import BatchRow
from rlpipe.trainer.packing import Rows, TrainSequence
from rlpipe.trainer.step import plan_batch
from rlpipe.trainer.trainer import Trainer
from tests import trainer_world as world
from tests.batches import read_rl_batch

MANY = 150  # rows: more than are decoded at a time


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(f"file://{tmp_path}/store")


def as_lists(records: list[BatchRow]) -> list[dict[str, object]]:
    return [{name: np.asarray(value).tolist() for name, value in vars(record).items()} for record in records]


@pytest.mark.parametrize("groups", [0, 1, MANY // 2])
def test_the_records_are_those_of_a_file_that_is_read_whole(store: Store, tmp_path: Path, groups: int) -> None:
    ref = world.batch(store, "batch", world.rollout_rows(groups, 2))
    first, second = (map_records(store, ref, "batch.parquet", BatchRow, tmp_path / "here") for _ in range(2))
    left = [path.name for path in tmp_path.joinpath("here").rglob("*") if path.is_file()]
    shutil.rmtree(tmp_path / "here")  # its pages stay
    assert as_lists(first) == as_lists(second) == as_lists(read_records(store, ref, "batch.parquet", BatchRow))
    assert len(first) == 2 * groups and left == ["decoded.arrow"]
    assert not any(
        array.flags.writeable for row in first for array in vars(row).values() if isinstance(array, np.ndarray)
    )


def test_the_arrays_are_pages_of_the_file(store: Store, tmp_path: Path) -> None:
    records = [
        Conversation(np.arange(200_000, dtype=np.int32), np.ones(200_000, np.int8)) for _ in range(100)
    ]  # 100 MB
    ref = world.artifact(store, "talk", {"conversations.parquet": to_parquet(to_table(records, Conversation))})
    map_records(store, ref, "conversations.parquet", Conversation, tmp_path / "here")

    def anonymous_mb() -> float:
        status = Path("/proc/self/status").read_text()
        return int(status.split("RssAnon:")[1].split()[0]) / 1024

    before = anonymous_mb()
    found = map_records(store, ref, "conversations.parquet", Conversation, tmp_path / "here")
    assert sum(int(row.tokens[-1]) for row in found) == 100 * 199_999
    assert anonymous_mb() - before < 20


def test_another_process_that_was_first_is_no_fault(store: Store, tmp_path: Path) -> None:
    ref = world.batch(store, "batch", world.rollout_rows(3, 2))
    expected = as_lists(map_records(store, ref, "batch.parquet", BatchRow, tmp_path / "here"))
    (made,) = tmp_path.joinpath("here").iterdir()
    (made.parent / f".{made.name}.killed").mkdir()  # what a process left that died in it
    os.utime(made)
    assert as_lists(map_records(store, ref, "batch.parquet", BatchRow, tmp_path / "here")) == expected
    assert map_records_if_any(store, ref, BRANCHES_FILE, Branch, tmp_path / "here") == []
    with pytest.raises(StoreError, match=BRANCHES_FILE):
        map_records(store, ref, BRANCHES_FILE, Branch, tmp_path / "here")


def test_a_file_of_other_records_or_a_damaged_one_is_named_and_leaves_nothing(store: Store, tmp_path: Path) -> None:
    talk = world.conversations(store, "talk", 3)
    wrong = world.artifact(
        store, "wrong", {"batch.parquet": store.read(f"talk/{read_manifest(store, 'talk').files[0].name}")}
    )
    with pytest.raises(
        StoreError, match=r"wrong/.*batch.parquet is no file of BatchRow records \(it has no column prompt_tokens\)"
    ):
        map_records(store, wrong, "batch.parquet", BatchRow, tmp_path / "here")
    (record,) = read_manifest(store, "talk").files
    path = Path(store.address(f"talk/{record.name}"))
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    with pytest.raises(StoreError, match=r"conversations.parquet .*sha256"):
        map_records(store, talk, "conversations.parquet", Conversation, tmp_path / "here")
    assert [*tmp_path.joinpath("here").rglob("*")] == []


class Watched(TrainSequence):
    """A sequence that notes who reads it."""

    read: set[int]

    @property
    def tokens(self) -> np.ndarray:
        self.read.add(self.row)
        return super().tokens


def test_a_rank_reads_the_rows_of_its_own_microbatches(tmp_path: Path) -> None:
    ranks = world.one_rank(tmp_path, tokens_max=128)
    trainer = Trainer(ranks)
    world.run(trainer, "load", world.load_new())
    assert trainer.resident is not None
    rows = world.rollout_rows(8, 4)
    rows[5] |= {"loss_mask": [0] * len(rows[5]["loss_mask"])}
    (sequences,) = read_rl_batch(ranks.store, world.batch(ranks.store, "batch", rows), 1).steps
    read_by: list[set[int]] = []
    for rank in range(3):
        watched: list[TrainSequence] = [Watched(**vars(sequence)) for sequence in sequences]
        Watched.read = set()
        batch = plan_batch(dataclasses.replace(ranks, rank=rank, size=3), trainer.resident.policy, Rows.SHARED, watched)
        read_by.append(Watched.read)
        assert {row for microbatch in batch.microbatches for row in microbatch.rows} == Watched.read
    assert sorted(row for rows in read_by for row in rows) == [row for row in range(32) if row != 5]
