"""The loss of one RL microbatch, and the sums its metrics are made of.

Legend: B sequences of a microbatch, T their scored tokens.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor

from rlpipe.losses import aggregate, clipped_tokens, importance_weights, kl, policy_loss
from rlpipe.trainer.batches import Microbatch
from rlpipe.trainer.settings import RlSettings
from rlpipe.trainer.step import LossPart, StepBatch

# sums over tokens, divided by the step's num_tokens; loss, policy_loss and kl come aggregated
TOKEN_SUMS = (
    "entropy", "clip_fraction_low", "clip_fraction_high", "proximal_kl", "mismatch_abs_mean", "importance_mean",
    "importance_clipped_fraction", "onpolicy_abs", "reference_abs",
)  # fmt: skip


def loss_part(batch: StepBatch, settings: RlSettings) -> LossPart:
    """What a microbatch of this step adds to the loss: sums divided by counts of the whole step, on all ranks."""

    scalar = partial(
        aggregate,
        mode=settings.aggregation,
        num_tokens=batch.num_tokens,
        num_sequences=batch.num_sequences,
        length=settings.completion_tokens_max,
    )

    def part(microbatch: Microbatch, logprobs_BT: Tensor, entropy_BT: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        mask_BT, advantages_BT, proximal_BT = microbatch.mask_BT, microbatch.advantages_BT, microbatch.proximal_logprobs_BT
        assert advantages_BT is not None and proximal_BT is not None, "advantages and proximal_logprobs come first"
        losses_BT = policy_loss(
            logprobs_BT,
            _anchor(microbatch, settings),
            advantages_BT,
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
        if settings.kl == "loss":
            loss = loss + settings.kl_coef * kl_part
        if settings.entropy_coef:
            loss = loss - settings.entropy_coef * scalar(entropy_BT, mask_BT)
        sums = _token_sums(microbatch, logprobs_BT.detach(), entropy_BT.detach(), weights_BT, settings)
        return loss, {"policy_loss": policy_part, "kl": kl_part, **sums}

    return part


def _anchor(microbatch: Microbatch, settings: RlSettings) -> Tensor:
    """The logprobs that the objective's ratio divides by."""
    anchor_BT = microbatch.rollout_logprobs_BT if settings.objective == "dppo" else microbatch.proximal_logprobs_BT
    assert anchor_BT is not None, "proximal_logprobs come first"
    return anchor_BT


def _token_sums(
    microbatch: Microbatch, logprobs_BT: Tensor, entropy_BT: Tensor, weights_BT: Tensor, settings: RlSettings
) -> dict[str, Tensor]:
    mask_BT, advantages_BT = microbatch.mask_BT, microbatch.advantages_BT
    proximal_BT, rollout_BT = microbatch.proximal_logprobs_BT, microbatch.rollout_logprobs_BT
    assert advantages_BT is not None and proximal_BT is not None, "advantages and proximal_logprobs come first"
    reference_BT = logprobs_BT if microbatch.reference_logprobs_BT is None else microbatch.reference_logprobs_BT
    below_BT, above_BT = clipped_tokens(
        logprobs_BT,
        _anchor(microbatch, settings),
        advantages_BT,
        mask_BT,
        objective=settings.objective,
        clip_low=settings.clip_low,
        clip_high=settings.clip_high,
        dual_clip=settings.dual_clip,
    )
    unbounded = "sequence_truncate" if settings.importance.startswith("sequence") else "token_truncate"
    untouched_BT = importance_weights(proximal_BT, rollout_BT, mask_BT, mode=unbounded, high=float("inf"))
    values = {
        "entropy": entropy_BT,
        "clip_fraction_low": below_BT,
        "clip_fraction_high": above_BT,
        "proximal_kl": kl(proximal_BT, logprobs_BT, estimator="k3"),
        "mismatch_abs_mean": kl(proximal_BT, rollout_BT, estimator="abs"),
        "importance_mean": weights_BT,
        "importance_clipped_fraction": (weights_BT != untouched_BT) if settings.importance != "none" else below_BT & False,
        "onpolicy_abs": kl(logprobs_BT, proximal_BT, estimator="abs"),
        "reference_abs": kl(logprobs_BT, reference_BT, estimator="abs"),
    }
    return {name: (values_BT.float() * mask_BT).sum() for name, values_BT in values.items()}
