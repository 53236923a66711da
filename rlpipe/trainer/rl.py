"""The optimizer steps of one RL iteration, and the loss of a microbatch.

Legend: B sequences of a microbatch, T their scored tokens, N scored tokens of the whole batch.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from rlpipe.algorithms.advantages import row_advantages
from rlpipe.algorithms.losses import aggregate, importance_weights, kl, policy_terms
from rlpipe.base.errors import UserError
from rlpipe.base.references import ArtifactRef
from rlpipe.base.values import JsonDict, Metrics
from rlpipe.config.training import RlConfig
from rlpipe.records.rollout import UNRECORDED
from rlpipe.trainer.batches import Microbatch, RlBatch, read_advantages, read_rl_batch, read_teacher, read_teacher_top
from rlpipe.trainer.flops import TRAINED, mfu
from rlpipe.trainer.gap import Gaps, of_whole_batch
from rlpipe.trainer.jobs import JobResult, RlJob
from rlpipe.trainer.model import PolicyModel
from rlpipe.trainer.packing import Rows
from rlpipe.trainer.ranks import Ranks
from rlpipe.trainer.step import (
    LossPart,
    Resident,
    Scores,
    StepBatch,
    StepSettings,
    frozen_logprobs,
    optimizer_step,
    plan_batch,
    summary,
)

# sums over tokens, divided by the step's num_tokens; loss, policy_loss and kl are aggregated
# already
TOKEN_SUMS = (
    "entropy", "clip_fraction_low", "clip_fraction_high", "proximal_kl", "mismatch_abs_mean", "importance_mean",
    "importance_clipped_fraction", "teacher_kl", "teacher_divergence", "onpolicy_abs", "reference_abs",
)  # fmt: skip
# these are 0 before the first update, and mean nothing after it
FIRST_STEP = ("onpolicy_abs", "reference_abs")
STEP_METRICS = ("loss", "policy_loss", "kl", "grad_norm", *(name for name in TOKEN_SUMS if name not in FIRST_STEP))


@dataclass(frozen=True)
class Reference:
    """The frozen policy of the KL term. `rows`: the ways to put sequences into rows that it allows;
    it may be of another family than the policy.

    `adapter`: values of the adapter with which the policy in training is the reference (zeros: the
    adapter is off); empty where the reference is a model of its own.
    """

    policy: PolicyModel
    rows: Rows
    adapter: list[Tensor] = field(default_factory=list)


@dataclass
class StepsTaken:
    """The steps of an iteration.

    `batches`: of all steps, without their microbatches; `metrics`: of the steps that had a token to
    train.
    """

    batches: list[StepBatch]
    metrics: list[Metrics]
    train_s: float


def train_rl(ranks: Ranks, resident: Resident, reference: Reference | None, job: RlJob) -> JobResult:
    """Runs the steps of an iteration.

    Returns the means of their metrics (zeros without a step), and `first_step`: the metrics that
    must be 0 before the first update.

    StepRefused names the data folder and the step.

    proximal_logprobs are computed with the weights that the iteration started from, in the same
    microbatches that are then trained: so the first step is on policy to the bit. They are computed
    for all steps before the first step; with one step, its own forward pass gives them. With
    `proximal = "engine"` they are the logprobs recorded while sampling, without a pass; UserError
    where a token has none. Advantages are computed over the whole batch.
    """
    settings = job.settings
    rollouts = ranks.in_turn(lambda folder: read_rl_batch(ranks.store, job.data, settings.num_steps, folder))
    started, metrics = time.monotonic(), list[Metrics]()
    computed = settings.proximal == "trainer" and (len(rollouts.steps) > 1 or settings.kl == "reward")
    resident.policy.experts.forget()
    rows = resident.rows if reference is None else min(resident.rows, reference.rows)
    other = reference and reference.policy
    planned = [plan_batch(ranks, resident.policy, rows, step, other) for step in rollouts.steps]
    if logprobs := job.teacher_logprobs:
        planned = [*with_teacher(ranks, planned, logprobs, rollouts)]
    if settings.proximal == "engine":
        check_recorded(ranks, job.data.folder, planned)
        planned = [as_recorded(batch) for batch in planned]
    batches = {index: batch for index, batch in enumerate(planned) if batch.num_tokens}
    before = resident.policy if computed else None
    ahead = computed or reference is not None  # a forward pass precedes the steps
    progress, total = 0, (1 + ahead) * sum(len(batch.microbatches) for batch in batches.values())
    for index, batch in batches.items():
        others = exchanged(resident, reference.adapter) if reference and reference.adapter else None
        batches[index] = with_frozen(batch, before, other, settings.temperature, others)
        ranks.report(progress := progress + ahead * len(batch.microbatches), total)
    if settings.estimator == "gdpo":
        advantages_B = ranks.in_turn(lambda folder: read_advantages(ranks.store, job.data, rollouts, folder))
    else:
        advantages_B = advantages(ranks, rollouts, list(batches.values()), settings)
    gaps = Gaps()
    for index, batch in batches.items():
        place, trained = f"{job.data.folder} step {index}", settings.entropy_coef != 0
        how = StepSettings(
            settings, job.first_step + index, settings.temperature, place, trained, settings.teacher_beta
        )
        part = loss_part(batch, settings, gaps, moved=len(metrics) > 0)
        sums = optimizer_step(ranks, resident, placed(batch, "advantages_BT", advantages_B), part, how)
        metrics.append(
            {name: value / batch.num_tokens if name in TOKEN_SUMS else value for name, value in sums.items()}
        )
        ranks.report(progress := progress + len(batch.microbatches), total)
    resident.gaps = gaps.gathered(ranks, rollouts)
    taken = StepsTaken([replace(batch, microbatches=[]) for batch in planned], metrics, time.monotonic() - started)
    passes = [(resident.policy, TRAINED + computed), *([(reference.policy, 1)] if reference else [])]
    return JobResult(metrics_of(ranks, resident, taken, passes, job))


def with_teacher(ranks: Ranks, planned: list[StepBatch], ref: ArtifactRef, rollouts: RlBatch) -> Iterator[StepBatch]:
    """Yields the batches with what the teacher gave to their tokens."""
    teacher_B = ranks.in_turn(lambda folder: read_teacher(ranks.store, ref, rollouts, folder))
    top_B = ranks.in_turn(lambda folder: read_teacher_top(ranks.store, ref, rollouts, folder))
    for batch in planned:
        taught = placed(batch, "teacher_logprobs_BT", teacher_B)
        if rollouts.lengths_B.any() and top_B:
            taught = replace(taught, microbatches=[one.with_teacher_top(top_B) for one in taught.microbatches])
        yield taught


def check_recorded(ranks: Ranks, folder: str, batches: list[StepBatch]) -> None:
    """Raises UserError, the same on every rank, when a token to train has no recorded logprob.

    A collective.
    """
    recorded = [
        microbatch.scored(microbatch.rollout_logprobs_BT) for batch in batches for microbatch in batch.microbatches
    ]
    own = torch.tensor([sum(float((logprobs == UNRECORDED).sum()) for logprobs in recorded)], dtype=torch.float64)
    if unknown := int(ranks.sum(ranks.once(own))):
        raise UserError(
            f"rl.proximal='engine': {unknown} tokens of {folder} have no logprob that was recorded while sampling;"
            " start another run, or a fork, with rl.proximal = 'trainer'"
        )


def as_recorded(batch: StepBatch) -> StepBatch:
    """The batch with the logprobs recorded while sampling as proximal_logprobs."""
    microbatches = [
        replace(microbatch, proximal_logprobs_BT=microbatch.rollout_logprobs_BT) for microbatch in batch.microbatches
    ]
    return replace(batch, microbatches=microbatches)


@contextlib.contextmanager
def exchanged(resident: Resident, others: list[Tensor]) -> Iterator[None]:
    """Within the body the policy has the weights `others`, one tensor per shard; its own are
    restored afterwards.
    """
    resident.exchange(others)
    yield
    resident.exchange(others)  # not after a fault: then nothing stays resident


def metrics_of(
    ranks: Ranks, resident: Resident, taken: StepsTaken, passes: list[tuple[PolicyModel, int]], job: RlJob
) -> JsonDict:
    """The metrics of the steps that were taken. `passes`: (model, its number of forward passes per
    step), of the policy, then of the reference where there is one.
    """
    steps, batches, train_s, settings = taken.metrics, taken.batches, taken.train_s, job.settings
    first = {
        name: steps[0][name] if steps else 0.0 for name in (*FIRST_STEP, "clip_fraction_low", "clip_fraction_high")
    }
    beside = {"train/onpolicy_abs": first["onpolicy_abs"], "first_step": first, "train_s": train_s}
    beside["train/peak_memory_gib"] = ranks.peak_memory_gib()
    beside |= mfu(ranks, train_s, [(policy, batch.work, count) for batch in batches for policy, count in passes])
    if settings.proximal == "engine":  # in later steps the policy has changed
        beside["train/mismatch_abs_mean"] = steps[0]["mismatch_abs_mean"] if steps else 0.0
    # there is no KL without a reference, or a teacher, or without a step
    left_out = {"kl"} if len(passes) == 1 or not steps else set[str]()
    left_out |= {"teacher_kl"} if job.teacher_logprobs is None or not steps else set[str]()
    left_out |= set[str]() if settings.teacher_top_k and steps else {"teacher_divergence"}
    names = [name for name in STEP_METRICS if name not in left_out]
    return summary(steps, names, batches) | resident.policy.experts.metrics(ranks.sum) | beside


def with_frozen(
    batch: StepBatch,
    policy: PolicyModel | None,
    reference: PolicyModel | None,
    temperature: float,
    reference_weights: contextlib.AbstractContextManager[None] | None = None,
) -> StepBatch:
    """The batch with proximal_logprobs if `policy` is given, and reference_logprobs if `reference`
    is. `reference_weights`: a context within which the reference has its weights.
    """
    frozen: dict[str, list[Tensor]] = {}
    if policy:
        frozen["proximal_logprobs_BT"] = frozen_logprobs(policy, batch.microbatches, temperature)
    if reference:
        with reference_weights or contextlib.nullcontext():
            frozen["reference_logprobs_BT"] = frozen_logprobs(reference, batch.microbatches, temperature)
    microbatches = [
        replace(microbatch, **{name: logprobs[index] for name, logprobs in frozen.items()})
        for index, microbatch in enumerate(batch.microbatches)
    ]
    return replace(batch, microbatches=microbatches)


def advantages(ranks: Ranks, rollouts: RlBatch, batches: list[StepBatch], settings: RlConfig) -> list[np.ndarray]:
    """The advantages of the scored tokens of every row of the batch: the same on every rank."""
    return row_advantages(
        rollouts.rewards_B,
        rollouts.group_index_B,
        rollouts.lengths_B,
        estimator=settings.estimator,
        gamma=settings.gamma,
        kl_N=_reward_kl(ranks, rollouts, batches, settings.kl_estimator) if settings.kl == "reward" else None,
        kl_coef=settings.kl_coef,
        rollout_B=rollouts.rollout_B,
    )


def placed(batch: StepBatch, name: str, values_B: list[np.ndarray]) -> StepBatch:
    """The batch with the values of each scored token, fp32, in the field `name` of its
    microbatches.
    """
    microbatches = [replace(microbatch, **{name: microbatch.place(values_B)}) for microbatch in batch.microbatches]
    return replace(batch, microbatches=microbatches)


def _reward_kl(ranks: Ranks, rollouts: RlBatch, batches: list[StepBatch], estimator: str) -> np.ndarray:
    """The KL of the policy that the iteration started from to the reference, at the N scored
    tokens.
    """

    def of(microbatch: Microbatch) -> Tensor:
        proximal_BT, reference_BT = microbatch.proximal_logprobs_BT, microbatch.reference_logprobs_BT
        assert proximal_BT is not None and reference_BT is not None, "a KL in the reward needs the reference"
        return kl(proximal_BT, reference_BT, estimator=estimator)

    parts = ((microbatch, of(microbatch)) for batch in batches for microbatch in batch.microbatches)
    return of_whole_batch(ranks, rollouts.lengths_B, parts).double().numpy()


def loss_part(batch: StepBatch, settings: RlConfig, gaps: Gaps, *, moved: bool) -> LossPart:
    """Returns the function that computes a microbatch's part of the loss: sums divided by the
    counts of the whole step over all ranks. The function also adds to `gaps`.

    `moved`: the policy has been updated since the iteration started.
    """
    by_engine = settings.proximal == "engine"
    clips = settings.model_dump(include={"objective", "clip_low", "clip_high", "dual_clip"})
    bounds = {"low": settings.importance_low, "high": settings.importance_high}
    scalar = partial(
        aggregate,
        mode=settings.aggregation,
        num_tokens=batch.num_tokens,
        num_sequences=batch.num_sequences,
        length=settings.completion_tokens_max,
    )

    def part(microbatch: Microbatch, scores: Scores) -> tuple[Tensor, dict[str, Tensor]]:
        logprobs_BT, entropy_BT, divergence_BT = scores
        mask_BT, given_BT, own_BT = microbatch.mask_BT, microbatch.proximal_logprobs_BT, logprobs_BT.detach()
        proximal_BT = own_BT if given_BT is None else given_BT
        advantages_BT = _with_teacher(microbatch, proximal_BT, settings.teacher_coef)
        # by the weights that the iteration started from; with by_engine, in later steps by the
        # updated ones
        start_BT = own_BT if by_engine else proximal_BT
        # a token without a recorded logprob is trained as if the policy before the first step had
        # sampled it
        recorded_BT = microbatch.rollout_logprobs_BT != UNRECORDED
        rollout_BT = torch.where(recorded_BT, microbatch.rollout_logprobs_BT, proximal_BT)
        gaps.add(microbatch, start_BT, recorded_BT & (not (by_engine and moved)))
        anchor_BT = rollout_BT if settings.objective == "dppo" else proximal_BT
        losses_BT, below_BT, above_BT = policy_terms(logprobs_BT, anchor_BT, advantages_BT, mask_BT, **clips)
        weights_BT, bounded_BT = importance_weights(
            proximal_BT, rollout_BT, mask_BT, mode=settings.importance, **bounds
        )
        policy_part = scalar(losses_BT * weights_BT, mask_BT)
        loss, kl_part = policy_part, policy_part.new_zeros(())
        if microbatch.reference_logprobs_BT is not None:
            kl_part = scalar(
                kl(logprobs_BT, microbatch.reference_logprobs_BT, estimator=settings.kl_estimator), mask_BT
            )
        if settings.kl == "loss" and settings.kl_coef:
            loss = loss + settings.kl_coef * kl_part
        if settings.entropy_coef:
            loss = loss - settings.entropy_coef * scalar(entropy_BT, mask_BT)
        if divergence_BT is not None:
            loss = loss + settings.teacher_coef * scalar(divergence_BT, mask_BT)
        values = {
            "entropy": entropy_BT.detach(),
            "clip_fraction_low": below_BT,
            "clip_fraction_high": above_BT,
            "importance_mean": weights_BT,
            "importance_clipped_fraction": bounded_BT,
            "teacher_divergence": torch.zeros_like(own_BT) if divergence_BT is None else divergence_BT.detach(),
            **_distances(microbatch, rollout_BT, proximal_BT, start_BT, own_BT),
        }
        sums = {name: (values[name].float() * mask_BT).sum() for name in TOKEN_SUMS}
        return loss, {"policy_loss": policy_part, "kl": kl_part, **sums}

    return part


def _with_teacher(microbatch: Microbatch, proximal_BT: Tensor, coef: float) -> Tensor:
    """The advantages, plus the weighed log T - log pi_p of each token where there is a teacher, and
    no divergence.
    """
    advantages_BT, teacher_BT = microbatch.advantages_BT, microbatch.teacher_logprobs_BT
    assert advantages_BT is not None, "advantages come first"
    if teacher_BT is None or microbatch.teacher_top is not None:
        return advantages_BT
    return advantages_BT + coef * (teacher_BT - proximal_BT)


def _distances(
    microbatch: Microbatch, rollout_BT: Tensor, proximal_BT: Tensor, start_BT: Tensor, logprobs_BT: Tensor
) -> dict[str, Tensor]:
    """The distances between the policies, per token, B x T."""
    reference_BT = logprobs_BT if microbatch.reference_logprobs_BT is None else microbatch.reference_logprobs_BT
    teacher_BT = proximal_BT if microbatch.teacher_logprobs_BT is None else microbatch.teacher_logprobs_BT
    return {
        "teacher_kl": kl(proximal_BT, teacher_BT, estimator="k1"),
        "proximal_kl": kl(proximal_BT, logprobs_BT, estimator="k3"),
        "mismatch_abs_mean": kl(start_BT, rollout_BT, estimator="abs"),
        "onpolicy_abs": kl(logprobs_BT, start_BT, estimator="abs"),
        "reference_abs": kl(logprobs_BT, reference_BT, estimator="abs"),
    }
