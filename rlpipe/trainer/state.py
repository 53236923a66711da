"""Saves the resident policy and its optimizer to the store, and loads them on any number of ranks.

The policy is in HF format. The state is `state.json` and one safetensors file per rank, with its
rows of every tensor.
"""

from __future__ import annotations

import functools
import json
import shutil
from dataclasses import asdict, replace
from typing import Any, NotRequired, TypedDict

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import GenerationConfig, PretrainedConfig

from rlpipe.base.errors import StoreError
from rlpipe.base.references import ArtifactRef, FileRecord
from rlpipe.base.values import JsonDict
from rlpipe.models.adapter import is_adapter
from rlpipe.models.causal import PROBE_TOKENS, hf_config, probe_tokens
from rlpipe.models.checkpoint import TensorFile, tensors_of
from rlpipe.store.adapter_files import ADAPTED, Adapted
from rlpipe.store.artifacts import BLOCK_BYTES, Blocks, read_file, read_manifest
from rlpipe.store.nearby import NodeDisk
from rlpipe.trainer.batches import collate
from rlpipe.trainer.gap import save_gaps
from rlpipe.trainer.jobs import JobResult, LoadJob, SaveJob
from rlpipe.trainer.model import (
    PolicyModel,
    ReadRows,
    build_policy,
    check_share,
    fill,
    load_policy,
    new_weights,
    own_rows,
    row_range,
    stored_file,
    whole_weights,
    with_adapter,
)
from rlpipe.trainer.moments import MOMENTS
from rlpipe.trainer.packing import sequence_of
from rlpipe.trainer.policy_files import save_policy
from rlpipe.trainer.publishing import publish_bytes, published_in_blocks
from rlpipe.trainer.ranks import Ranks
from rlpipe.trainer.selftest import proven_rows
from rlpipe.trainer.step import Resident, frozen_logprobs, make_resident

STATE_SCHEMA = 1


def load(ranks: Ranks, job: LoadJob) -> tuple[Resident, str]:
    """Loads the position that a job names. Returns it, and as text the differences between these
    trainer processes and those that saved it; empty without any.
    """
    if job.new is not None:
        config = hf_config(job.new.config)
        policy = build_policy(ranks, config, functools.partial(new_weights, config, job.new.seed))
        return _resident(ranks, policy, config, GenerationConfig.from_model_config(config).to_diff_dict()), ""
    if job.policy is not None:
        return _resident(ranks, *load_policy(ranks, job.policy, new=job.adapter)), ""
    assert job.state is not None, "neither a new model nor a reference"
    return _load_state(ranks, job.state)


def _resident(ranks: Ranks, policy: PolicyModel, config: PretrainedConfig, generation_config: JsonDict) -> Resident:
    return make_resident(ranks, policy, config, generation_config, proven_rows(ranks, policy))


def state_file(rank: int, size: int) -> str:
    return f"state-{rank:05d}-of-{size:05d}.safetensors"


class StateTensor(TypedDict):
    """A tensor of a state: its shape, and the rows [start, end) in the file of each part."""

    shape: list[int]
    rows: list[tuple[int, int]]


class StateDocument(TypedDict):
    """The content of `state.json`.

    `made_by`: the fingerprint of the trainer processes that saved it; `adapted`: only for an
    adapter's state; `blocks`: the hashes by which each part's file is verified (older documents
    have none).
    """

    schema_version: int
    world_size: int
    made_by: dict[str, str]
    optimizer_step: int
    config: dict[str, Any]
    generation_config: dict[str, Any]
    tensors: dict[str, StateTensor]
    adapted: NotRequired[dict[str, Any]]
    blocks: NotRequired[list[dict[str, Any]]]


