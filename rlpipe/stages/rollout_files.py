"""Parquet files of rollouts from anywhere: indexed by group and checked row by row before anything is trained on them."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import BaseModel, Field, NonNegativeInt, TypeAdapter, ValidationError

from rlpipe.data.prompt import Prompt
from rlpipe.rollouts import ROLLOUTS, SCORES, fill, prompt_row
from rlpipe.stages.carrying import CUT_SHORT
from rlpipe.store.artifacts import file_sha256
from rlpipe.types import JsonDict, UserError

log = logging.getLogger(__name__)
REQUIRED = ["prompt_id", "group_index", "prompt_tokens", "completion_tokens", "rollout_logprobs"]
REWARD = ["reward", "reward_parts"]
READ_ROWS = 1024
Finite = Annotated[float, Field(allow_inf_nan=False)]


class EnvironmentRecord(BaseModel):
    """What is read of what an environment recorded of a rollout."""

    reward: Finite
    num_turns: NonNegativeInt
    fault: str  # empty without one
    metrics: dict[str, Finite]


RECORDS: dict[str, TypeAdapter[Any]] = {  # the columns that are JSON
    "environment": TypeAdapter(EnvironmentRecord),
    "reward_parts": TypeAdapter(dict[str, Finite]),
}


@dataclass(frozen=True)
class GroupPlace:
    """Where a group lies: rows first..first + count of a file."""

    path: Path
    first: int
    count: int


@dataclass
class PromptBook:
    """The prompts of the data sets, by id and text. An id alone proves nothing: other data have the same ids."""

    by_id: dict[tuple[str, str], Prompt] = field(default_factory=dict)
    by_text: dict[str, Prompt | None] = field(default_factory=dict)  # None: two prompts of that text have different answers

    @classmethod
    def of(cls, prompts: list[Prompt]) -> PromptBook:
        book = cls()
        for prompt in prompts:
            text = str(prompt.messages[-1]["content"])
            book.by_id[prompt.prompt_id, text] = prompt
            seen = book.by_text.setdefault(text, prompt)
            if seen is not None and seen.answer != prompt.answer:
                book.by_text[text] = None
        return book

    def find(self, row: JsonDict) -> Prompt | None:
        """The prompt of a rollout, or None."""
        text = row.get("prompt") or ""
        return self.by_id.get((row["prompt_id"], text)) or self.by_text.get(text)


@dataclass
class FileRollouts:
    """The whole groups of one file, or of a folder's files in the order of their paths."""

    name: str
    book: PromptBook
    groups: list[GroupPlace] = field(default_factory=list)
    num_unfinished: int = 0  # groups that were cut short: left out
    sha256: dict[Path, str] = field(default_factory=dict)
    largest_token: tuple[int, str] = (0, "")  # and where it is
    _stamps: dict[Path, tuple[int, int]] = field(default_factory=dict)

    @classmethod
    def open(cls, name: str, group_size: int, context_tokens_max: int, prompts: list[Prompt]) -> FileRollouts:
        """Reads everything once; UserError naming the file, its row or its columns."""
        path = Path(name).expanduser()
        paths = sorted(path.rglob("*.parquet")) if path.is_dir() else [path]
        if not paths or not paths[0].is_file():
            raise UserError(
                f"rl.rollouts_from={name!r}: no Parquet file there; use run:NAME, a .parquet file or a folder of them"
            )
        opened = cls(name, PromptBook.of(prompts))
        for each in paths:
            opened._stamps[each], opened.sha256[each] = _stamp(each), file_sha256(each)
            opened._index(each, group_size, context_tokens_max)
        if opened.num_unfinished:
            log.warning("rl.rollouts_from=%s: %d groups that were cut short are left out", name, opened.num_unfinished)
        return opened

    def _index(self, path: Path, group_size: int, context_tokens_max: int) -> None:
        first = 0
        for rows in _contiguous_groups(path):
            for offset, row in enumerate(rows):
                self._check_row(f"{path} row {first + offset + 1}", row, context_tokens_max)
            if any(row.get("finish_reason") == CUT_SHORT for row in rows):
                self.num_unfinished += 1
            else:
                self._check_group(f"{path} rows {first + 1} to {first + len(rows)}", rows, group_size)
                self.groups.append(GroupPlace(path, first, len(rows)))
            first += len(rows)

    def _check_row(self, where: str, row: JsonDict, context_tokens_max: int) -> None:
        prompt, completion = row["prompt_tokens"] or [], row["completion_tokens"] or []
        lengths = {name: len(row[name]) for name in ("rollout_logprobs", "loss_mask") if row.get(name) is not None}
        if row["prompt_id"] is None or row["group_index"] is None or not prompt or "rollout_logprobs" not in lengths:
            raise UserError(f"{where}: prompt_id, group_index, prompt_tokens and rollout_logprobs must not be empty")
        for name, length in lengths.items():
            if length != len(completion):
                raise UserError(f"{where}: {length} {name}, but {len(completion)} completion_tokens")
        if any(value is None or not math.isfinite(value) for value in row["rollout_logprobs"]):
            raise UserError(f"{where}: rollout_logprobs has a value that is no number")
        spans = row.get("weight_versions")
        if spans is not None and sum(span["num_tokens"] for span in spans) != len(completion):
            raise UserError(f"{where}: weight_versions do not add up to its {len(completion)} completion_tokens")
        for name in RECORDS:
            _check_record(where, name, row.get(name))
        tokens = [*prompt, *completion]
        if any(token is None or token < 0 for token in tokens):
            raise UserError(f"{where}: a token id is missing or below 0")
        if len(tokens) > context_tokens_max:
            raise UserError(
                f"{where}: {len(tokens)} tokens; model.context_tokens_max={context_tokens_max} has no room for them"
            )
        if max(tokens) > self.largest_token[0]:
            self.largest_token = max(tokens), where

    def _check_group(self, where: str, rows: list[JsonDict], group_size: int) -> None:
        told = f"{where}: group {rows[0]['group_index']} of prompt {rows[0]['prompt_id']}"
        if len(rows) != group_size:
            raise UserError(
                f"{told} has {len(rows)} rollouts, and rl.group_size={group_size}: a group is whole and its rows are side by side"
            )
        if any(row["prompt_tokens"] != rows[0]["prompt_tokens"] for row in rows):
            raise UserError(f"{told} has more than one prompt")
        indices = [row["rollout_index"] for row in rows if row.get("rollout_index") is not None]
        if indices and len(set(indices)) != len(rows):
            raise UserError(f"{told} has the rollout_index {indices}: every rollout needs another one")
        rewards = [row.get("reward") for row in rows]
        if self.book.find(rows[0]) is None and any(reward is None or not math.isfinite(reward) for reward in rewards):
            raise UserError(
                f"{told} is in no data set of use = 'rl', and it has no `reward` to keep: add the data set, or the rewards"
            )

    def read(self, first: int, count: int) -> tuple[list[JsonDict], list[JsonDict], list[JsonDict]]:
        """Groups first..first + count, numbered from 0: (rows of PROMPTS, of ROLLOUTS, of KEPT_REWARDS).

        UserError when a file is no longer the one that was opened.
        """
        prompts: dict[str, JsonDict] = {}
        rollouts: list[JsonDict] = []
        rewards: list[JsonDict] = []
        for group_index, rows in enumerate(self._read_groups(self.groups[first : first + count])):
            prompt = self._prompt_row(rows[0])
            if prompts.setdefault(prompt["prompt_id"], prompt)["prompt_tokens"] != prompt["prompt_tokens"]:
                raise UserError(f"rl.rollouts_from={self.name!r}: two different prompts are called {prompt['prompt_id']}")
            for index, row in enumerate(rows):
                told = _completed(row, group_index, index)
                rollouts.append(told)
                if self.book.find(row) is None:
                    place = {name: told[name] for name in ("group_index", "rollout_index")}
                    rewards.append({**place, "reward": row["reward"], "reward_parts": row.get("reward_parts") or "{}"})
        return list(prompts.values()), rollouts, rewards

    def _prompt_row(self, row: JsonDict) -> JsonDict:
        unknown = Prompt("", "stored", [{"role": "user", "content": row.get("prompt") or ""}], None)
        return prompt_row(self.book.find(row) or unknown, row["prompt_tokens"]) | {"prompt_id": row["prompt_id"]}

    def _read_groups(self, places: list[GroupPlace]) -> Iterator[list[JsonDict]]:
        for path in dict.fromkeys(place.path for place in places):
            if _stamp(path) != self._stamps[path] and file_sha256(path) != self.sha256[path]:
                raise UserError(
                    f"rl.rollouts_from: {path} was changed while it is trained on: restore it, or start another run"
                )
            mine = [place for place in places if place.path == path]
            start = mine[0].first
            rows = _read(path, start, mine[-1].first + mine[-1].count)
            for place in mine:
                yield rows[place.first - start : place.first - start + place.count]


