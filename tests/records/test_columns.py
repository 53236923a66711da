"""Columns of numbers are written and read in bulk, and without pandas."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pytest

from rlpipe.records.columns import from_table, read_table, schema_of, to_parquet, to_table, typed
from rlpipe.records.kinds import Spans
from rlpipe.records.rollout import Conversation
from tests.deadlines import DEADLINE_S
from tests.paths import ROOT


@dataclass(frozen=True)
class Versions:
    weight_versions: Spans


WITHOUT_PANDAS = """
import sys
from pathlib import Path
import numpy as np
from rlpipe.records.columns import decode_file, from_table, map_table, to_parquet, to_table
from rlpipe.records.rollout import Conversation
rows = [Conversation(np.arange(3, dtype=np.int32), np.ones(3, dtype=np.int8))]
source, target = Path(sys.argv[1]) / "rows.parquet", Path(sys.argv[1]) / "rows.arrow"
source.write_bytes(to_parquet(to_table(rows, Conversation)))
decode_file(source, target, Conversation)
(row,) = from_table(map_table(target), Conversation)
assert row.tokens.tolist() == [0, 1, 2]
assert "pandas" not in sys.modules
"""


def test_a_process_that_prepares_or_reads_conversations_does_not_import_pandas(tmp_path: object) -> None:
    subprocess.run([sys.executable, "-c", WITHOUT_PANDAS, str(tmp_path)], cwd=ROOT, check=True, timeout=DEADLINE_S)


def test_numbers_are_read_as_they_were_written_also_from_a_part_of_a_table_and_cannot_be_changed() -> None:
    lengths = (3, 0, 5, 1)
    rows = [Conversation(np.arange(length, dtype=np.int32), np.ones(length, dtype=np.int8)) for length in lengths]
    table = to_table(rows, Conversation)
    expected = pa.array([row.tokens.tolist() for row in rows], pa.list_(pa.int32()))
    assert table.column("tokens").combine_chunks().equals(expected)
    for read, start in (
        (read_table(to_parquet(table)), 0),
        (table.slice(2), 2),
        (table.slice(1, 1), 1),
        (table[:0], 4),
    ):
        for row, was in zip(from_table(read, Conversation), rows[start:], strict=False):
            assert row.tokens.tolist() == was.tokens.tolist() and row.tokens.dtype == np.int32
            assert row.loss_mask.tolist() == was.loss_mask.tolist() and not row.tokens.flags.writeable
    assert from_table(table[:0], Conversation) == []


@pytest.mark.parametrize("tokens", [[[1, None, 3]], [[1], [None]], [[1], None]])
def test_a_null_in_a_list_is_refused(tokens: list[object]) -> None:
    """As a number it would be any: the memory under a null is not defined."""
    mask = [[1] * len(row) if isinstance(row, list) else [1] for row in tokens]
    table = pa.table(
        {"tokens": pa.array(tokens, pa.list_(pa.int32())), "loss_mask": pa.array(mask, pa.list_(pa.int8()))}
    )
    with pytest.raises(ValueError, match="column tokens has nulls"):
        from_table(table, Conversation)


def test_a_null_in_a_span_is_refused() -> None:
    kind = schema_of(Versions).field("weight_versions").type
    table = pa.table({"weight_versions": pa.array([[{"version": 1, "num_tokens": None}]], kind)})
    with pytest.raises(ValueError, match="a list of its column weight_versions has nulls"):
        typed(table, Versions)
