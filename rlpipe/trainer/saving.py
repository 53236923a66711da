"""Writing what is resident to the store: HF weights from rank 0, state from every rank. Manifests are the caller's."""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from rlpipe.store.artifacts import read_file, read_manifest, write_bytes, write_file
from rlpipe.trainer.batches import TrainSequence, collate
from rlpipe.trainer.gang import Gang
from rlpipe.trainer.packing import row_length
from rlpipe.trainer.state import Resident, state_file, state_record, state_tensors
from rlpipe.trainer.step import frozen_logprobs
from rlpipe.types import ArtifactRef, FileRecord, JsonDict

FILE_BYTES_MAX = 5 * 10**9
NOT_TOKENIZER = ("*.safetensors", "config.json", "generation_config.json", "*.index.json")


@dataclasses.dataclass(frozen=True)
class Target:
    """Where files of one artifact go."""

    folder: str
    attempt: str


def save(gang: Gang, resident: Resident, body: JsonDict) -> JsonDict:
    """The result of a /save on rank 0: the records of the files written; the lists are empty where nothing was asked for.

    `probe`: the logprobs (temperature 1) of `probe_tokens` but the first, as an engine with these weights must give them.
    """
    policy: list[FileRecord] = []
    state: list[FileRecord] = []
    if body["policy_folder"] is not None:
        policy = save_policy(gang, resident, Target(body["policy_folder"], body["attempt"]), body["tokenizer"])
    if body["state_folder"] is not None:
        state = save_state(gang, resident, Target(body["state_folder"], body["attempt"]))
    records = {name: [dataclasses.asdict(entry) for entry in made] for name, made in (("policy", policy), ("state", state))}
    return records | {"probe": probe_logprobs(gang, resident, body["probe_tokens"])}


def probe_logprobs(gang: Gang, resident: Resident, tokens: list[int]) -> list[float]:
    """Every rank computes the same row: the forward pass of sharded weights is a collective."""
    sequence = TrainSequence(np.array(tokens), np.arange(1, len(tokens)), np.zeros(len(tokens) - 1, dtype=np.float32))
    microbatch = collate([sequence], [[0]], row_length([len(tokens)], len(tokens))).to(gang.device)
    return frozen_logprobs(resident.policy, [microbatch], temperature=1.0)[0].flatten().tolist()


def files_of(sizes: dict[str, int], bytes_max: int) -> dict[str, list[str]]:
    """Which tensors go into which file, in order; more than `bytes_max` in all makes numbered files."""
    groups: list[list[str]] = [[]]
    used = 0
    for name, size in sizes.items():
        if groups[-1] and used + size > bytes_max:
            groups.append([])
            used = 0
        groups[-1].append(name)
        used += size
    if len(groups) == 1:
        return {"model.safetensors": groups[0]}
    return {f"model-{index:05d}-of-{len(groups):05d}.safetensors": group for index, group in enumerate(groups, start=1)}


def save_policy(gang: Gang, resident: Resident, target: Target, tokenizer: JsonDict | None) -> list[FileRecord]:
    """HF files: weights in the dtype of the forward pass, gathered tensor by tensor, config, tokenizer. Records on rank 0."""
    dtype = getattr(torch, gang.options.dtype)
    parameters = dict(resident.policy.shards())
    sizes = {name: parameter.numel() * dtype.itemsize for name, parameter in parameters.items()}
    files = files_of(sizes, FILE_BYTES_MAX)
    records: list[FileRecord] = []
    with tempfile.TemporaryDirectory(dir=gang.scratch("saving")) as scratch:
        for file_name, names in files.items():
            tensors: dict[str, Tensor] = {}
            for name in names:
                full = parameters[name].full_tensor().detach()
                if gang.rank == 0:
                    # cpu() of a one-rank gang is a view of the live weights, and safetensors refuses shared memory
                    tensors[name] = full.to(dtype).cpu().contiguous()
            with gang.together():
                if gang.rank == 0:
                    save_file(tensors, Path(scratch) / file_name, metadata={"format": "pt"})
                    records.append(write_file(gang.store, target.folder, target.attempt, file_name, Path(scratch) / file_name))
                    (Path(scratch) / file_name).unlink()
        with gang.together():
            if gang.rank == 0:
                records += _small_files(gang, resident, target, files, sizes)
                records += _tokenizer_files(gang, target, tokenizer)
    return records


def _small_files(
    gang: Gang, resident: Resident, target: Target, files: dict[str, list[str]], sizes: dict[str, int]
) -> Iterator[FileRecord]:
    config = json.loads(resident.config.to_json_string())
    config |= {"architectures": [type(resident.policy.lm).__name__], "dtype": gang.options.dtype}
    documents = {"config.json": config, "generation_config.json": resident.generation_config}
    if len(files) > 1:
        weight_map = {name: file_name for file_name, names in files.items() for name in names}
        documents["model.safetensors.index.json"] = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
    for name, document in documents.items():
        data = json.dumps(document, indent=2, sort_keys=True).encode()
        yield write_bytes(gang.store, target.folder, target.attempt, name, data)


def _tokenizer_files(gang: Gang, target: Target, tokenizer: JsonDict | None) -> Iterator[FileRecord]:
    if tokenizer is None:
        return
    ref = ArtifactRef.from_json(tokenizer)
    for record in read_manifest(gang.store, ref.folder, ref.sha256).files:
        if not any(fnmatch(record.plain_name, pattern) for pattern in NOT_TOKENIZER):
            data = read_file(gang.store, ref.folder, record)
            yield write_bytes(gang.store, target.folder, target.attempt, record.plain_name, data)


def save_state(gang: Gang, resident: Resident, target: Target) -> list[FileRecord]:
    """Every rank writes its own rows; the records of all, on all ranks."""
    mine: list[FileRecord] = []
    name = state_file(gang.rank, gang.size)
    with gang.together(), tempfile.TemporaryDirectory(dir=gang.scratch("saving")) as scratch:
        save_file(state_tensors(resident), Path(scratch) / name)
        mine.append(write_file(gang.store, target.folder, target.attempt, name, Path(scratch) / name))
        if gang.rank == 0:
            data = json.dumps(state_record(gang, resident), indent=1, sort_keys=True).encode()
            mine.append(write_bytes(gang.store, target.folder, target.attempt, "state.json", data))
    gathered = gang.gather([dataclasses.asdict(record) for record in mine])
    records = [FileRecord(**record) for records in gathered for record in records]
    assert len(records) == gang.size + 1, f"{len(records)} files of a state of {gang.size} ranks"
    return records