class StoredState:
    """A state in the store, saved by any number of ranks.

    Each rank that restores it reads only its own rows, and verifies what it read.
    """

    def __init__(self, ranks: Ranks, ref: ArtifactRef) -> None:
        self._ranks, self._folder = ranks, ref.folder
        self._open: dict[int, TensorFile] = {}
        files = {file.plain_name: file for file in read_manifest(ranks.store, ref.folder, ref.sha256).files}
        address = ranks.store.address(f"{ref.folder}/state.json")
        if "state.json" not in files:
            raise StoreError(f"{address} is missing from the store")
        self.record: StateDocument = json.loads(read_file(ranks.store, ref.folder, files["state.json"]))
        if self.record.get("schema_version") != STATE_SCHEMA:
            raise StoreError(
                f"{address} has schema_version {self.record.get('schema_version')}, expected {STATE_SCHEMA}"
            )
        size = self.record["world_size"]
        self._files = [files[state_file(rank, size)] for rank in range(size)]
        self._blocks = [Blocks(**blocks) for blocks in self.record.get("blocks", [])]
        if not self._blocks:  # saved by an older version
            check_share(ranks, ref.folder, self._files)

    def _file(self, rank: int) -> TensorFile:
        """The file that rank `rank` saved, opened when it is first needed."""
        if rank not in self._open:
            blocks = self._blocks[rank] if self._blocks else None
            self._open[rank] = stored_file(self._ranks, self._folder, self._files[rank], blocks)
        return self._open[rank]

    @property
    def adapted(self) -> Adapted | None:
        """The settings and base of the adapter whose state it is; None for the state of a whole
        model.
        """
        return ADAPTED.validate_python(self.record["adapted"]) if "adapted" in self.record else None

    def weights(self, lm: Any) -> ReadRows:
        """Returns the function that reads the weights of `lm`. StoreError when the state is of
        another model, before memory is allocated for it.
        """
        for name, tensor in tensors_of(lm).items():
            self._tensor(name, [*tensor.shape])
        return self.rows("param")

    def _tensor(self, name: str, shape: list[int]) -> StateTensor:
        """The state's entry of a tensor. StoreError when it has none of this name and shape."""
        tensor = self.record["tensors"].get(name)
        if tensor is None or tensor["shape"] != shape:
            raise StoreError(f"{self._folder}/state.json has no tensor {name} of shape {shape}")
        return tensor

    def rows(self, kind: str) -> ReadRows:
        """Returns the function that reads rows of one kind of tensor (`param` or a moment) from the
        files of the ranks that saved them.
        """

        def read_rows(name: str, shape: list[int], start: int, end: int) -> Tensor:
            parts: list[Tensor] = []
            for rank, (first, last) in enumerate(self._tensor(name, shape)["rows"]):
                low, high = max(start, first), min(end, last)
                if low < high:
                    parts.append(self._file(rank).read(f"{kind}/{name}", (low - first, high - first)))
            rows = torch.cat(parts) if parts else torch.empty((0, *shape[1:]))
            assert rows.shape[0] == end - start, f"{name}: rows {start} to {end} are not all in the state"
            return rows if shape else rows[0]

        return read_rows


def _load_state(ranks: Ranks, ref: ArtifactRef) -> tuple[Resident, str]:
    stored: StoredState | None = None
    with ranks.together():
        stored = StoredState(ranks, ref)
    assert stored is not None, "an error is raised"
    record = stored.record
    config = hf_config(record["config"])
    weights, adapted = stored.weights, stored.adapted
    if adapted is not None:
        with ranks.together():
            weights = with_adapter(whole_weights(ranks, adapted.base), stored.rows("param"))
    policy = build_policy(ranks, config, weights, adapted=adapted)
    resident = _resident(ranks, policy, config, record["generation_config"])
    with ranks.together():
        entries = [resident.optimizer.state[shard] for shard in resident.shards.values()]
        for moment in MOMENTS:
            fill(ranks, policy.trained(), [entry[moment] for entry in entries], stored.rows(moment))
        for entry in entries:
            entry["step"].fill_(record["optimizer_step"])
    assert resident.optimizer_step == record["optimizer_step"], "the optimizer's step was not restored"
    return resident, differences(record.get("made_by", {}), ranks.fingerprint())


def differences(before: dict[str, str], now: dict[str, str]) -> str:
    """The differences of two fingerprints, as text. A name that is missing in `before` (saved by an
    older version) counts as equal.
    """
    return ", ".join(
        f"{name} {before[name]} -> {now[name]}" for name in now if before.get(name, now[name]) != now[name]
    )


def save(ranks: Ranks, resident: Resident, job: SaveJob) -> JobResult:
    """Publishes the policy, the state and the gaps on this node's disk, and deletes the files that
    were published before.

    Returns, on rank 0, the records of all files; a list is empty where the job has no folder for
    it.

    Each node has the files that its ranks wrote; the caller uploads them and writes manifests.
    `probe`: a text, and the logprobs (temperature 1) of its last tokens that an engine with these
    weights must give.
    """
    with ranks.together():
        if ranks.leads_node:
            # ignore_errors: an upload that goes on for a dead flow may delete its files, too
            shutil.rmtree(ranks.published, ignore_errors=True)
            shutil.rmtree(ranks.scratch("saving"))
    saved = save_policy(ranks, resident, job, job.policy_folder) if job.policy_folder is not None else JobResult()
    state, made_on = (
        save_state(ranks, resident, job.state_folder, job.attempt) if job.state_folder is not None else ([], {})
    )
    gap = save_gaps(ranks, resident.gaps, job.gap_folder, job.attempt) if job.gap_folder is not None else []
    tokens = probe_tokens(resident.config, job.context_tokens_max)
    probe = {"tokens": tokens, "logprobs": probe_logprobs(ranks, resident, tokens)}
    places = [NodeDisk(*place) for place in ranks.gather([str(ranks.published), ranks.files_url])][:: ranks.node_ranks]
    return replace(saved, state=state, gap=gap, probe=probe, places=places, made_on=saved.made_on | made_on)


