"""What is resident: the policy, its optimizer, and how both go to the store and come back, on any number of ranks.

The policy is in HF format. The state is one safetensors a rank, with its rows of every tensor, and `state.json`.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import GenerationConfig, PretrainedConfig

from rlpipe.store.artifacts import materialise
from rlpipe.trainer.gang import Gang
from rlpipe.trainer.model import PolicyModel, ReadRows, build_policy, folder_weights, hf_config, new_weights, row_range
from rlpipe.types import ArtifactRef, JsonDict, StoreError, UserError

STATE_SCHEMA = 1
MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Resident:
    """A policy in training. `shards` are this rank's rows of every parameter: what the optimizer updates, in place."""

    policy: PolicyModel
    config: PretrainedConfig
    generation_config: JsonDict
    shards: dict[str, nn.Parameter]
    optimizer: torch.optim.AdamW

    def gradients(self) -> list[Tensor]:
        """This rank's rows of every gradient, in the order of `shards`."""
        gradients = []
        for name, parameter in self.policy.shards():
            assert parameter.grad is not None, f"{name} has no gradient"
            gradients.append(parameter.grad.to_local())  # pyright: ignore[reportAttributeAccessIssue]
        return gradients

    def configure(self, betas: tuple[float, float], weight_decay: float) -> None:
        """AdamW's constants for the steps that follow: a job brings its own."""
        self.optimizer.param_groups[0].update(betas=betas, weight_decay=weight_decay)

    def apply(self, gradients: list[Tensor], learning_rate: float) -> None:
        """One AdamW update with these gradients, which are then forgotten."""
        for (name, parameter), shard, gradient in zip(self.policy.shards(), self.shards.values(), gradients, strict=True):
            assert parameter.to_local().data_ptr() == shard.data_ptr(), f"{name}: the optimizer holds other memory than FSDP"
            shard.grad = gradient
        self.optimizer.param_groups[0]["lr"] = learning_rate
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.policy.zero_grad(set_to_none=True)

    @property
    def optimizer_step(self) -> int:
        return int(next(iter(self.optimizer.state.values()))["step"])


def make_resident(policy: PolicyModel, config: PretrainedConfig, generation_config: JsonDict) -> Resident:
    """A policy with a fresh optimizer (AdamW step 0)."""
    shards = {name: nn.Parameter(parameter.to_local().detach()) for name, parameter in policy.shards()}
    adamw = torch.optim.AdamW(list(shards.values()), lr=0.0, fused=True)
    for shard in shards.values():
        moments = {moment: torch.zeros_like(shard, requires_grad=False) for moment in MOMENTS}
        adamw.state[shard] = {"step": torch.zeros((), dtype=torch.float32, device=shard.device), **moments}
    return Resident(policy, config, generation_config, shards, adamw)


def load(gang: Gang, body: JsonDict) -> Resident:
    """The resident of a /load: exactly one of `new`, `policy` (weights, fresh optimizer) and `state` (everything)."""
    given = [name for name in ("new", "policy", "state") if body.get(name) is not None]
    if len(given) != 1:
        raise UserError(f"load needs exactly one of new, policy and state, got {given}")
    if given == ["new"]:
        config = hf_config(body["new"]["config"])
        policy = build_policy(gang, config, new_weights(config, body["new"]["seed"]))
        return make_resident(policy, config, GenerationConfig.from_model_config(config).to_diff_dict())
    folder = fetch(gang, ArtifactRef.from_json(body[given[0]]))
    if given == ["policy"]:
        resident = make_resident(*load_policy(gang, folder))
    else:
        resident = _load_state(gang, folder)
    forget(gang, folder)
    return resident


def load_policy(gang: Gang, folder: Path) -> tuple[PolicyModel, PretrainedConfig, JsonDict]:
    """The weights of a folder in HF format, its config and its generation config."""
    with gang.together():
        config = hf_config(json.loads((folder / "config.json").read_text()))
        generation_config = GenerationConfig.from_model_config(config).to_diff_dict()
        if (folder / "generation_config.json").is_file():
            generation_config = json.loads((folder / "generation_config.json").read_text())
        read_rows = folder_weights(folder)
    return build_policy(gang, config, read_rows), config, generation_config


