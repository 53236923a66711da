"""The stages train, checkpoint and reload_engines: a batch becomes weight version k + 1, which is
published, served, and committed in the background.
"""

from __future__ import annotations

import asyncio
import logging

from rlpipe.base.errors import StepRefused
from rlpipe.base.manifests import ActionResult
from rlpipe.base.references import ArtifactRef
from rlpipe.base.values import JsonDict, Metrics
from rlpipe.config.pipeline import PipelineConfig
from rlpipe.config.training import RlConfig
from rlpipe.loop.session import Session
from rlpipe.loop.stage import Attempt, Produced, StageKey, stage
from rlpipe.stages.training import StoredAs, commit_saved, rl_job, save_job, train_job
from rlpipe.store.artifacts import read_manifest

log = logging.getLogger(__name__)
# mean |policy - proximal logprobs| of the first step; 0 where both passes run the same kernels
ONPOLICY_MAX = 1e-6


async def train(session: Session, *, iteration: int, batch: ArtifactRef) -> ActionResult:
    """Trains on `batch`; `cached` when the policy that results from it is committed.

    Commits nothing itself: until the weights are in the store, the training has not happened.
    StepRefused when `rl.on_mismatch` says so.
    """
    committed = await asyncio.to_thread(session.run.artifact, "rl", iteration, "policy")
    if committed is not None:
        return ActionResult(committed[1].metrics, cached=True)
    metrics = await train_job(session, iteration, rl_job(session.run, iteration, batch))
    rl = session.config.rl
    for fault in first_step_faults(metrics["first_step"], iteration, rl.anchored, bool(rl.reference)):
        log.warning("iteration %d: %s", iteration, fault)
    manifest = await asyncio.to_thread(read_manifest, session.run.store, batch.folder, batch.sha256)
    stale = manifest.metrics["rollout/num_tokens_stale"]
    check_mismatch(metrics["train/mismatch_abs_mean"], iteration, session.config.rl, stale)
    return ActionResult(metrics, cached=False)


def first_step_faults(first: Metrics, iteration: int, anchored: bool, other_reference: bool = False) -> list[str]:
    """Lines about what is wrong with the first step of an iteration; each is a bug of rlpipe.

    The step is taken with the weights of the proximal logprobs. `anchored`: its ratios are to the
    rollout's probabilities, which differ from the start.

    These are warnings, not errors: the importance of a drift depends on its size, and the run may
    be days old.
    """
    faults = []
    if not first["onpolicy_abs"] < ONPOLICY_MAX:
        faults.append("the first step is not on-policy: mean |policy - proximal logprobs| "
                      f"is {first['onpolicy_abs']:.3g}, expected below {ONPOLICY_MAX:g}")  # fmt: skip
    clipped = first["clip_fraction_low"] + first["clip_fraction_high"]
    if clipped and not anchored:
        faults.append(f"the first step clips {clipped:.3g} of the tokens, expected none: its ratios are all 1")
    if iteration == 0 and not other_reference and first["reference_abs"]:
        faults.append(
            f"the policy RL starts from differs from the reference, itself, by {first['reference_abs']:.3g} per token"
        )
    return faults


def check_mismatch(mismatch: float, iteration: int, rl: RlConfig, num_tokens_stale: int) -> None:
    """Warns when engine and trainer disagree by more than `rl.mismatch_max`; StepRefused with
    `rl.on_mismatch = "fail"`.

    Not checked for tokens that an older policy sampled: there the mismatch includes the policy's
    own change. The batch says if it has such tokens (`num_tokens_stale`): in a fork they may come
    from the parent's partial rollouts.
    """
    if mismatch <= rl.mismatch_max or not rl.mismatch_counts(num_tokens_stale):
        return
    message = (
        f"iteration {iteration}: engine and trainer disagree by {mismatch:.3g} per token"
        f" (rl.mismatch_max={rl.mismatch_max:g}): do they hold the same weights, in the same precision?"
    )
    if rl.on_mismatch == "fail":
        raise StepRefused(
            f"{message} The policy was not committed, the batch is kept. Mend the cause, or raise rl.mismatch_max, or"
            " set rl.on_mismatch='warn', and start again"
        )
    log.warning("%s", message)


@stage("rl", "policy")
async def checkpoint(
    session: Session,
    attempt: Attempt,
    *,
    iteration: int,
    batch: ArtifactRef,
    previous: ArtifactRef,
    reference: ArtifactRef | None = None,
    teacher: ArtifactRef | None = None,
    metrics: JsonDict,
) -> Produced:
    """Publishes the policy after an iteration (weight version iteration + 1), the gaps of its
    tokens (the distance of engine and trainer at each), and the state when that is due.

    They are committed when the store has their files, the policy last, while the next iteration
    samples. `reference`: that of the KL term, where it is another model than the one that RL starts
    from; `teacher`: its logprobs of the batch.
    """
    await session.commits.all_committed()  # at most one iteration is uncommitted
    due = (iteration + 1) % session.config.checkpoint.state_every == 0
    beside = {"reference": reference, "teacher": teacher}
    inputs = {"batch": batch} | {name: ref for name, ref in beside.items() if ref}
    stored = stored_as(session.config, iteration + 1, previous)
    saved = await save_job(session, iteration, rl_job(session.run, iteration, batch), attempt, due, stored)
    if due:
        await commit_saved(session, StageKey("rl", iteration, "state"), inputs, saved.result.state, saved.published)
    # made from the previous policy; committed first, so it exists whenever the new policy does
    gap_of = {"batch": batch, "previous": previous}
    await commit_saved(session, StageKey("rl", iteration, "gap"), gap_of, saved.result.gap, saved.published)
    return saved.produced(metrics | saved.result.metrics, iteration + 1, saved.published)


def stored_as(config: PipelineConfig, version: int, previous: ArtifactRef) -> StoredAs:
    """The form in which a weight version is stored, by `checkpoint.full_every`, and if the next
    version is stored as a difference to it.

    The version that a run is planned to end with is stored whole.
    """
    last, every = config.rl.num_iterations, config.checkpoint.full_every
    is_delta, is_base = (number % every != 0 and number < last for number in (version, version + 1))
    return StoredAs(previous if is_delta else None, is_base)


async def reload_engines(session: Session, *, policy: ArtifactRef, version: int) -> ActionResult:
    """Puts a policy on every engine; `cached` when they serve it already."""
    return ActionResult({}, cached=not await session.serve(policy, version))
