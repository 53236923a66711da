"""Parquet files of rollouts from outside rlpipe (docs/what-if.md): read group by group, and checked
before anything is trained on them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pydantic import BaseModel, Field, NonNegativeInt, TypeAdapter, ValidationError

from rlpipe.base.errors import UserError
from rlpipe.base.values import expanded
from rlpipe.data.links import check_links
from rlpipe.records.columns import from_table, schema_of
from rlpipe.records.messages import content_text
from rlpipe.records.prompt import Prompt
from rlpipe.records.rollout import SCORES, UNRECORDED, Group, Rollout, is_finished

log = logging.getLogger(__name__)
READ_ROWS = 1024
UNKNOWN_SOURCE = "stored"  # of a prompt that is in no data set
REQUIRED = ["prompt_id", "group_index", "prompt_tokens", "completion_tokens"]
DEFAULTS = {"rollout_index": -1, "prompt": "", "completion": "", "weight_version": 0,
            "finish_reason": "stop", "seed": 0,
            "engine": UNKNOWN_SOURCE, "reward_parts": "{}"}  # fmt: skip
# what is refused by row
MISSING = {"prompt_tokens": -1, "completion_tokens": -1, "rollout_logprobs": float("nan"), "loss_mask": -1}
SCHEMA = schema_of(Rollout, [name for name in SCORES if name != "reward_fault"])
Finite = Annotated[float, Field(allow_inf_nan=False)]


class OutcomeText(BaseModel):
    """The fields that are read from an environment's record of a rollout."""

    reward: Finite
    num_turns: NonNegativeInt
    fault: str  # empty without one
    metrics: dict[str, Finite]


JSON_COLUMNS: dict[str, TypeAdapter[Any]] = {
    "environment": TypeAdapter(OutcomeText),
    "reward_parts": TypeAdapter(dict[str, Finite]),
}
# None: two prompts of that text have different answers
PromptBook = dict[tuple[str, str], Prompt | None]


def prompt_book(prompts: list[Prompt]) -> PromptBook:
    """The prompts by (id, text) and by ("", text).

    An id alone proves nothing: other data may use the same ids.
    """
    book: PromptBook = {}
    for prompt in prompts:
        text = content_text(prompt.messages[-1])
        book[prompt.prompt_id, text] = prompt
        seen = book.setdefault(("", text), prompt)
        if seen is not None and seen.answer != prompt.answer:
            book["", text] = None
    return book


@dataclass(frozen=True)
class ForeignFiles:
    """A Parquet file, or a folder of them in the order of their paths, and the facts that their
    rollouts must fit.
    """

    name: str  # as rl.rollouts_from has it
    context_tokens_max: int
    vocab_size: int
    book: PromptBook  # of the data sets of use rl

    def paths(self) -> list[Path]:
        """The Parquet files; UserError when there is none."""
        path = expanded(self.name)
        paths = sorted(path.rglob("*.parquet")) if path.is_dir() else [path]
        if not paths or not paths[0].is_file():
            raise UserError(
                f"rl.rollouts_from={self.name!r}: no Parquet file there; use run:NAME, a .parquet file or a folder of"
                " them"
            )
        if path.is_dir():
            check_links(f"rl.rollouts_from={self.name!r}", path, paths)
        return paths

    def groups(self) -> Iterator[tuple[Prompt, Group]]:
        """The whole groups with their prompts, in order; UserError naming the file, its row or its
        columns.

        Rewards are kept where the prompt is in no data set. Unfinished groups are left out. The
        rollouts of a group are adjacent rows, any number of them: files of several iterations may
        be written one after another.
        """
        num_unfinished = 0
        for path in self.paths():
            num_rows, seen = 0, set[tuple[int, str]]()
            for key, rows in groupby(_rollouts(path), key=lambda rollout: (rollout.group_index, rollout.prompt_id)):
                group, first = [*rows], num_rows + 1
                if len(group) == 1 and key in seen:
                    raise UserError(
                        f"{path} row {first}: group {key[0]} of prompt {key[1]} had ended: its rows must be side by"
                        " side"
                    )
                seen.add(key)
                for num_rows, rollout in enumerate(group, start=first):
                    if fault := next(self._faults(rollout), ""):
                        raise UserError(f"{path} row {num_rows}: {fault}")
                if is_finished(group):
                    yield self._group(f"{path} rows {first} to {num_rows}", group)
                else:
                    num_unfinished += 1
        if num_unfinished:
            log.warning("rl.rollouts_from=%s: %d groups that were cut short are left out", self.name, num_unfinished)

    def _faults(self, rollout: Rollout) -> Iterator[str]:
        """Yields the faults of one row; the first is reported."""
        tokens, count = (
            np.concatenate([rollout.prompt_tokens, rollout.completion_tokens]),
            len(rollout.completion_tokens),
        )
        if len(tokens) == count:
            yield "prompt_tokens must not be empty"
        for name, values in (("rollout_logprobs", rollout.rollout_logprobs), ("loss_mask", rollout.loss_mask)):
            if len(values) != count:
                yield f"{len(values)} {name}, but {count} completion_tokens"
        if not np.isfinite(rollout.rollout_logprobs).all() and not has_no_logprobs(rollout):
            yield "rollout_logprobs has a value that is no number"
        if sum(span.num_tokens for span in rollout.weight_versions) != count:
            yield f"weight_versions do not add up to its {count} completion_tokens"
        if tokens.min() < 0:
            yield "a token id is missing or below 0"
        if len(tokens) > self.context_tokens_max:
            yield f"{len(tokens)} tokens; model.context_tokens_max={self.context_tokens_max} has no room for them"
        if tokens.max() >= self.vocab_size:
            yield f"token {tokens.max()} is outside the vocabulary of {self.vocab_size}: another tokenizer made it"

    def _group(self, where: str, group: Group) -> tuple[Prompt, Group]:
        first, indices = group[0], [rollout.rollout_index for rollout in group]
        label = f"{where}: group {first.group_index} of prompt {first.prompt_id}"
        known = self.book.get((first.prompt_id, first.prompt)) or self.book.get(("", first.prompt))
        if any(not np.array_equal(rollout.prompt_tokens, first.prompt_tokens) for rollout in group):
            raise UserError(f"{label} has more than one prompt")
        if indices == [DEFAULTS["rollout_index"]] * len(group):
            indices = range(len(group))
        if len(set(indices)) < len(group) or min(indices) < 0:
            raise UserError(f"{label} has the rollout_index {indices}: every rollout needs another one")
        if known is None and any(rollout.reward is None or not np.isfinite(rollout.reward) for rollout in group):
            raise UserError(
                f"{label} is in no data set of use = 'rl', and it has no `reward` to keep: add the data set, or the"
                " rewards"
            )
        group = [replace(rollout, rollout_index=index) for rollout, index in zip(group, indices, strict=True)]
        if known is not None:
            group = [replace(rollout, reward=None, reward_parts={}) for rollout in group]
        prompt = known or Prompt("", UNKNOWN_SOURCE, [{"role": "user", "content": first.prompt}], None)
        return replace(prompt, prompt_id=first.prompt_id, prompt_tokens=first.prompt_tokens), group


