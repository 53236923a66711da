"""Rollouts to Parquet and back: in bulk, as rlpipe does, beside the plain loop of pyarrow over rows
(`from_pylist`, `to_pylist`).

usage: .venv/bin/python benchmarks/records.py [ROLLOUTS] [TOKENS]
"""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rlpipe.records.columns import from_table, read_table, schema_of, to_parquet, to_table
from rlpipe.records.kinds import Span
from rlpipe.records.rollout import SCORES, Rollout


def made(count: int, length: int) -> list[Rollout]:
    draw = np.random.Generator(np.random.PCG64(0))
    tokens = draw.integers(0, 150_000, (count, length), dtype=np.int32)
    logprobs = -draw.exponential(0.5, (count, length)).astype(np.float32)
    return [
        Rollout(
            prompt_id=f"p/{index // 8}", group_index=index // 8, rollout_index=index % 8,
            prompt="a prompt", prompt_tokens=tokens[0, :128],
            completion="word " * length, completion_tokens=tokens[index], loss_mask=np.ones(length, dtype=np.int8),
            rollout_logprobs=logprobs[index], weight_version=3,
            weight_versions=(Span(3, length),), finish_reason="stop",
            seed=index, engine="engine-0", reward=1.0,
        )
        for index in range(count)
    ]  # fmt: skip


def seconds(work: Callable[[], object]) -> tuple[float, object]:
    started = time.perf_counter()
    result = work()
    return time.perf_counter() - started, result


def main() -> None:
    count, length = (int(argument) for argument in (*sys.argv[1:], "512", "4096")[:2])
    to_table(made(1, 1), Rollout)  # pyarrow imports pandas with the first array
    rollouts = made(count, length)
    written_s, data = seconds(lambda: to_parquet(to_table(rollouts, Rollout, SCORES)))
    assert isinstance(data, bytes)
    read_s, again = seconds(lambda: from_table(read_table(data), Rollout))
    assert isinstance(again, list) and np.array_equal(again[-1].rollout_logprobs, rollouts[-1].rollout_logprobs)
    rows = pq.read_table(pa.BufferReader(data)).to_pylist()
    sink = io.BytesIO()
    split = {"rollout_logprobs.list.element": "BYTE_STREAM_SPLIT"}
    options = {"compression": "zstd", "use_dictionary": ["prompt_id"], "column_encoding": split}
    plain_written_s, _ = seconds(
        lambda: pq.write_table(pa.Table.from_pylist(rows, schema=schema_of(Rollout, SCORES)), sink, **options)
    )
    plain_read_s, _ = seconds(lambda: pq.read_table(pa.BufferReader(sink.getvalue())).to_pylist())
    print(f"{count} rollouts of {length} tokens, {len(data) / 1e6:.0f} MB")
    print(f"write  {written_s:7.2f} s   rows {plain_written_s:7.2f} s   {plain_written_s / written_s:5.1f} x")
    print(f"read   {read_s:7.2f} s   rows {plain_read_s:7.2f} s   {plain_read_s / read_s:5.1f} x")
    both, plain = written_s + read_s, plain_written_s + plain_read_s
    print(f"both   {both:7.2f} s   rows {plain:7.2f} s   {plain / both:5.1f} x")


if __name__ == "__main__":
    main()
