"""The loss of one RL microbatch, and the sums its metrics are made of.

Legend: B sequences of a microbatch, T their scored tokens.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor

from rlpipe.losses import Clip, aggregate, importance_weights, kl, policy_loss
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
        losses_BT, below_BT, above_BT = policy_loss(
            logprobs_BT,
            microbatch.rollout_logprobs_BT if settings.objective == "dppo" else proximal_BT,
            advantages_BT,
            mask_BT,
            objective=settings.objective,
            clip=Clip(settings.clip_low, settings.clip_high, settings.dual_clip),
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
        values = _token_values(microbatch, logprobs_BT.detach(), weights_BT, settings.importance) | {
            "entropy": entropy_BT.detach(),
            "clip_fraction_low": below_BT,
            "clip_fraction_high": above_BT,
            "importance_mean": weights_BT,
        }
        sums = {name: (values_BT.float() * mask_BT).sum() for name, values_BT in values.items()}
        return loss, {"policy_loss": policy_part, "kl": kl_part, **sums}

    return part


def _token_values(microbatch: Microbatch, logprobs_BT: Tensor, weights_BT: Tensor, importance: str) -> dict[str, Tensor]:
    """How far the policies of a microbatch are apart."""
    proximal_BT, rollout_BT = microbatch.proximal_logprobs_BT, microbatch.rollout_logprobs_BT
    assert proximal_BT is not None, "proximal_logprobs come first"
    reference_BT = logprobs_BT if microbatch.reference_logprobs_BT is None else microbatch.reference_logprobs_BT
    unbounded = "none"
    if importance != "none":
        unbounded = "sequence_truncate" if importance.startswith("sequence") else "token_truncate"
    unbounded_BT = importance_weights(proximal_BT, rollout_BT, microbatch.mask_BT, mode=unbounded, high=float("inf"))
    return {
        "proximal_kl": kl(proximal_BT, logprobs_BT, estimator="k3"),
        "mismatch_abs_mean": kl(proximal_BT, rollout_BT, estimator="abs"),
        "importance_clipped_fraction": weights_BT != unbounded_BT,
        "onpolicy_abs": kl(logprobs_BT, proximal_BT, estimator="abs"),
        "reference_abs": kl(logprobs_BT, reference_BT, estimator="abs"),
    }
