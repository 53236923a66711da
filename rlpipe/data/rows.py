"""Reads rows of every kind of source, each with its place, for error messages.

Any invalid content of a file is a UserError.

A user's function runs in a process of its own, `python -m rlpipe.data.rows`, as it may hang, exit
or crash.
"""

from __future__ import annotations

import ast
import difflib
import inspect
import itertools
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict

from rlpipe.base.errors import UserError
from rlpipe.base.values import plain_json
from rlpipe.data.files import Row, file_rows, first_cause, names_files
from rlpipe.data.links import check_links
from rlpipe.processes.launch import PARENT_VARIABLE, die_with_parent
from rlpipe.processes.pool import WorkerPool
from rlpipe.processes.user_code import (
    CodeRaised,
    InvalidAnswer,
    Loaded,
    Record,
    load_function,
    serve,
    user_code,
)
from rlpipe.processes.worker import ProcessEnded

if TYPE_CHECKING:  # without it the process of a function starts in half the time
    from rlpipe.config.sections import DataConfig

GENERATOR = "reasoning_gym:"
FUNCTION = re.compile(r"[^\W\d][\w.]*:[^\W\d]\w*")
HOLDERS, BYTES, PLAIN = (
    (Mapping, list, tuple, set, frozenset),
    (bytes, bytearray, memoryview),
    (str, int, float, type(None)),
)
# nested lists and objects; Python's own limit depends on the depth of the caller
NESTING_MAX = 200
ROW_TIMEOUT_S = 300.0  # for one row of a function; the first may need a download
BATCH_ROWS, BATCH_S = 256, 0.5  # rows of a function that are sent together


class FunctionCall(NamedTuple):
    """A call of a user's function: its data set, path and arguments, and the field of its rows that
    is the answer.
    """

    name: str
    source: str
    args: dict[str, Any]
    seed: int
    rows_max: int
    answer_field: str
    columns: list[str]


def read_rows(data: DataConfig, seed: int) -> list[Row]:
    """The first `rows_max` rows (0: all) of a source. UserError naming the config field, or the
    file and row, at fault.
    """
    if data.source.startswith(GENERATOR):
        return _generated_rows(data, seed)
    if data.source.startswith("datasets:"):
        rows = _datasets_rows(data)
    elif names_files(data.source):
        rows = file_rows(data)
    elif FUNCTION.fullmatch(data.source):
        rows = _function_rows(data, seed)
    else:
        raise UserError(
            f"data.{data.name}.source={data.source!r}: no such kind of source; use reasoning_gym:NAME, datasets:PATH,"
            " package.module:function, or a file that ends in .jsonl or .parquet or a folder of such, here or as"
            " s3://bucket/path; of use sft also run:NAME"
        )
    columns = _text_columns(data)
    first_rows = [_checked(row, columns, data.answer_field) for row in itertools.islice(rows, data.rows_max or None)]
    if not first_rows:
        raise UserError(f"data.{data.name}.source={data.source}: it has no rows")
    return first_rows


def _text_columns(data: DataConfig) -> list[str]:
    """The columns from which prompts and conversations are made."""
    return [data.prompt_field, "messages", "completion", "tools", data.answer_field]


def _no_text(values: Mapping[Any, Any], columns: list[str], answer_field: str) -> str:
    """Describes the first value that is not text in the columns that are read as text; empty
    without one. str() would turn it into Python's text for it (`b'x'`).
    """
    for column in columns:
        pending = [values.get(column)]
        while pending:
            value = pending.pop()
            if isinstance(value, HOLDERS):
                pending += value.values() if isinstance(value, Mapping) else value
            elif isinstance(value, BYTES) or not (column in ("tools", answer_field) or isinstance(value, PLAIN)):
                kind = type(value).__name__
                return (
                    f"{column!r} holds {kind} ({value!r:.80}), which is no text; write it as text, bytes decoded by"
                    " their encoding"
                )
    return ""