def _check_record(where: str, name: str, text: str | None) -> None:
    try:
        if text:
            RECORDS[name].validate_json(text, strict=True)
    except ValidationError as error:
        faults = "; ".join(": ".join([*map(str, fault["loc"]), fault["msg"]]) for fault in error.errors())
        raise UserError(f"{where}: {name} {text!r:.80}: {faults}; mend it, or leave the column away") from error


def _stamp(path: Path) -> tuple[int, int]:
    told = path.stat()
    return told.st_size, told.st_mtime_ns


def _contiguous_groups(path: Path) -> Iterator[list[JsonDict]]:
    """Rows side by side with one group_index and prompt_id: files of several iterations may be written one after another."""
    group: list[JsonDict] = []
    for row in _rows(path):
        if group and any(row[name] != group[0][name] for name in ("group_index", "prompt_id")):
            yield group
            group = []
        group.append(row)
    if group:
        yield group


def _rows(path: Path) -> Iterator[JsonDict]:
    try:
        with pq.ParquetFile(path) as file:
            names = file.schema_arrow.names
            missing = [name for name in REQUIRED if name not in names]
            if missing:
                raise UserError(f"{path}: rollouts need the column {', '.join(missing)} (it has: {', '.join(names)})")
            wanted = [name for name in (*ROLLOUTS.names, *REWARD) if name in names]
            for batch in file.iter_batches(batch_size=READ_ROWS, columns=wanted):
                yield from _typed(pa.Table.from_batches([batch])).to_pylist()
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError) as error:
        raise UserError(f"{path}: not a readable Parquet file of rollouts ({error})") from error


