"""Reads rows of JSONL and Parquet files, on this machine and on S3, each with its place.

An invalid file is a UserError.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rlpipe.base.errors import UserError
from rlpipe.base.values import JsonDict, expanded
from rlpipe.data.links import check_links
from rlpipe.processes.user_code import MESSAGE_CHARS_MAX, CodeRaised, user_code

if TYPE_CHECKING:  # without them the process of a user's function starts in half the time
    from rlpipe.config.sections import DataConfig
    from rlpipe.store.outside import OutsideFile

    DataFile = Path | OutsideFile

SUFFIXES = (".jsonl", ".parquet")
S3 = "s3://"


class Row(NamedTuple):
    """A row and its place. Example: Row("sums.jsonl:17", {"prompt": "2+2?", "answer": 4})."""

    where: str
    values: JsonDict
    # then each record has the keys of all records, with null for those that it lacks
    is_arrow: bool = False


def names_files(source: str) -> bool:
    """True when a source is a file of rows, or a folder with such files."""
    return source.endswith(SUFFIXES) or source.startswith(S3) or expanded(source).is_dir()


def file_rows(data: DataConfig) -> Iterator[Row]:
    """Yields the rows of a file, or of all .jsonl and .parquet files below a folder, ordered by
    name.

    UserError naming the field when there is no file; OSError when S3 fails in the middle of one.
    """
    for file in _files(data):
        yield from _jsonl_rows(file) if _name(file).endswith(".jsonl") else _parquet_rows(file)


def _files(data: DataConfig) -> list[DataFile]:
    field, path = f"data.{data.name}.source", expanded(data.source)
    if data.source.startswith(S3):
        from rlpipe.store.outside import outside_files

        files: list[DataFile] = [*outside_files(field, data.source)]
        if not files:
            raise UserError(f"{field}={data.source}: there is no such file or folder in the bucket")
    elif path.is_dir():
        paths = sorted(file for file in path.rglob("*") if file.is_file())
        check_links(f"{field}={data.source}", path, (file for file in paths if file.name.endswith(SUFFIXES)))
        files = [*paths]
    elif path.is_file():
        files = [path]
    else:
        raise UserError(f"{field}={data.source}: no such file (looked for {path.absolute()})")
    if not (wanted := [file for file in files if _name(file).endswith(SUFFIXES)]):
        raise UserError(
            f"{field}={data.source}: no file that ends in .jsonl or .parquet (there:"
            f" {', '.join(map(_name, files[:3])) or 'nothing'})"
        )
    return wanted


def _name(file: DataFile) -> str:
    return file.name


def _place(file: DataFile) -> str:
    return str(file) if isinstance(file, Path) else file.address


def _jsonl_rows(file: DataFile) -> Iterator[Row]:
    with file.open("rb") if isinstance(file, Path) else file.open() as lines:
        for line_index, line in enumerate(lines, start=1):
            where = f"{_place(file)}:{line_index}"
            if not line.strip():
                continue
            try:
                values = json.loads(line)
            except (ValueError, RecursionError) as error:
                # ValueError also for bytes that are not UTF-8
                raise UserError(f"{where}: not JSON ({error}); every line must be one JSON object") from error
            if not isinstance(values, dict):
                raise UserError(f"{where}: a {type(values).__name__}, but every line must be one JSON object")
            yield Row(where, values)


def _parquet_rows(file: DataFile) -> Iterator[Row]:
    import pyarrow.parquet

    place, source = _place(file), file if isinstance(file, Path) else file.open()
    where = f"{place}: not a readable Parquet file"
    try:
        # a damaged file may raise any type of error
        with user_code(), pyarrow.parquet.ParquetFile(source) as parquet:
            names = parquet.schema_arrow.names
            if twice := {name for name in names if names.count(name) > 1}:
                raise ValueError(f"two columns are called {min(twice)!r}")
            where = f"{place} row 1: not readable"
            rows = (values for batch in parquet.iter_batches(batch_size=4096) for values in _values(batch))
            for row_index, values in enumerate(rows, start=1):
                yield Row(f"{place} row {row_index}", values, is_arrow=True)
                where = f"{place} row {row_index + 1}: not readable"
    except CodeRaised as error:
        if fault := getattr(source, "fault", None):  # a fault of S3, not of the file
            raise fault from error
        raise UserError(f"{where} ({first_cause(error)})") from error


def _values(batch: Any) -> Iterable[dict[str, Any]]:
    """Yields the rows of a batch. If one cannot be converted to Python values (a date out of
    range), those before it are yielded first.
    """
    try:
        with user_code():
            return batch.to_pylist()
    except CodeRaised:
        return (batch.slice(row_index, 1).to_pylist()[0] for row_index in range(len(batch)))


def first_cause(error: CodeRaised) -> str:
    """The first cause of an exception, in one line."""
    cause: BaseException = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    return " ".join(f"{type(cause).__name__}: {cause}".split())[:MESSAGE_CHARS_MAX]
