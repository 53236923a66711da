"""A program of several ranks: states and policies saved by trainers of one rank up to all, restored
by each, and what every rank read."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from rlpipe.base.references import ArtifactRef
from rlpipe.base.values import JsonDict
from rlpipe.store.backend import Store
from rlpipe.trainer import policy_files, state
from rlpipe.trainer.ranks import Ranks, join_ranks
from rlpipe.trainer.trainer import Trainer
from tests import trainer_world as world

SIZES = range(1, int(os.environ["WORLD_SIZE"]) + 1)
LARGEST = SIZES[-1]
state.BLOCK_BYTES = 256
policy_files.FILE_BYTES_MAX = 150_000
read_bytes = {"documents": 0, "weights": 0}


def counted(method: Any, kind: str, size_of: Any) -> Any:
    def call(self: Store, *arguments: Any) -> Any:
        answer = method(self, *arguments)
        read_bytes[kind] += size_of(answer, *arguments)
        return answer

    return call


Store.read = counted(Store.read, "documents", lambda data, _key: len(data))
Store.read_range = counted(Store.read_range, "weights", lambda data, *_: len(data))
Store.get_file = counted(Store.get_file, "weights", lambda _, _key, target: Path(target).stat().st_size)


def worlds(whole: Ranks) -> dict[int, Ranks]:
    """The first ranks as trainers of their own; every rank takes part in making each."""
    made = {}
    for size in SIZES:
        members = list(range(size))
        mesh, control = DeviceMesh("cpu", members), dist.new_group(members, backend="gloo")
        made[size] = replace(whole, size=size, mesh=mesh, control=control)
    return made


def committed(ranks: Ranks, folder: str, records: list[JsonDict]) -> ArtifactRef:
    """The same reference on all ranks: rank 0 commits."""
    refs = ranks.gather(world.saved(ranks.store, folder, records).as_json() if ranks.rank == 0 else None)
    return ArtifactRef.from_json(refs[0])


def save(ranks: Ranks, trainer: Trainer) -> tuple[dict[str, ArtifactRef], dict[str, dict[str, str]]]:
    """What a trainer's state and policy are, and the hashes of their files on rank 0."""
    saved = world.run(trainer, "save", world.save("a", f"policy-{ranks.size}", f"state-{ranks.size}"))
    refs = {kind: committed(ranks, f"{kind}-{ranks.size}", saved[kind]) for kind in ("state", "policy")}
    return refs, {kind: world.digests(saved[kind]) for kind in refs}


def restores(ranks: Ranks, refs: dict[int, dict[str, ArtifactRef]], digests: dict[str, str]) -> Iterator[JsonDict]:
    """What this rank read in every restore, and its share: of the state its rows, of a
    policy its rows of the weights."""
    for saved_by in SIZES:
        for kind in ("state", "policy"):
            trainer = Trainer(ranks)
            ranks.gather(None)
            read_bytes["weights"] = 0
            world.run(trainer, "load", world.load_ref("a", kind, refs[saved_by][kind]))
            read, resident = read_bytes["weights"], trainer.resident
            assert resident is not None
            own = sum(shard.numel() * shard.element_size() for shard in resident.shards.values())
            told = {"kind": kind, "saved_by": saved_by, "size": ranks.size, "rank": ranks.rank, "read": read}
            if kind == "state":
                again = world.run(trainer, "save", world.save("a", None, f"again-{saved_by}-{ranks.size}"))["state"]
                told |= {"same": ranks.rank > 0 or world.digests(again) == digests}
            yield told | {"share": own * (3 if kind == "state" else 1)}


def main(folder: Path) -> None:
    whole = join_ranks(world.options(folder, tokens_max=512, ranks=LARGEST))
    made = worlds(whole)
    trainer = Trainer(whole)
    world.run(trainer, "load", world.load_new())
    with whole.together():
        data = world.batch(whole.store, f"batch-{whole.rank}", world.rollout_rows(6, 4))
    world.run(trainer, "train", world.train("new", "a", "rl", ArtifactRef(**whole.gather(data.as_json())[0])))
    refs, digests = {}, {}
    refs[LARGEST], digests[LARGEST] = save(whole, trainer)
    for size in SIZES[:-1]:
        if whole.rank < size:
            trainer = Trainer(made[size])
            world.run(trainer, "load", world.load_ref("a", "state", refs[LARGEST]["state"]))
            refs[size], digests[size] = save(made[size], trainer)
    rank0 = whole.gather(
        [{kind: ref.as_json() for kind, ref in refs[size].items()} for size in SIZES] if whole.rank == 0 else None
    )[0]
    refs = {size: {kind: ArtifactRef(**ref) for kind, ref in rank0[size - 1].items()} for size in SIZES}
    own = [entry for size in SIZES if whole.rank < size for entry in restores(made[size], refs, digests[size]["state"])]
    told = whole.gather(own)
    if whole.rank == 0:
        (folder / "read.json").write_text(json.dumps([entry for entries in told for entry in entries]))
    dist.destroy_process_group()
