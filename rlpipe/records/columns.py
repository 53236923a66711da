"""Converts records to Arrow tables and back. Arrays are copied in bulk, without a Python object per
token.

The Arrow schema of a record is derived from the annotated fields of its dataclass.
"""

from __future__ import annotations

import dataclasses
import io
import itertools
import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rlpipe.base.values import JsonDict
from rlpipe.records.kinds import Json, Kind, Span, column_kinds, json_fits, optional_columns

Record = TypeVar("Record")
ITEMS_MAX = 2**31 - 1  # items of one column of lists, as Arrow's offsets have 32 bits
ROWS_AT_ONCE = 64  # rows decoded at a time from one file into another
NUMPY = {pa.int32(): np.int32, pa.int8(): np.int8, pa.float32(): np.float32, pa.float16(): np.float16}
ARROW: dict[Kind, pa.DataType] = {
    "int32": pa.int32(), "int64": pa.int64(), "text": pa.string(), "float64": pa.float64(),
    "tokens": pa.list_(pa.int32()),
    "mask": pa.list_(pa.int8()), "logprobs": pa.list_(pa.float32()), "halves": pa.list_(pa.float16()),
    "spans": pa.list_(pa.struct([("version", pa.int32()), ("num_tokens", pa.int32())])),
}  # fmt: skip
# by whether they sort keys; made once, as `json.dumps` makes one for every value
ENCODERS = {is_sorted: json.JSONEncoder(sort_keys=is_sorted, default=dataclasses.asdict) for is_sorted in (False, True)}
DICTIONARY = {"prompt_id", "prompt", "finish_reason", "engine", "source"}  # texts that repeat often


@cache
def _columns(record: type[Any]) -> dict[str, Any]:
    """Maps each column to its Arrow type, or Json."""
    return {name: kind if isinstance(kind, Json) else ARROW[kind] for name, kind in column_kinds(record).items()}


def schema_of(record: type[Any], names: Sequence[str] | None = None) -> pa.Schema:
    """The Arrow schema of a record, of all columns or of `names`."""
    columns = _columns(record)
    kinds = {name: pa.string() if isinstance(columns[name], Json) else columns[name] for name in names or columns}
    return pa.schema(list(kinds.items()))


def to_table(records: Sequence[Any], record: type[Any], names: Sequence[str] | None = None) -> pa.Table:
    """Converts records to a table with the columns of `record`, all or `names`."""
    columns = _columns(record)
    arrays = [_encoded([getattr(entry, name) for entry in records], columns[name]) for name in names or columns]
    return pa.Table.from_arrays(arrays, schema=schema_of(record, names))


def typed(table: pa.Table, record: type[Any]) -> pa.Table:
    """The columns of a record, cast to its types. The only place in which stored columns are
    checked.

    ValueError for another type, for a missing column, and for a null where the field allows none,
    or in a list. A missing column is left out if the field has a default.
    """
    arrays, optional, names = list[Any](), optional_columns(record), list[str]()
    fields = {field.name: field for field in dataclasses.fields(record)}
    for field in schema_of(record):
        if field.name not in table.column_names:
            if fields[field.name].default is fields[field.name].default_factory is dataclasses.MISSING:
                raise ValueError(f"it has no column {field.name}")
            continue
        column = table.column(field.name)
        if _family(column.type) != _family(field.type):
            raise ValueError(f"its column {field.name} is of type {column.type}, not {field.type}")
        if column.null_count and field.name not in optional:
            raise ValueError(f"its column {field.name} has nulls")
        if any(_inner_nulls(chunk) for chunk in column.chunks):
            raise ValueError(f"a list of its column {field.name} has nulls")
        arrays.append(column if column.type == field.type else column.cast(field.type))
        names.append(field.name)
    return pa.Table.from_arrays(arrays, names=names)


def _inner_nulls(array: pa.Array) -> int:
    """The nulls among the items of lists, and among the fields of structs."""
    if pa.types.is_struct(array.type):
        parts = array.flatten()
    elif pa.types.is_list(array.type) or pa.types.is_large_list(array.type):
        parts = [array.flatten()]
    else:
        return 0
    return sum(part.null_count + _inner_nulls(part) for part in parts)


def _family(kind: pa.DataType) -> Any:
    """The kind of a type without its width: "floating" for float32 and float64."""
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return "list", _family(kind.value_type)
    if pa.types.is_struct(kind):
        return "struct", *((field.name, _family(field.type)) for field in kind)
    if pa.types.is_dictionary(kind):
        return _family(kind.value_type)
    families = {
        "integer": pa.types.is_integer,
        "floating": pa.types.is_floating,
        "text": pa.types.is_string,
        "large text": pa.types.is_large_string,
    }
    return next((name.removeprefix("large ") for name, fits in families.items() if fits(kind)), str(kind))


def from_table(table: pa.Table, record: type[Record]) -> list[Record]:
    """Converts a table to records. A missing column gets the field's default, a column that the
    record lacks is not read. ValueError: see `typed`.
    """
    table = typed(table, record)
    columns = {name: kind for name, kind in _columns(record).items() if name in table.column_names}
    values = [_decoded(table.column(name), kind, record, name) for name, kind in columns.items()]
    return [record(**dict(zip(columns, row, strict=True))) for row in zip(*values, strict=True)]