def has_no_logprobs(rollout: Rollout) -> bool:
    """True when the logprobs of the rollout's completion were not recorded."""
    return len(rollout.rollout_logprobs) > 0 and bool((rollout.rollout_logprobs == UNRECORDED).all())


def _rollouts(path: Path) -> Iterator[Rollout]:
    """The rows of a file; UserError when it is no file of rollouts."""
    try:
        with pq.ParquetFile(path) as file:
            names = file.schema_arrow.names
            missing = [name for name in REQUIRED if name not in names]
            if missing:
                raise UserError(f"{path}: rollouts need the column {', '.join(missing)} (it has: {', '.join(names)})")
            num_rows = 0
            for batch in file.iter_batches(READ_ROWS, columns=[name for name in SCHEMA.names if name in names]):
                table = pa.Table.from_batches([batch]).cast(schema_of(Rollout, batch.schema.names))
                yield from from_table(_completed(table, path, num_rows + 1), Rollout)
                num_rows += len(table)
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError) as error:
        raise UserError(f"{path}: not a readable Parquet file of rollouts ({error})") from error


def _completed(table: pa.Table, path: Path, first: int) -> pa.Table:
    """The rows with all columns: a column that the file lacks gets its default (docs/what-if.md).

    `first`: the number of the first row, for errors. UserError for text that cannot be read.
    """
    table = pa.concat_tables([SCHEMA.empty_table(), table], promote_options="default")
    columns: dict[str, Any] = {name: table.column(name).combine_chunks() for name in SCHEMA.names}
    for name in REQUIRED:
        if columns[name].null_count:
            raise UserError(
                f"{path} row {first + columns[name].is_null().index(True).as_py()}: {name} must not be empty"
            )
    for name, kind in JSON_COLUMNS.items():
        for row, text in enumerate(columns[name].to_pylist(), start=first):
            _check_json(f"{path} row {row}", name, kind, text)
    for row, spans in enumerate(columns["weight_versions"].to_pylist(), start=first):
        if any(span is None or None in span.values() or span["num_tokens"] < 0 for span in spans or []):
            raise UserError(f"{path} row {row}: weight_versions {spans!r:.80}: each is a version and its num_tokens")
    columns |= {name: columns[name].fill_null(value) for name, value in DEFAULTS.items()}
    offsets = columns["completion_tokens"].offsets
    ones = pa.array(np.ones(offsets[-1].as_py(), dtype=np.int8))
    unknown = pa.array(np.full(offsets[-1].as_py(), UNRECORDED, dtype=np.float32))
    spans = [
        [{"version": version, "num_tokens": length}] if length else []
        for version, length in zip(columns["weight_version"].to_pylist(), np.diff(offsets).tolist(), strict=True)
    ]
    of_lists = {
        "loss_mask": pa.ListArray.from_arrays(offsets, ones),
        "rollout_logprobs": pa.ListArray.from_arrays(offsets, unknown),
        "weight_versions": pa.array(spans, SCHEMA.field("weight_versions").type),
    }
    columns |= {name: pc.call_function("coalesce", [columns[name], value]) for name, value in of_lists.items()}
    for name, value in MISSING.items():
        columns[name] = pa.ListArray.from_arrays(columns[name].offsets, columns[name].values.fill_null(value))
    return pa.table(columns, schema=SCHEMA)


def _check_json(where: str, name: str, kind: TypeAdapter[Any], text: str | None) -> None:
    try:
        if text:
            kind.validate_json(text, strict=True)
    except ValidationError as error:
        faults = "; ".join(": ".join([*map(str, fault["loc"]), fault["msg"]]) for fault in error.errors())
        raise UserError(f"{where}: {name} {text!r:.80}: {faults}; mend it, or leave the column away") from error
