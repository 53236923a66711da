"""The Parquet files of a store as any other tool reads them: rows are dicts, and
the schemas stand here in full."""

from __future__ import annotations

import io
import json
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rlpipe.base.references import ArtifactRef
from rlpipe.base.values import JsonDict
from rlpipe.records.kinds import Span
from rlpipe.records.prompt import Prompt
from rlpipe.records.rollout import EnvironmentOutcome, Rollout
from rlpipe.store.artifacts import read_file, read_manifest
from rlpipe.store.backend import Store

PROMPT_FIELDS: list[tuple[str, Any]] = [
    ("prompt_id", pa.string()),
    ("source", pa.string()),
    ("messages", pa.string()),  # JSON
    ("answer", pa.string()),
    ("metadata", pa.string()),  # JSON
    ("prompt_tokens", pa.list_(pa.int32())),
]
PROMPTS = pa.schema(PROMPT_FIELDS)
WEIGHT_VERSIONS = pa.list_(pa.struct([("version", pa.int32()), ("num_tokens", pa.int32())]))
ROLLOUTS = pa.schema(
    [
        ("prompt_id", pa.string()),
        ("group_index", pa.int32()),
        ("rollout_index", pa.int32()),
        ("prompt", pa.string()),
        ("prompt_tokens", pa.list_(pa.int32())),
        ("completion", pa.string()),
        ("completion_tokens", pa.list_(pa.int32())),
        ("loss_mask", pa.list_(pa.int8())),
        ("rollout_logprobs", pa.list_(pa.float32())),
        ("weight_version", pa.int32()),
        ("weight_versions", WEIGHT_VERSIONS),
        ("finish_reason", pa.string()),
        ("seed", pa.int64()),
        ("engine", pa.string()),
        # JSON: reward, num_turns, fault, metrics, messages; empty without an environment
        ("environment", pa.string()),
    ]
)
SCORES = pa.schema([*ROLLOUTS, ("reward", pa.float64()), ("reward_parts", pa.string()), ("reward_fault", pa.string())])
BATCH = pa.schema([*SCORES, ("advantage", pa.float64())])
CARRIED_ROLLOUT = [
    "group_index", "rollout_index", "completion_tokens", "rollout_logprobs", "weight_versions", "finish_reason", "seed",
    "engine",
]  # fmt: skip
CARRIED = pa.schema([
    *PROMPT_FIELDS, *(ROLLOUTS.field(name) for name in CARRIED_ROLLOUT), ("num_tokens_expired", pa.int32()),
    ("environment", pa.string()),
])  # fmt: skip
PASS_RATES = pa.schema([("prompt_id", pa.string()), ("num_groups", pa.int32()), ("pass_rate", pa.float64())])
GAPS = pa.schema([("group_index", pa.int32()), ("rollout_index", pa.int32()), ("gap", pa.list_(pa.float16()))])
KEPT_REWARDS = pa.schema(
    [SCORES.field(name) for name in ("group_index", "rollout_index", "reward", "reward_parts", "reward_fault")]
)
CONVERSATIONS = pa.schema([("tokens", pa.list_(pa.int32())), ("loss_mask", pa.list_(pa.int8()))])


def to_parquet(rows: list[JsonDict], schema: pa.Schema) -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), sink)
    return sink.getvalue()


def from_parquet(data: bytes, schema: pa.Schema) -> list[JsonDict]:
    table = pq.read_table(pa.BufferReader(data))
    assert table.schema.equals(schema), f"{table.schema}\nis not\n{schema}"
    return table.to_pylist()


def read_rows(store: Store, ref: ArtifactRef, name: str, schema: pa.Schema) -> list[JsonDict]:
    record = read_manifest(store, ref.folder, ref.sha256).file(name)
    return from_parquet(read_file(store, ref.folder, record), schema)


def fill(row: JsonDict, schema: pa.Schema) -> JsonDict:
    """The row with the schema's columns: those that it lacks are "", 0 or []."""
    return {field.name: row.get(field.name, _nothing(field.type)) for field in schema}


def _nothing(kind: pa.DataType) -> Any:
    return [] if pa.types.is_list(kind) else "" if pa.types.is_string(kind) else 0


def grouped(rows: list[JsonDict]) -> list[list[JsonDict]]:
    groups: dict[int, list[JsonDict]] = {}
    for row in rows:
        groups.setdefault(row["group_index"], []).append(row)
    return list(groups.values())


def finished(group: list[JsonDict]) -> bool:
    return all(row["finish_reason"] != "abort" for row in group)


def spans_of(row: JsonDict) -> list[tuple[int, int]]:
    return [(span["version"], span["num_tokens"]) for span in row["weight_versions"]]


def prompt_of(row: JsonDict) -> JsonDict:
    """A stored prompt as a reward gets it."""
    json_fields = {name: json.loads(row[name]) for name in ("messages", "metadata")}
    return {"prompt_id": row["prompt_id"], "answer": row["answer"], **json_fields}


def prompt_record(row: JsonDict) -> Prompt:
    """A stored prompt as the record."""
    return Prompt(**prompt_of(row), source=row["source"], prompt_tokens=np.array(row["prompt_tokens"], dtype=np.int32))


def rollout(row: JsonDict) -> Rollout:
    """A row, with what it lacks left at nothing, as the record."""
    filled = {**fill(row, BATCH), "reward": row.get("reward")}
    outcome = json.loads(filled["environment"] or "{}")
    defaults = {"num_turns": 1, "reward": 0.0, "fault": ""}
    arrays = {
        "prompt_tokens": np.int32,
        "completion_tokens": np.int32,
        "loss_mask": np.int8,
        "rollout_logprobs": np.float32,
    }
    filled |= {name: np.array(filled[name], dtype=kind) for name, kind in arrays.items()}
    filled["weight_versions"] = tuple(Span(**span) for span in filled["weight_versions"])
    filled["environment"] = EnvironmentOutcome(**(defaults | outcome)) if outcome else None
    filled["reward_parts"] = json.loads(filled["reward_parts"] or "{}")
    return Rollout(**filled)