def fetch(gang: Gang, ref: ArtifactRef) -> Path:
    """An artifact's files on local disk, downloaded once a node."""
    folder = Path()
    first = os.environ.get("LOCAL_RANK", "0") == "0"
    for turn in (True, False):
        with gang.together():
            if first == turn:
                folder = materialise(gang.store, ref, gang.scratch("fetched"))
    return folder


def forget(gang: Gang, folder: Path) -> None:
    """Removes fetched files once all ranks have read them."""
    gang.gather(None)
    if os.environ.get("LOCAL_RANK", "0") == "0":
        # renamed first: half removed under its own name it would pass for a whole one after a kill
        gone = folder.rename(folder.with_name(f".gone-{folder.name}"))
        shutil.rmtree(gone)


def state_file(rank: int, size: int) -> str:
    return f"state-{rank:05d}-of-{size:05d}.safetensors"


def state_tensors(resident: Resident) -> dict[str, Tensor]:
    """This rank's file of a state: its rows of weights and moments."""
    tensors: dict[str, Tensor] = {}
    for name, shard in resident.shards.items():
        tensors[f"param/{name}"] = shard.detach().cpu().contiguous()
        tensors |= {f"{moment}/{name}": resident.optimizer.state[shard][moment].cpu() for moment in MOMENTS}
    return tensors


def state_record(gang: Gang, resident: Resident) -> JsonDict:
    """`state.json`: what is needed to read the ranks' files on another number of ranks."""
    shapes = {name: [*parameter.shape] for name, parameter in resident.policy.shards()}
    return {
        "schema_version": STATE_SCHEMA,
        "world_size": gang.size,
        "optimizer_step": resident.optimizer_step,
        "config": json.loads(resident.config.to_json_string()),
        "generation_config": resident.generation_config,
        "tensors": {
            name: {"shape": shape, "rows": [row_range(shape[0], rank, gang.size) for rank in range(gang.size)]}
            for name, shape in shapes.items()
        },
    }


def _load_state(gang: Gang, folder: Path) -> Resident:
    record: JsonDict = {}
    with gang.together():
        record = json.loads((folder / "state.json").read_text())
        if record.get("schema_version") != STATE_SCHEMA:
            raise StoreError(f"{folder}/state.json has schema_version {record.get('schema_version')}, expected {STATE_SCHEMA}")
    config = hf_config(record["config"])
    policy = build_policy(gang, config, state_rows(folder, record, "param"))
    resident = make_resident(policy, config, record["generation_config"])
    with gang.together():
        for moment in MOMENTS:
            read_rows = state_rows(folder, record, moment)
            for name, parameter in policy.shards():
                start, end = row_range(parameter.shape[0], gang.rank, gang.size)
                moments = resident.optimizer.state[resident.shards[name]]
                moments[moment].copy_(read_rows(name, [*parameter.shape], start, end))
        for entry in resident.optimizer.state.values():
            entry["step"].fill_(record["optimizer_step"])
    assert resident.optimizer_step == record["optimizer_step"], "the optimizer's step was not restored"
    return resident


def state_rows(folder: Path, record: JsonDict, kind: str) -> ReadRows:
    """Reads rows of one kind of tensor (`param` or a moment) out of the files of however many ranks wrote them."""
    size = record["world_size"]

    def read_rows(name: str, shape: list[int], start: int, end: int) -> Tensor:
        tensor = record["tensors"].get(name)
        if tensor is None or tensor["shape"] != shape:
            raise StoreError(f"{folder}/state.json has no tensor {name} of shape {shape}")
        parts = [torch.empty((0, *shape[1:]))]
        for rank, (first, last) in enumerate(tensor["rows"]):
            low, high = max(start, first), min(end, last)
            if low < high:
                with safe_open(folder / state_file(rank, size), framework="pt") as file:
                    parts.append(file.get_slice(f"{kind}/{name}")[low - first : high - first])
        rows = torch.cat(parts)
        assert rows.shape[0] == end - start, f"{name}: rows {start} to {end} are not all in the state"
        return rows

    return read_rows
