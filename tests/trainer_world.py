"""A tiny world for the trainer's tests: a model, data in a store, job bodies.

No process is started here.
"""

from __future__ import annotations

import dataclasses
import gc
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from rlpipe.base.manifests import Manifest
from rlpipe.base.references import ArtifactRef, FileRecord
from rlpipe.base.values import JsonDict
from rlpipe.config.operational import TrainerConfig
from rlpipe.store.artifacts import commit, new_attempt, write_bytes
from rlpipe.store.backend import Store
from rlpipe.trainer.jobs import AnyJob, job_of
from rlpipe.trainer.process import TrainerOptions
from rlpipe.trainer.ranks import Ranks, join_ranks
from rlpipe.trainer.trainer import Trainer
from tests.rows import CONVERSATIONS, to_parquet

VOCAB = 320
MODEL: JsonDict = {
    "model_type": "qwen3", "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "tie_word_embeddings": True,
    "max_position_embeddings": 512, "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip
SHARED: JsonDict = {"learning_rate": 1e-3, "warmup_steps": 2, "weight_decay": 0.01}
RL: JsonDict = {**SHARED, "num_steps": 2, "completion_tokens_max": 16}
SFT: JsonDict = {**SHARED, "num_steps": 3, "batch_size": 16}


def options(
    folder: Path, port: int = 0, work_dir: str = "", dtype: str = "float32", silent_s_max: float = 120.0, **trainer: Any
) -> TrainerOptions:
    """`trainer`: fields of TrainerConfig."""
    return TrainerOptions(
        store=f"file://{folder}/store", run="a", host="127.0.0.1", port=port, work_dir=work_dir or f"{folder}/work",
        dtype=dtype,
        trainer=TrainerConfig(**trainer), silent_s_max=silent_s_max,
    )  # fmt: skip


def one_rank(folder: Path, **changes: Any) -> Ranks:
    """A trainer of one rank: this process."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    return join_ranks(options(folder, **changes))


def committed(store: Store, folder: str, files: list[FileRecord], metrics: JsonDict | None = None) -> ArtifactRef:
    manifest = Manifest("run", "rl", 0, "stage", {}, "", {}, files, metrics or {}, None, "test", "", "")
    return commit(store, folder, manifest)[0]


def artifact(store: Store, folder: str, files: dict[str, bytes], metrics: JsonDict | None = None) -> ArtifactRef:
    attempt = new_attempt()
    records = [write_bytes(store, folder, attempt, name, data) for name, data in files.items()]
    return committed(store, folder, records, metrics)


def saved(store: Store, folder: str, records: list[JsonDict]) -> ArtifactRef:
    """Commits what a /save wrote, as the stages do."""
    return committed(store, folder, [FileRecord(**record) for record in records])


def digests(records: list[JsonDict]) -> dict[str, str]:
    return {record["name"].split("/", 1)[1]: record["sha256"] for record in records}


def rollout_rows(num_groups: int, group_size: int, seed: int = 0, longest: int = 24) -> list[JsonDict]:
    random = np.random.default_rng(seed)
    rows = []
    for group in range(num_groups):
        prompt = random.integers(2, VOCAB, random.integers(4, 16)).tolist()
        for _ in range(group_size):
            length = int(random.integers(1, longest))
            rows.append(
                {
                    "group_index": group,
                    "prompt_tokens": prompt,
                    "completion_tokens": random.integers(2, VOCAB, length).tolist(),
                    "loss_mask": [int(value) for value in random.random(length) < 0.9],
                    "rollout_logprobs": (-5.8 + 0.1 * random.standard_normal(length)).tolist(),
                    "reward": float(random.standard_normal()),
                }
            )
    return rows


def poisoned(rows: list[JsonDict]) -> list[JsonDict]:
    """The rows, the first of them with logprobs that make its loss NaN."""
    count = len(rows[0]["loss_mask"])
    return [{**rows[0], "loss_mask": [1] * count, "rollout_logprobs": [float("nan")] * count}, *rows[1:]]


def batch(store: Store, folder: str, rows: list[JsonDict], empty_groups: Sequence[int] = ()) -> ArtifactRef:
    import pyarrow as pa

    schema = pa.schema(
        [
            ("group_index", pa.int32()),
            ("rollout_index", pa.int32()),
            ("prompt_tokens", pa.list_(pa.int32())),
            ("completion_tokens", pa.list_(pa.int32())),
            ("loss_mask", pa.list_(pa.int8())),
            ("rollout_logprobs", pa.list_(pa.float32())),
            ("reward", pa.float64()),
            *([("advantage", pa.float64())] if any("advantage" in row for row in rows) else []),
            *([("prompt_id", pa.string())] if any("prompt_id" in row for row in rows) else []),
        ]
    )
    groups = [row["group_index"] for row in rows]
    rows = [row | {"rollout_index": groups[:at].count(row["group_index"])} for at, row in enumerate(rows)]
    return artifact(store, folder, {"batch.parquet": to_parquet(rows, schema)}, {"empty_groups": [*empty_groups]})


def conversations(store: Store, folder: str, count: int, seed: int = 0) -> ArtifactRef:
    random = np.random.default_rng(seed)
    rows = []
    for _ in range(count):
        length = int(random.integers(6, 40))
        mask = [0] * (length // 2) + [1] * (length - length // 2)
        rows.append({"tokens": random.integers(2, VOCAB, length).tolist(), "loss_mask": mask})
    return artifact(store, folder, {"conversations.parquet": to_parquet(rows, CONVERSATIONS)})


def load_new(position: str = "new", seed: int = 0, model: JsonDict | None = None) -> JsonDict:
    new = {"config": model or MODEL, "seed": seed}
    return {"position": position, "new": new, "policy": None, "state": None}


def load_ref(position: str, kind: str, ref: ArtifactRef) -> JsonDict:
    return {"position": position, "new": None, "policy": None, "state": None, kind: ref.as_json()}


def train(start: str, result: str, kind: str, data: ArtifactRef, changes: JsonDict | None = None) -> JsonDict:
    """A training job; `changes`: settings, and `first_step` and `seed`, which stand beside them."""
    beside = {"reference": None} if kind == "rl" else {"seed": 0}
    job = {"start": start, "result": result, "kind": kind, "data": data.as_json(), "first_step": 0, **beside}
    job |= {name: value for name, value in (changes or {}).items() if name in job}
    settings = {name: value for name, value in (changes or {}).items() if name not in job}
    return job | {"settings": {**(RL if kind == "rl" else SFT), **settings}}


def run(trainer: Trainer, kind: str, body: JsonDict) -> JsonDict:
    """What the trainer does with a request."""
    return do(trainer, job_of(kind, json.dumps(body).encode()))


def do(trainer: Trainer, job: AnyJob) -> JsonDict:
    """One job.

    A load looks for garbage in what tests made: what they import stays frozen (tests/conftest.py).
    """
    with patch("rlpipe.trainer.trainer.settle_heap", gc.collect):
        return dataclasses.asdict(trainer.run(job))


def save(position: str, policy: str | None, state: str | None, gap: str | None = None) -> JsonDict:
    return {"position": position, "policy_folder": policy, "state_folder": state, "attempt": "a1",
            "tokenizer": None, "stop_token_ids": [],
            "context_tokens_max": 64, "gap_folder": gap}  # fmt: skip


def fingerprint(tensors: list[torch.Tensor]) -> str:
    """One hash of the bits of tensors."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()
