"""Rollouts as Parquet: what is read is what was written, and reading leaves no thread behind."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from rlpipe.records.columns import read_table
from tests.deadlines import DEADLINE_S
from tests.rows import CONVERSATIONS, from_parquet, to_parquet

ROWS: list[dict[str, Any]] = [{"tokens": [1, 2, index], "loss_mask": [0, 0, 1]} for index in range(500)]
READ_AND_COUNT = """
import sys, psutil, pyarrow.parquet
from rlpipe.records.columns import read_table
data = sys.stdin.buffer.read()
before = psutil.Process().num_threads()
read_table(data)
print(psutil.Process().num_threads() - before)
"""


def test_rows_come_back_whole_or_by_column() -> None:
    data = to_parquet(ROWS, CONVERSATIONS)
    assert from_parquet(data, CONVERSATIONS) == ROWS
    assert read_table(data, ["loss_mask", "tokens"]).column_names == ["loss_mask", "tokens"]
    with pytest.raises(KeyError, match="reward"):
        read_table(data, ["tokens", "reward"])


def test_reading_starts_no_thread() -> None:
    """A thread of pyarrow that gives the bytes back while the interpreter ends aborts
    the process: 3 of 40 on one core."""
    command = [sys.executable, "-c", READ_AND_COUNT]
    reader = subprocess.run(command, input=to_parquet(ROWS, CONVERSATIONS), capture_output=True, timeout=DEADLINE_S)
    assert (reader.returncode, reader.stdout.strip()) == (0, b"0"), reader.stderr.decode()[-2000:]
