"""A program of four ranks as two nodes that each hold a whole copy of the model: two
steps, a save, a restore, a save."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch.distributed as dist

from rlpipe.base.references import ArtifactRef
from rlpipe.trainer import policy_files
from rlpipe.trainer.ranks import join_ranks
from rlpipe.trainer.trainer import Trainer
from tests import trainer_world as world


def main(folder: Path) -> None:
    node = int(os.environ["RANK"]) // 2
    layout = {"ranks": 2, "nodes": 2, "split_over": "node"}
    ranks = join_ranks(world.options(folder, work_dir=f"{folder}/node-{node}", tokens_max=512, **layout))
    assert (ranks.copies, ranks.parts, ranks.part) == (2, 2, ranks.rank % 2)
    trainer, job = Trainer(ranks), json.loads((folder / "job.json").read_text())
    world.run(trainer, "load", world.load_new("new"))
    metrics = world.run(trainer, "train", job)["metrics"]
    policy_files.FILE_BYTES_MAX = 100_000  # several files: each node makes its share
    saved = world.run(trainer, "save", world.save("one", "policy-copies", "state-copies"))
    made_on = ranks.gather(saved["made_on"])[0]
    here = {path.name for path in ranks.published.rglob("*.safetensors")}
    policy = {record["name"] for record in saved["policy"] if record["name"].endswith(".safetensors")}
    assert here == {name.rpartition("/")[2] for name in policy if made_on.get(name, 0) == node}
    assert len(policy) > 2 and abs(2 * len(here) - len(policy)) <= 1, f"{len(here)} of {len(policy)} files"
    refs = ranks.gather(world.saved(ranks.store, "state-copies", saved["state"]).as_json() if ranks.rank == 0 else None)
    world.run(trainer, "load", world.load_ref("again", "state", ArtifactRef.from_json(refs[0])))
    again = world.run(trainer, "save", world.save("again", "policy-again", "state-again"))
    if ranks.rank == 0:
        digests = {name: world.digests(saved[name]) for name in ("policy", "state")}
        assert digests == {name: world.digests(again[name]) for name in digests}
        (folder / "copies.json").write_text(json.dumps({"metrics": metrics, "state": refs[0], "digests": digests}))
    dist.destroy_process_group()
