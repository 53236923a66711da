"""The optimizer steps of one RL iteration.

Legend: B sequences of a microbatch, T their scored tokens.
"""

from __future__ import annotations

import time
from dataclasses import replace

from torch import Tensor

from rlpipe.losses import aggregate, clipped_tokens, importance_weights, kl, policy_loss
from rlpipe.trainer.batches import Microbatch, TrainSequence, read_rl_steps
from rlpipe.trainer.gang import Gang
from rlpipe.trainer.model import PolicyModel
from rlpipe.trainer.settings import RlSettings
from rlpipe.trainer.state import Resident
from rlpipe.trainer.step import LossPart, StepBatch, StepSettings, frozen_logprobs, optimizer_step, plan_batch
from rlpipe.types import ArtifactRef, JsonDict

# sums over tokens, divided by the step's num_tokens; loss, policy_loss and kl come aggregated
TOKEN_METRICS = (
    "entropy", "clip_fraction_low", "clip_fraction_high", "proximal_kl", "mismatch_abs_mean", "importance_mean",
    "importance_clipped_fraction", "onpolicy_abs",
)  # fmt: skip
STEP_METRICS = ("loss", "policy_loss", "kl", "grad_norm")


def train_rl(
    gang: Gang, resident: Resident, reference: PolicyModel | None, data: ArtifactRef, settings: RlSettings
) -> JsonDict:
    """Runs the steps of an iteration; metrics. StepRefused names the data folder and the step.

    proximal_logprobs are computed for all steps before the first, in the very microbatches that are then trained:
    the first step is on-policy to the bit.
    """
    steps: list[list[TrainSequence]] = []
    with gang.together():
        steps = read_rl_steps(gang.store, data, settings.num_steps)
    resident.configure((settings.beta1, settings.beta2), settings.weight_decay)
    started = time.monotonic()
    planned = [plan_batch(gang, sequences) for sequences in steps]
    batches = {index: batch for index, batch in enumerate(planned) if batch.num_tokens}
    progress, total = 0, 2 * sum(len(batch.microbatches) for batch in batches.values())
    for index, batch in batches.items():
        batches[index] = _with_frozen(batch, resident.policy, reference, settings.temperature)
        gang.report(progress := progress + len(batch.microbatches), total)
    done: list[dict[str, float]] = []
    rate = 0.0
    for index, batch in batches.items():
        rate = settings.rate(index)
        how = StepSettings(rate, settings.grad_clip, settings.temperature, f"{data.folder} step {index}")
        done.append(_of_step(optimizer_step(gang, resident, batch, _part(batch, settings), how), batch))
        gang.report(progress := progress + len(batch.microbatches), total)
    metrics = _summary(done) | {
        "train/learning_rate": rate,
        "train/num_tokens": sum(batch.num_tokens for batch in batches.values()),
        "train/packing_efficiency": sum(batch.tokens for batch in planned) / max(sum(batch.slots for batch in planned), 1),
    }
    return metrics | {"train_s": time.monotonic() - started}


def _with_frozen(batch: StepBatch, policy: PolicyModel, reference: PolicyModel | None, temperature: float) -> StepBatch:
    proximal = frozen_logprobs(policy, batch.microbatches, temperature)
    frozen = frozen_logprobs(reference, batch.microbatches, temperature) if reference else [None] * len(proximal)
    microbatches = [
        replace(microbatch, proximal_logprobs_BT=proximal_BT, reference_logprobs_BT=reference_BT)
        for microbatch, proximal_BT, reference_BT in zip(batch.microbatches, proximal, frozen, strict=True)
    ]
    return replace(batch, microbatches=microbatches)


def _part(batch: StepBatch, settings: RlSettings) -> LossPart:
    def scalar(values_BT: Tensor, mask_BT: Tensor) -> Tensor:
        return aggregate(
            values_BT,
            mask_BT,
            mode=settings.aggregation,
            num_tokens=batch.num_tokens,
            num_sequences=batch.num_sequences,
            length=settings.length,
        )

    def part(microbatch: Microbatch, logprobs_BT: Tensor, entropy_BT: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        mask_BT, proximal_BT = microbatch.mask_BT, microbatch.proximal_logprobs_BT
        assert proximal_BT is not None, "proximal_logprobs come first"
        losses_BT = policy_loss(
            logprobs_BT,
            proximal_BT,
            microbatch.advantages_BT,
            mask_BT,
            objective=settings.objective,
            clip_low=settings.clip_low,
            clip_high=settings.clip_high,
            dual_clip=settings.dual_clip,
        )
        weights_BT = importance_weights(
            proximal_BT,
            microbatch.rollout_logprobs_BT,
            mask_BT,
            mode=settings.importance,
            low=settings.importance_low,
            high=settings.importance_high,
        )
        policy_part = scalar(losses_BT * weights_BT, mask_BT)
        loss, kl_part = policy_part, policy_part.new_zeros(())
        if microbatch.reference_logprobs_BT is not None:
            kl_part = scalar(kl(logprobs_BT, microbatch.reference_logprobs_BT, estimator=settings.kl_estimator), mask_BT)
            loss = loss + settings.kl_coef * kl_part
        if settings.entropy_coef:
            loss = loss - settings.entropy_coef * scalar(entropy_BT, mask_BT)
        sums = _token_sums(microbatch, logprobs_BT.detach(), entropy_BT.detach(), weights_BT, settings)
        return loss, {"policy_loss": policy_part, "kl": kl_part, **sums}

    return part


def _token_sums(
    microbatch: Microbatch, logprobs_BT: Tensor, entropy_BT: Tensor, weights_BT: Tensor, settings: RlSettings
) -> dict[str, Tensor]:
    proximal_BT, rollout_BT = microbatch.proximal_logprobs_BT, microbatch.rollout_logprobs_BT
    assert proximal_BT is not None, "proximal_logprobs come first"
    below_BT, above_BT = clipped_tokens(
        logprobs_BT, proximal_BT, microbatch.advantages_BT, clip_low=settings.clip_low, clip_high=settings.clip_high
    )
    untouched_BT = importance_weights(proximal_BT, rollout_BT, microbatch.mask_BT, mode="token_truncate", high=float("inf"))
    values = {
        "entropy": entropy_BT,
        "clip_fraction_low": below_BT,
        "clip_fraction_high": above_BT,
        "proximal_kl": kl(proximal_BT, logprobs_BT, estimator="k3"),
        "mismatch_abs_mean": kl(proximal_BT, rollout_BT, estimator="abs"),
        "importance_mean": weights_BT,
        "importance_clipped_fraction": (weights_BT != untouched_BT) if settings.importance != "none" else below_BT & False,
        "onpolicy_abs": kl(logprobs_BT, proximal_BT, estimator="abs"),
    }
    return {name: (values_BT.float() * microbatch.mask_BT).sum() for name, values_BT in values.items()}


def _of_step(sums: dict[str, float], batch: StepBatch) -> dict[str, float]:
    return {name: value / batch.num_tokens if name in TOKEN_METRICS else value for name, value in sums.items()}


def _summary(done: list[dict[str, float]]) -> JsonDict:
    """Means over the steps; onpolicy_abs is that of the first step, before any update. Zeros when there was no step."""
    metrics = {
        f"train/{name}": sum(step[name] for step in done) / max(len(done), 1) for name in (*STEP_METRICS, *TOKEN_METRICS)
    }
    return metrics | {"train/onpolicy_abs": done[0]["onpolicy_abs"] if done else 0.0}