def as_row(record: Any) -> JsonDict:
    """A record as users' functions get it: a dict of plain values, as if read by DuckDB or
    pandas.
    """
    return to_table([record], type(record)).to_pylist()[0]


def _encoded(values: list[Any], kind: Any) -> pa.Array:
    if isinstance(kind, Json):
        encoder = ENCODERS[kind.sort_keys]
        return pa.array(["" if value is None else encoder.encode(value) for value in values], pa.string())
    if not pa.types.is_list(kind):
        return pa.array(values, kind)
    offsets = np.zeros(len(values) + 1, dtype=np.int64)
    np.cumsum([len(value) for value in values], out=offsets[1:])
    assert offsets[-1] <= ITEMS_MAX, f"{offsets[-1]} items in one column of a file"
    if pa.types.is_struct(kind.value_type):
        items = pa.array([tuple(span) for spans in values for span in spans], kind.value_type)
    else:
        items = _array(np.concatenate(values or [np.zeros(0)]), kind.value_type)
    return pa.ListArray.from_arrays(_array(offsets, pa.int32()), items)


def _array(numbers: np.ndarray, kind: pa.DataType) -> pa.Array:
    """Numbers as an array without nulls, not copied where they are of this kind. `pa.array` would
    import pandas, a quarter of a second.
    """
    plain = np.ascontiguousarray(numbers, dtype=NUMPY[kind])
    return pa.Array.from_buffers(kind, len(plain), [None, pa.py_buffer(plain)])


def _numbers(array: Any) -> np.ndarray:
    """A read-only view of an array of numbers without nulls; `to_numpy` would import pandas."""
    dtype = np.dtype(NUMPY[array.type])
    if not len(array):
        return np.zeros(0, dtype)
    view = np.frombuffer(array.buffers()[1], dtype, len(array), array.offset * dtype.itemsize)
    view.flags.writeable = False
    return view


def _decoded(column: pa.ChunkedArray, kind: Any, record: type[Any], name: str) -> list[Any]:
    if isinstance(kind, Json):
        return [_from_text(text, kind, record, name) for text in column.to_pylist()]
    if not pa.types.is_list(kind):
        return column.to_pylist()
    if column.null_count or any(chunk.values.null_count for chunk in column.chunks):
        raise pa.ArrowInvalid("a list or an entry of one is missing")
    return [row for chunk in column.chunks for row in _rows(chunk)]


def _rows(chunk: Any) -> list[Any]:
    """The rows of one list array: tuples of spans, or read-only views of numbers."""
    if pa.types.is_struct(chunk.type.value_type):
        # not a dict per span, which would take most of the time of reading a batch
        items: Any = tuple(map(Span, *(chunk.values.field(name).to_pylist() for name in Span._fields)))
    else:
        items = _numbers(chunk.values)
    return [items[start:end] for start, end in itertools.pairwise(_numbers(chunk.offsets).tolist())]


def _from_text(text: str | None, kind: Json, record: type[Any], name: str) -> Any:
    if not text:
        return None
    value = json.loads(text)
    json_fits(record, name, value)
    if kind.record is None:
        return value
    names = {field.name for field in dataclasses.fields(kind.record)}
    return kind.record(**{name: entry for name, entry in value.items() if name in names})


def to_parquet(table: pa.Table) -> bytes:
    """Encodes the table as Parquet with zstd, logprobs with BYTE_STREAM_SPLIT.

    Deterministic: equal tables give equal bytes.
    """
    sink, names = io.BytesIO(), table.column_names
    split = {"rollout_logprobs.list.element": "BYTE_STREAM_SPLIT"} if "rollout_logprobs" in names else None
    repeating = [name for name in names if name in DICTIONARY]
    pq.write_table(
        table,
        sink,
        compression="zstd",
        use_dictionary=repeating,  # pyright: ignore[reportArgumentType]
        column_encoding=split,
    )
    data = sink.getvalue()
    assert pq.read_metadata(io.BytesIO(data)).num_rows == table.num_rows, "rows were lost in writing"
    return data


def read_table(data: bytes, columns: Sequence[str] | None = None) -> pa.Table:
    """Decodes Parquet to a table, all columns or these. KeyError for a missing one.

    It reads in the calling thread only. A thread of pyarrow may still hold the bytes when the
    interpreter ends; it then waits for the GIL to release them, and the process aborts ("terminate
    called without an active exception").
    """
    names = None if columns is None else list(columns)
    table = pq.ParquetFile(pa.BufferReader(data), pre_buffer=False).read(names, use_threads=False)
    return table if names is None else table.select(names)


def decode_file(source: Path, target: Path, record: type[Any]) -> None:
    """Writes the columns of a record from a Parquet file to an Arrow file, cast to the record's
    types, with only a few rows in memory at a time. ValueError: see `typed`.
    """
    with pq.ParquetFile(source, memory_map=True, pre_buffer=False) as file:
        names = [name for name in schema_of(record).names if name in file.schema_arrow.names]
        schema = typed(pa.Table.from_batches([], file.schema_arrow).select(names), record).schema
        with pa.OSFile(str(target), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
            for batch in file.iter_batches(ROWS_AT_ONCE, columns=names, use_threads=False):
                writer.write_table(typed(pa.Table.from_batches([batch]), record))


def map_table(path: Path) -> pa.Table:
    """Memory-maps an Arrow file as a table."""
    with pa.memory_map(str(path)) as source:
        return pa.ipc.open_file(source).read_all()
