"""The withdrawal of an iteration of `rl.overlap = "steps"` that an older version left unfinished.

Such an iteration had other shards, and a batch for each step.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from rlpipe.records.rollout import ROLLOUTS, Rollout
from rlpipe.stages.generation import shard_places
from rlpipe.store.artifacts import MANIFEST, read_artifact, read_records
from rlpipe.store.facts import PromptsFacts, facts_of
from rlpipe.store.lease import fenced
from rlpipe.store.progress import Progress
from rlpipe.store.run import Run
from rlpipe.store.run_record import had_steps

SHARD = re.compile(r"rollouts/round-0/shard-(\d+)")  # there was one round


def withdraw_steps(run: Run) -> list[str]:
    """Withdraws artifacts of the retired mode from the iteration after the newest committed one:
    shards whose groups differ from today's, and all that was made from steps. Returns their
    folders.

    They are made again, except for the batch of each step. The artifacts that mark the mode are
    withdrawn last, so a process that dies in between starts again here. Files stay for `rlpipe gc`.
    """
    if not had_steps(run.store, run.name):
        return []
    root = f"{run.root}/rl/{Progress(run).num_iterations:05d}"
    committed = [key.removesuffix(f"/{MANIFEST}") for key in run.store.list(root) if key.endswith(f"/{MANIFEST}")]
    stages = [folder.removeprefix(f"{root}/") for folder in committed]
    steps = [stage for stage in stages if stage.startswith("steps/")]
    later = [stage for stage in stages if steps and not stage.startswith(("prompts/", "rollouts/", "steps/"))]
    withdrawn = [f"{root}/{stage}" for stage in [*_other_shards(run, root, stages), *later, *steps]]
    for folder in withdrawn:
        with fenced(run.lease):
            run.store.delete(f"{folder}/{MANIFEST}")
    return withdrawn


def _other_shards(run: Run, root: str, stages: list[str]) -> Iterator[str]:
    """The shards whose groups are not those of today."""
    shards = {stage: int(shard[1]) for stage in stages if (shard := SHARD.fullmatch(stage))}
    if not shards:
        return
    ref, manifest = read_artifact(run.store, f"{root}/prompts/round-0")
    drawn = facts_of(manifest.metrics, PromptsFacts, ref.folder)
    places = shard_places(run.config.rl, drawn.num_prompts)
    for stage, index in shards.items():
        ref, _ = read_artifact(run.store, f"{root}/{stage}")
        rollouts = read_records(run.store, ref, "rollouts.parquet", Rollout, ROLLOUTS)
        wanted = {drawn.first_group + place for place in places[index]} if index < len(places) else set[int]()
        if {rollout.group_index for rollout in rollouts} != wanted:
            yield stage