def _checked(row: Row, columns: list[str], answer_field: str) -> Row:
    if fault := _no_text(row.values, columns, answer_field):
        raise UserError(f"{row.where}: {fault}")
    pending = [(row.values, 0)]
    while pending:
        value, depth = pending.pop()
        if depth > NESTING_MAX:
            raise UserError(
                f"{row.where}: its values are nested deeper than {NESTING_MAX}; store what is deeper as text"
            )
        parts = value.values() if isinstance(value, Mapping) else value
        pending += [(part, depth + 1) for part in parts if isinstance(part, (dict, list, tuple))]
    return row


def _datasets_rows(data: DataConfig) -> Iterator[Row]:
    import datasets

    path = data.source.removeprefix("datasets:")
    check_links(
        f"data.{data.name}.source={data.source}", Path(path), (file for file in Path(path).rglob("*") if file.is_file())
    )
    arguments: dict[str, Any] = {"split": "train"} | data.args
    saved = any((Path(path) / name).is_file() for name in ("dataset_dict.json", "state.json"))
    where = f"data.{data.name}.source=datasets:{path}: cannot be loaded with {arguments}"
    try:
        with user_code():
            rows: Any = datasets.load_from_disk(path) if saved else datasets.load_dataset(path, **arguments)
            if isinstance(rows, datasets.DatasetDict):
                if arguments["split"] not in rows:
                    raise ValueError(f"{path} has the splits {', '.join(map(str, rows))}")
                rows = rows[arguments["split"]]
            for row_index, values in enumerate(rows, start=1):
                where = f"{path} row {row_index}"
                yield Row(where, dict(values), is_arrow=True)
                where = f"{path} row {row_index + 1}: cannot be read"
    except CodeRaised as error:
        raise UserError(
            f"{where} ({first_cause(error)}); check the path, and put load_dataset's arguments in args"
        ) from error


def _function_rows(data: DataConfig, seed: int) -> Iterator[Row]:
    """Yields the rows of the user's `function(**args)`, which also gets `seed` and `rows_max` if it
    has such parameters.

    The same arguments must give the same rows, as they are made again after a crash. Rows beyond
    `rows_max` are never made.
    """
    field = f"data.{data.name}.source={data.source}"
    args = json.loads(json.dumps(data.args, default=str))  # as in the run's own record
    hello: RowsHello = {
        "call": FunctionCall(data.name, data.source, args, seed, data.rows_max, data.answer_field, _text_columns(data)),
        "path": sys.path,
    }
    pool = WorkerPool(field, "rlpipe.data.rows", hello, environment={**os.environ, PARENT_VARIABLE: ""})
    row_index, is_last = 0, False
    try:
        pool.start()
        first = pool.workers[0].num_started  # it may have been killed while it loaded
        while not is_last:
            answer = pool.ask({}, ROW_TIMEOUT_S)
            if pool.workers[0].num_started != first:  # it ended between two requests: another begins with the first row
                raise ProcessEnded
            for line in answer["rows"]:
                row_index += 1
                yield Row(f"{data.source} row {row_index}", json.loads(line))
            if "error" in answer:
                raise UserError(answer["error"])
            is_last = answer["is_last"]
    except TimeoutError as error:
        raise UserError(
            f"{field} gave no row in {ROW_TIMEOUT_S:g} s (rows read before: {row_index}); does it hang?"
        ) from error
    except ProcessEnded as error:
        raise UserError(f"{field} ended its process (rows read before: {row_index}); what it said is above") from error
    finally:
        pool.close()


class RowsHello(TypedDict):
    """The first request: the fields of a FunctionCall, and the module search path of the
    process.
    """

    call: FunctionCall
    path: list[str]


def load(hello: RowsHello) -> Loaded:
    """Runs in the function's process: returns the function that answers with its next rows, each as
    a line of JSON.
    """
    sys.path[:] = hello["path"]
    call = FunctionCall(*hello["call"])
    function = load_function(f"data.{call.name}.source", call.source)
    rows = _lines(function, _arguments(function, call), call)

    def answer(_request: Record) -> Record:
        lines: list[str] = []
        ends_s = time.monotonic() + BATCH_S
        try:
            for line in rows:
                lines.append(line)
                if time.monotonic() > ends_s or len(lines) >= BATCH_ROWS:
                    return {"rows": lines, "is_last": False}
        except InvalidAnswer as error:
            return {"rows": lines, "error": str(error)}
        except CodeRaised as error:
            return {"rows": lines, "error": " ".join(f"data.{call.name}.source={call.source} raised {error}".split())}
        return {"rows": lines, "is_last": True}

    return {}, answer