def _read(path: Path, start: int, end: int) -> list[JsonDict]:
    """Rows start..end of a file, by its row groups."""
    tables, offset = [], 0
    with pq.ParquetFile(path) as file:
        wanted = [name for name in (*ROLLOUTS.names, *REWARD) if name in file.schema_arrow.names]
        for index in range(file.num_row_groups):
            count = file.metadata.row_group(index).num_rows
            if offset < end and start < offset + count:
                first = max(0, start - offset)
                tables.append(file.read_row_group(index, columns=wanted).slice(first, min(count, end - offset) - first))
            offset += count
    return _typed(pa.concat_tables(tables)).to_pylist()


def _typed(table: pa.Table) -> pa.Table:
    """The table with our types; ArrowInvalid when a value does not fit."""
    return table.cast(pa.schema([SCORES.field(name) for name in table.column_names]))


def _completed(row: JsonDict, group_index: int, index: int) -> JsonDict:
    """A row of ROLLOUTS: what the file leaves away has its default (docs/what-if.md)."""
    length = len(row["completion_tokens"])
    version = row.get("weight_version") or 0
    told = {name: value for name, value in row.items() if value is not None and name not in REWARD}
    defaults = {
        "rollout_index": index,
        "loss_mask": [1] * length,
        "weight_version": version,
        "weight_versions": [{"version": version, "num_tokens": length}] if length else [],
        "finish_reason": "stop",
        "engine": "stored",
    }
    return fill({**defaults, **told, "group_index": group_index}, ROLLOUTS)
