"""Rollouts, prompts and conversations as Parquet: one row each, one schema, readable by DuckDB, pandas and `datasets`."""

from __future__ import annotations

import io
import json
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rlpipe.data.prompt import Prompt
from rlpipe.store.artifacts import read_file, read_manifest
from rlpipe.store.backend import Store
from rlpipe.types import ArtifactRef, JsonDict

PROMPT_FIELDS: list[tuple[str, Any]] = [
    ("prompt_id", pa.string()),
    ("source", pa.string()),
    ("messages", pa.string()),  # JSON
    ("answer", pa.string()),
    ("metadata", pa.string()),  # JSON
    ("prompt_tokens", pa.list_(pa.int32())),
]
PROMPTS = pa.schema(PROMPT_FIELDS)
# spans of the completion in order; they add up to its tokens
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
        ("weight_version", pa.int32()),  # of the last token
        ("weight_versions", WEIGHT_VERSIONS),
        ("finish_reason", pa.string()),
        ("seed", pa.int64()),
        ("engine", pa.string()),
        ("environment", pa.string()),  # JSON: reward, num_turns, fault, metrics, messages; empty without an environment
    ]
)
SCORES = pa.schema([*ROLLOUTS, ("reward", pa.float64()), ("reward_parts", pa.string()), ("reward_fault", pa.string())])
BATCH = pa.schema([*SCORES, ("advantage", pa.float64())])
# the groups that an iteration hands to the next: the prompt, and each rollout as it is continued
CARRIED_ROLLOUT = ["group_index", "rollout_index", "completion_tokens", "rollout_logprobs", "weight_versions", "finish_reason",
                   "seed", "engine"]  # fmt: skip
CARRIED = pa.schema([*PROMPT_FIELDS, *(ROLLOUTS.field(name) for name in CARRIED_ROLLOUT), ("num_tokens_expired", pa.int32())])
# the running pass rate of every prompt that was ever tried: what the curriculum of the next iteration draws by
PASS_RATES = pa.schema([("prompt_id", pa.string()), ("num_groups", pa.int32()), ("pass_rate", pa.float64())])
# the rewards of imported rollouts whose prompt is not known, so that they cannot be scored
KEPT_REWARDS = pa.schema([SCORES.field(name) for name in ("group_index", "rollout_index", "reward", "reward_parts")])
CONVERSATIONS = pa.schema([("tokens", pa.list_(pa.int32())), ("loss_mask", pa.list_(pa.int8()))])


def to_parquet(rows: list[JsonDict], schema: pa.Schema) -> bytes:
    """The rows as zstd Parquet, logprobs split by byte stream. Deterministic: equal rows give equal bytes."""
    table = pa.Table.from_pylist(rows, schema=schema)
    sink = io.BytesIO()
    logprobs = {"rollout_logprobs.list.element": "BYTE_STREAM_SPLIT"} if "rollout_logprobs" in schema.names else None
    dictionary = [name for name in ("prompt_id", "prompt", "finish_reason", "engine", "source") if name in schema.names]
    pq.write_table(table, sink, compression="zstd", use_dictionary=dictionary, column_encoding=logprobs)  # pyright: ignore[reportArgumentType]
    data = sink.getvalue()
    assert pq.read_metadata(io.BytesIO(data)).num_rows == len(rows), "rows were lost in writing"
    return data


def from_parquet(data: bytes, schema: pa.Schema) -> list[JsonDict]:
    """The rows of Parquet bytes; AssertionError when it is of another schema."""
    table = pq.read_table(io.BytesIO(data))
    assert table.schema.names == schema.names, f"columns {table.schema.names}, expected {schema.names}"
    return table.to_pylist()


def fill(row: JsonDict, schema: pa.Schema) -> JsonDict:
    """The row with the schema's columns: those that it leaves away are "", 0 or []; others of it are left away."""
    return {field.name: row.get(field.name, _nothing(field.type)) for field in schema}


def _nothing(kind: pa.DataType) -> Any:
    if pa.types.is_list(kind):
        return []
    return "" if pa.types.is_string(kind) else 0


def read_rows(store: Store, ref: ArtifactRef, name: str, schema: pa.Schema) -> list[JsonDict]:
    """All rows of one Parquet file of an artifact, verified."""
    record = read_manifest(store, ref.folder, ref.sha256).file(name)
    return from_parquet(read_file(store, ref.folder, record), schema)


def read_rows_if_any(store: Store, ref: ArtifactRef, name: str, schema: pa.Schema) -> list[JsonDict]:
    """All rows of one Parquet file of an artifact; none where the artifact has no such file."""
    manifest = read_manifest(store, ref.folder, ref.sha256)
    return read_rows(store, ref, name, schema) if any(record.plain_name == name for record in manifest.files) else []


def grouped(rows: list[JsonDict]) -> list[list[JsonDict]]:
    """Rollouts by `group_index`, in the order in which the groups come."""
    groups: dict[int, list[JsonDict]] = {}
    for row in rows:
        groups.setdefault(row["group_index"], []).append(row)
    return list(groups.values())


def prompt_row(prompt: Prompt, tokens: list[int]) -> JsonDict:
    """A prompt as it is stored; `tokens`: those of what the policy is asked."""
    return {
        "prompt_id": prompt.prompt_id,
        "source": prompt.source,
        "messages": json.dumps(prompt.messages),
        "answer": prompt.answer,
        "metadata": json.dumps(prompt.metadata),
        "prompt_tokens": tokens,
    }


def prompt_of(row: JsonDict) -> JsonDict:
    """A stored prompt row as what a reward function gets."""
    return {
        "prompt_id": row["prompt_id"],
        "messages": json.loads(row["messages"]),
        "answer": row["answer"],
        "metadata": json.loads(row["metadata"]),
    }