def _lines(function: Callable[..., Any], arguments: dict[str, Any], call: FunctionCall) -> Iterator[str]:
    with user_code():  # a generator may raise between two rows, and so may str() of a value
        rows = function(**arguments)
        if not isinstance(rows, Iterable) or isinstance(rows, (str, bytes, Mapping)):
            raise TypeError(f"it returned a {type(rows).__name__}; it must return a list of dicts, or yield them")
        for row_index, values in enumerate(itertools.islice(rows, call.rows_max or None), start=1):
            if not isinstance(values, Mapping):
                raise InvalidAnswer(
                    f"{call.source} row {row_index}: a {type(values).__name__}, but every row must be a dict"
                )
            if fault := _no_text(values, call.columns, call.answer_field):
                raise InvalidAnswer(f"{call.source} row {row_index}: {fault}")
            yield _line(values, call.answer_field)


def _line(values: Mapping[Any, Any], answer_field: str) -> str:
    """A row as JSON, from which `sources` makes the same as from the row itself: of an answer only
    its text is used.
    """
    row = {str(key): value for key, value in values.items()}
    if type(answer := row.get(answer_field)) not in (str, int, bool, type(None)):
        row[answer_field] = str(answer)
    return json.dumps(plain_json(row))


def _arguments(function: Callable[..., Any], call: FunctionCall) -> dict[str, Any]:
    try:
        signature = inspect.signature(function)
    except ValueError:  # a function in C may have no signature
        return call.args
    offered = {"seed": call.seed, "rows_max": call.rows_max}
    arguments = {name: value for name, value in offered.items() if name in signature.parameters} | call.args
    try:
        signature.bind(**arguments)
    except TypeError as error:
        raise UserError(
            f"data.{call.name}.args={call.args}: {call.source} does not take them ({error}); it is declared {signature}"
        ) from error
    return arguments


def _generated_rows(data: DataConfig, seed: int) -> list[Row]:
    """Yields `rows_max` items of `reasoning_gym`, with the data that its own verifier needs to
    score them.
    """
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    name = data.source.removeprefix(GENERATOR)
    if data.rows_max < 1:
        raise UserError(
            f"data.{data.name}.rows_max={data.rows_max}: a generator has no end; say how many items to make"
        )
    if name not in DATASETS:
        close = difflib.get_close_matches(name, DATASETS, n=3) or sorted(DATASETS)[:3]
        raise UserError(
            f"data.{data.name}.source={data.source}: reasoning_gym has no {name!r}; it has {', '.join(close)} and"
            " others"
        )
    arguments = {"seed": seed, "size": data.rows_max} | data.args
    try:
        items = list(reasoning_gym.create_dataset(name, **arguments))
    except (ValueError, TypeError, AssertionError) as error:
        raise UserError(f"data.{data.name}.args={data.args}: reasoning_gym's {name} refuses them ({error})") from error
    literal, rows = _is_literal(items[0]), []
    for index, item in enumerate(items):
        verifier = {"dataset": name, "args": arguments, "entry": repr(item) if literal else item}
        values = {data.prompt_field: item["question"], data.answer_field: item["answer"], "reasoning_gym": verifier}
        rows.append(Row(f"{data.source} item {data.name}/{index}", values))
    return rows


def _is_literal(item: Any) -> bool:
    """True when Python's literal text restores the item: some verifiers need tuples, which JSON
    would lose.
    """
    try:
        return ast.literal_eval(repr(item)) == item
    except (ValueError, SyntaxError):
        return False


if __name__ == "__main__":
    die_with_parent()
    serve(load)
