"""What is stored of a committed iteration, round by round: what an iteration without an engine is made of."""

from __future__ import annotations

from dataclasses import dataclass

from rlpipe.store.run import Run
from rlpipe.types import ArtifactRef, StageResult, StoreError


@dataclass(frozen=True)
class StoredRound:
    """One sampling round: its prompts and the shards of its rollouts."""

    prompts: StageResult
    rollouts: list[ArtifactRef]


def stored_rounds(run: Run, iteration: int) -> list[StoredRound]:
    """The sampling rounds of a committed iteration; StoreError when a part is missing or not the one that was scored."""
    record = run.iteration_record(iteration)
    assert record is not None, f"iteration {iteration} of run {run.name} is not committed"
    last = int(record["artifacts"]["prompts"]["folder"].rsplit("-", 1)[1])
    return [_stored_round(run, iteration, index) for index in range(last + 1)]


def _stored_round(run: Run, iteration: int, index: int) -> StoredRound:
    prompts, told = run.committed("rl", iteration, f"prompts/round-{index}")
    # the scores say how many shards there were, whatever rl.shard_prompts says now
    scored = run.committed("rl", iteration, f"scores/round-{index}")[1].inputs
    num_shards = sum(name.startswith("rollouts-") for name in scored)
    rollouts = [run.committed("rl", iteration, f"rollouts/round-{index}/shard-{shard:03d}")[0] for shard in range(num_shards)]
    for shard, ref in enumerate(rollouts):
        if ref.sha256 != scored[f"rollouts-{shard:03d}"]:
            raise StoreError(f"{run.store.address(ref.folder)} is not what was scored")
    return StoredRound(StageResult(prompts, told.metrics, cached=True), rollouts)