def probe_logprobs(ranks: Ranks, resident: Resident, tokens: list[int]) -> list[float]:
    """Logprobs of the last PROBE_TOKENS tokens. A collective: every rank computes the same row."""
    scored = np.arange(max(1, len(tokens) - PROBE_TOKENS), len(tokens))
    microbatch = collate([[sequence_of(np.array(tokens), scored)]], [[0]]).to(ranks.device)
    return frozen_logprobs(resident.policy, [microbatch], temperature=1.0)[0].flatten().tolist()


def save_state(ranks: Ranks, resident: Resident, folder: str, attempt: str) -> tuple[list[FileRecord], dict[str, int]]:
    """Writes this rank's rows of weights and moments, on the ranks of the first copy of the model.

    Returns the records of all files, on rank 0 with that of `state.json`, and the node of each file
    that is not on the first node.

    `state.json` has what another number of ranks needs to read these files and to verify what it
    read.
    """
    first_copy = ranks.rank < ranks.parts
    path = ranks.published / folder / attempt / state_file(ranks.part, ranks.parts)
    own: list[object] = []
    with ranks.together():
        if first_copy:
            path.parent.mkdir(parents=True, exist_ok=True)
            save_file(_own_rows(ranks, resident), path)
            own = [asdict(part) for part in published_in_blocks(path, BLOCK_BYTES)]
    written = [entry for entry in ranks.gather(own) if entry]
    assert len(written) == ranks.parts, f"{len(written)} of {ranks.parts} parts of the state were written"
    records = [FileRecord(**record) for record, _ in written]
    with ranks.together():
        if ranks.rank == 0:
            document = _state_document(ranks, resident, [blocks for _, blocks in written])
            data = json.dumps(document, indent=1, sort_keys=True).encode()
            records.append(publish_bytes(path.parent, "state.json", data))
    made_on = {record.name: rank // ranks.node_ranks for rank, record in enumerate(records[: ranks.parts])}
    return records, {name: node for name, node in made_on.items() if node}


def _own_rows(ranks: Ranks, resident: Resident) -> dict[str, Tensor]:
    """This rank's rows of all tensors of the state, by kind and name.

    Of a model with an adapter only the adapter's: the base is in the store already.
    """
    policy, whole = resident.policy, resident.policy.adapted is None
    shards = policy.shards() if whole else policy.trained()
    tensors = {f"param/{name}": own_rows(shard).detach().cpu().contiguous() for name, shard in shards}
    for name, buffer in policy.kept_buffers().items() if whole else ():
        start, end = row_range(len(buffer) if buffer.ndim else 1, ranks.part, ranks.parts)
        tensors[f"param/{name}"] = (buffer if buffer.ndim else buffer[None])[start:end].cpu().clone()
    for moment in MOMENTS:
        tensors |= {
            f"{moment}/{name}": resident.optimizer.state[shard][moment].cpu() for name, shard in resident.shards.items()
        }
    return tensors


def _state_document(ranks: Ranks, resident: Resident, blocks: list[dict[str, Any]]) -> StateDocument:
    adapted, tensors = resident.policy.adapted, tensors_of(resident.policy.lm)
    shapes = {name: [*tensor.shape] for name, tensor in tensors.items() if adapted is None or is_adapter(name)}
    rows = {
        name: [row_range((*shape, 1)[0], part, ranks.parts) for part in range(ranks.parts)]
        for name, shape in shapes.items()
    }
    document: StateDocument = {
        "schema_version": STATE_SCHEMA,
        "world_size": ranks.parts,
        "made_by": ranks.fingerprint(),
        "optimizer_step": resident.optimizer_step,
        "config": json.loads(resident.config.to_json_string()),
        "generation_config": resident.generation_config,
        "tensors": {name: {"shape": shape, "rows": rows[name]} for name, shape in shapes.items()},
        "blocks": blocks,
    }
    if adapted is not None:
        document["adapted"] = asdict(adapted)
    return document
