"""Columns of numbers are written and read in bulk, and without pandas."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pyarrow as pa

from rlpipe.records.columns import from_table, read_table, to_parquet, to_table
from rlpipe.records.rollout import Conversation
from tests.deadlines import DEADLINE_S
from tests.paths import ROOT

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
