"""The annotations that define how fields of records are stored. Imports no Arrow, which child
processes that score do not need.
"""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

import numpy as np
from pydantic import TypeAdapter

Kind = Literal["int32", "int64", "text", "float64", "tokens", "mask", "logprobs", "halves", "spans"]


class Span(NamedTuple):
    """Consecutive tokens of a completion that one weight version sampled.

    Example: Span(version=3, num_tokens=17).
    """

    version: int
    num_tokens: int


class Json(NamedTuple):
    """The annotation of a field that is stored as JSON text; None is stored as null.

    `record`: the dataclass that it is read as.
    """

    sort_keys: bool = False
    record: type[Any] | None = None


Int32 = Annotated[int, "int32"]
Int64 = Annotated[int, "int64"]
Text = Annotated[str, "text"]
OptionalText = Annotated[str | None, "text"]
Float = Annotated[float, "float64"]
OptionalFloat = Annotated[float | None, "float64"]
Tokens = Annotated[np.ndarray, "tokens"]  # int32
Mask = Annotated[np.ndarray, "mask"]  # int8
Logprobs = Annotated[np.ndarray, "logprobs"]  # float32
Halves = Annotated[np.ndarray, "halves"]  # float16
Spans = Annotated[tuple[Span, ...], "spans"]


@cache
def optional_columns(record: type[Any]) -> frozenset[str]:
    """The columns of a record that may be null."""
    hints = get_type_hints(record, include_extras=True)
    return frozenset(
        name
        for name, kind in column_kinds(record).items()
        if isinstance(kind, Json) or type(None) in get_args(get_args(hints[name])[0])
    )


@cache
def _adapter(record: type[Any], name: str) -> TypeAdapter[Any]:
    return TypeAdapter(get_args(get_type_hints(record, include_extras=True)[name])[0])


def json_fits(record: type[Any], name: str, value: Any) -> None:
    """Raises ValueError when the JSON value of a column is not of the field's type."""
    _adapter(record, name).validate_python(value)


@cache
def column_kinds(record: type[Any]) -> dict[str, Kind | Json]:
    """The columns of a record: its annotated fields, in order."""
    hints = get_type_hints(record, include_extras=True)
    names = [field.name for field in dataclasses.fields(record) if get_origin(hints[field.name]) is Annotated]
    return {name: get_args(hints[name])[1] for name in names}
