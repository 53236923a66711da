"""The stored rounds of a committed iteration, and what-if: its redo with other settings.

Samples nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from rlpipe.base.errors import StoreError, UserError
from rlpipe.base.manifests import StageResult
from rlpipe.base.references import ArtifactRef
from rlpipe.config.pipeline import PipelineConfig
from rlpipe.config.settings import artifact_settings, effects
from rlpipe.store.run import Run
from rlpipe.store.run_record import SHARED_BY_REDO

INSTEAD = {"scores": "use --redo score", "batch": "use --redo filter", "teacher_logprobs": "use --redo filter"}
SHOWN = (
    "rollout/reward_",
    "rollout/pass_rate",
    "rollout/groups_",
    "rollout/num_trained",
    "rollout/num_branch",
    "rollout/fault",
    "train/",
)


def check_redo(run: Run, at: int, config: PipelineConfig, redo: str) -> None:
    """UserError naming the setting that `config` changes though a shared stage was computed with
    it.
    """
    if redo not in SHARED_BY_REDO:
        raise UserError(f"--redo {redo}: use one of {', '.join(SHARED_BY_REDO)}")
    for kind in SHARED_BY_REDO[redo]:
        # what ended an over-sampled round may change
        history = {f"{section}.{name}" for section, name, _, why in effects("rl", kind) if why == "over-sampled"}
        # the branches beside these are then not read
        if kind != "batch" and config.rl.branches == "last":
            history |= {"rl.branches"}
        parent = run.owner("rl", at, kind).config
        # fields that are in the settings only where they matter: here where they do in either
        old, new = (artifact_settings(one, "rl", kind, judged_by=(parent, config)) for one in (parent, config))
        differ = [
            f"{name} cannot change ({old.get(name)!r} -> {new.get(name)!r})"
            # one that was added later is not there, and a rule for all faults has its older name
            for name in {**old, **new}
            if name not in history and old.get(name) != new.get(name)
        ]
        if differ:
            anew = f"fork without --redo (rlpipe fork {run.name} --at {at - 1} ...)" if at else "start another run"
            way_out = INSTEAD.get(kind, f"to sample anew, {anew}")
            raise UserError(f"--redo {redo} shares {kind}, so {'; '.join(differ)}: {way_out}")
    if run.sampled_by(at) < at and not config.rl.corrects_staleness:
        raise UserError(
            f"--redo {redo} trains what version {run.sampled_by(at)} sampled (rl.overlap of {run.name}), and nothing"
            " would correct that; set rl.importance, for example to token_truncate"
        )


@dataclass(frozen=True)
class StoredRound:
    """One sampling round: its prompts and the shards of its rollouts."""

    prompts: StageResult
    rollouts: list[ArtifactRef]


def stored_rounds(run: Run, iteration: int) -> list[StoredRound]:
    """The sampling rounds of a committed iteration; StoreError when a part is missing or is not the
    one that was scored.
    """
    return [_stored_round(run, iteration, index) for index in range(run.record(iteration).last_round + 1)]


def _stored_round(run: Run, iteration: int, index: int) -> StoredRound:
    prompts, manifest = run.committed("rl", iteration, f"prompts/round-{index}")
    # the scores say how many shards there were, whatever rl.shard_prompts says now
    scored = run.committed("rl", iteration, f"scores/round-{index}")[1].inputs
    num_shards = sum(name.startswith("rollouts-") for name in scored)
    rollouts = [
        run.committed("rl", iteration, f"rollouts/round-{index}/shard-{shard:03d}")[0] for shard in range(num_shards)
    ]
    for shard, ref in enumerate(rollouts):
        if ref.sha256 != scored[f"rollouts-{shard:03d}"]:
            raise StoreError(f"{run.store.address(ref.folder)} is not what was scored")
    return StoredRound(StageResult(prompts, manifest.metrics, cached=True), rollouts)


def rounds_to_redo(run: Run, iteration: int) -> list[StoredRound]:
    """All sampling rounds that the parent committed of the iteration."""
    assert run.parent is not None and run.redoes(iteration), f"run {run.name} does not redo iteration {iteration}"
    return stored_rounds(run.parent, iteration)


def changes(run: Run) -> list[str]:
    """Lines that show the redone iteration's metrics beside the parent's, one line a metric."""
    iteration = run.fork_at + 1
    assert run.parent is not None and run.redoes(iteration), f"run {run.name} redoes nothing"
    records = [side.iteration(iteration) for side in (run.parent, run)]
    before, after = (record.metrics if record else {} for record in records)
    names = [name for name in sorted({*before, *after}) if name.startswith(SHOWN)]
    width = max(map(len, names), default=0)
    lines = [f"iteration {iteration}, redone from {run.redo} on: {run.parent.name} -> {run.name}"]
    for name in names:
        mark = " " if before.get(name) == after.get(name) else "*"
        lines.append(f" {mark} {name:{width}s}  {_number(before.get(name)):>12s} -> {_number(after.get(name)):>12s}")
    return lines


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.6g}"
