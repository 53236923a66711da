"""The optimizer steps of one RL iteration.

Legend: B sequences of a microbatch, T their scored tokens, N scored tokens of the whole batch.
"""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import torch

from rlpipe.advantages import token_advantages
from rlpipe.losses import kl
from rlpipe.trainer.batches import RlBatch, read_rl_batch
from rlpipe.trainer.gang import Gang
from rlpipe.trainer.model import PolicyModel
from rlpipe.trainer.rl_loss import TOKEN_SUMS, loss_part
from rlpipe.trainer.settings import RlSettings, learning_rate
from rlpipe.trainer.state import Resident
from rlpipe.trainer.step import StepBatch, StepSettings, frozen_logprobs, optimizer_step, plan_batch
from rlpipe.types import ArtifactRef, JsonDict

FIRST_STEP = ("onpolicy_abs", "reference_abs")  # what is 0 before any update, and means nothing after
STEP_METRICS = ("loss", "policy_loss", "kl", "grad_norm", *(name for name in TOKEN_SUMS if name not in FIRST_STEP))


def train_rl(
    gang: Gang, resident: Resident, reference: PolicyModel | None, data: ArtifactRef, settings: RlSettings
) -> JsonDict:
    """Runs the steps of an iteration; metrics. StepRefused names the data folder and the step.

    proximal_logprobs are computed for all steps before the first, in the very microbatches that are then trained:
    the first step is on-policy to the bit. Then the advantages, of the whole batch at once.
    """
    rollouts: RlBatch | None = None
    with gang.together():
        rollouts = read_rl_batch(gang.store, data, settings.num_steps)
    assert rollouts is not None
    resident.configure((settings.beta1, settings.beta2), settings.weight_decay)
    started = time.monotonic()
    planned = [plan_batch(gang, sequences) for sequences in rollouts.steps]
    batches = {index: batch for index, batch in enumerate(planned) if batch.num_tokens}
    progress, total = 0, 2 * sum(len(batch.microbatches) for batch in batches.values())
    for index, batch in batches.items():
        batches[index] = with_frozen(batch, resident.policy, reference, settings.temperature)
        gang.report(progress := progress + len(batch.microbatches), total)
    advantages_N = advantages(gang, rollouts, list(batches.values()), settings)
    done: list[dict[str, float]] = []
    rate = 0.0
    for index, batch in batches.items():
        rate = learning_rate(settings, settings.first_step + index)
        how = StepSettings(rate, settings.grad_clip, settings.temperature, f"{data.folder} step {index}")
        part = loss_part(batch, settings)
        done.append(_of_step(optimizer_step(gang, resident, with_advantages(batch, advantages_N), part, how), batch))
        gang.report(progress := progress + len(batch.microbatches), total)
    metrics = _summary(done) | {
        "train/learning_rate": rate,
        "train/num_tokens": sum(batch.num_tokens for batch in batches.values()),
        "train/packing_efficiency": sum(batch.tokens for batch in planned) / max(sum(batch.slots for batch in planned), 1),
    }
    return metrics | {"train_s": time.monotonic() - started}


def with_frozen(batch: StepBatch, policy: PolicyModel, reference: PolicyModel | None, temperature: float) -> StepBatch:
    """The batch with proximal_logprobs, and reference_logprobs where there is a reference."""
    proximal = frozen_logprobs(policy, batch.microbatches, temperature)
    frozen = frozen_logprobs(reference, batch.microbatches, temperature) if reference else [None] * len(proximal)
    microbatches = [
        replace(microbatch, proximal_logprobs_BT=proximal_BT, reference_logprobs_BT=reference_BT)
        for microbatch, proximal_BT, reference_BT in zip(batch.microbatches, proximal, frozen, strict=True)
    ]
    return replace(batch, microbatches=microbatches)


def advantages(gang: Gang, rollouts: RlBatch, batches: list[StepBatch], settings: RlSettings) -> torch.Tensor:
    """Advantages of all N scored tokens, fp32: the same on every rank."""
    advantages_N = token_advantages(
        rollouts.rewards_B,
        rollouts.group_index_B,
        rollouts.lengths_B,
        estimator=settings.estimator,
        gamma=settings.gamma,
        kl_N=_reward_kl(gang, rollouts, batches, settings.kl_estimator) if settings.kl == "reward" else None,
        kl_coef=settings.kl_coef,
    )
    return torch.from_numpy(advantages_N).float().to(gang.device)


def with_advantages(batch: StepBatch, advantages_N: torch.Tensor) -> StepBatch:
    """The batch with each token's advantage."""
    microbatches = [
        replace(microbatch, advantages_BT=microbatch.spread(advantages_N[microbatch.place_N]))
        for microbatch in batch.microbatches
    ]
    return replace(batch, microbatches=microbatches)


def _reward_kl(gang: Gang, rollouts: RlBatch, batches: list[StepBatch], estimator: str) -> np.ndarray:
    """KL of the starting policy to the reference at the N scored tokens: each rank fills in its own, the sum is exact."""
    kl_N = torch.zeros(int(rollouts.lengths_B.sum()), dtype=torch.float64)
    for microbatch in (microbatch for batch in batches for microbatch in batch.microbatches):
        proximal_BT, reference_BT = microbatch.proximal_logprobs_BT, microbatch.reference_logprobs_BT
        assert proximal_BT is not None and reference_BT is not None, "a KL in the reward needs the reference"
        scored_N = microbatch.mask_BT.flatten()[microbatch.slot_N]  # none in a microbatch of padding
        found_N = kl(proximal_BT, reference_BT, estimator=estimator).flatten()[microbatch.slot_N]
        kl_N[microbatch.place_N[scored_N].cpu()] = found_N[scored_N].double().cpu()
    return gang.sum(kl_N).numpy()


def _of_step(sums: dict[str, float], batch: StepBatch) -> dict[str, float]:
    return {name: value / batch.num_tokens if name in TOKEN_SUMS else value for name, value in sums.items()}


def _summary(done: list[dict[str, float]]) -> JsonDict:
    """Means over the steps, and `first_step`: what must be 0 before any update. Zeros when there was no step."""
    metrics: JsonDict = {f"train/{name}": sum(step[name] for step in done) / max(len(done), 1) for name in STEP_METRICS}
    first = {name: done[0][name] if done else 0.0 for name in (*FIRST_STEP, "clip_fraction_low", "clip_fraction_high")}
    return metrics | {"train/onpolicy_abs": first["onpolicy_abs"], "first_step": first}
