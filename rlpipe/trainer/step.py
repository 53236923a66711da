"""One optimizer step: forward and backward of all microbatches, one reduction, clip, update, or a refusal that all ranks share.

Legend: B sequences of a microbatch, T their scored tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from rlpipe.trainer.batches import Microbatch, TrainSequence, collate
from rlpipe.trainer.gang import Gang
from rlpipe.trainer.model import PolicyModel, reshard, set_last
from rlpipe.trainer.packing import plan_step, slots
from rlpipe.trainer.state import Resident
from rlpipe.types import StepRefused

# (microbatch, logprobs_BT, entropy_BT) -> (this microbatch's part of the loss, sums by name, the same names every time)
LossPart = Callable[[Microbatch, Tensor, Tensor], tuple[Tensor, dict[str, Tensor]]]


@dataclass(frozen=True)
class StepBatch:
    """This rank's microbatches of one step, with the counts of the whole step: the denominators of its loss."""

    microbatches: list[Microbatch]
    num_tokens: int  # scored ones, all ranks
    num_sequences: int  # with a scored token, all ranks
    tokens: int
    slots: int


@dataclass(frozen=True)
class StepSettings:
    learning_rate: float
    grad_clip: float
    temperature: float
    address: str  # of the data, for the refusal. Example: "runs/a/rl/00003/batch step 2"


def plan_batch(gang: Gang, sequences: list[TrainSequence]) -> StepBatch:
    """Packs the sequences of one step; those without a scored token take no part. UserError when one is too long."""
    kept = [sequence for sequence in sequences if len(sequence.scored)]
    lengths = [len(sequence.tokens) for sequence in kept]
    plans = plan_step(lengths, gang.size, gang.options.tokens_max)
    mine = plans[gang.rank]
    microbatches = [collate(kept, rows, mine.row_tokens).to(gang.device) for rows in mine.microbatches]
    num_tokens = sum(len(sequence.scored) for sequence in kept)
    return StepBatch(microbatches, num_tokens, len(kept), sum(lengths), slots(plans))


def forward(policy: PolicyModel, microbatch: Microbatch, temperature: float) -> tuple[Tensor, Tensor]:
    """logprobs_BT and entropy_BT of a microbatch, 0 outside its mask."""
    logprobs_N, entropy_N = policy(
        microbatch.tokens_RL,
        microbatch.positions_RL,
        microbatch.attention_mask(),
        microbatch.source_N,
        microbatch.target_N,
        temperature,
    )
    return microbatch.spread(logprobs_N), microbatch.spread(entropy_N)


@torch.no_grad()
def frozen_logprobs(policy: PolicyModel, microbatches: list[Microbatch], temperature: float) -> list[Tensor]:
    """Logprobs of every microbatch, without gradient. Every rank brings the same number of microbatches."""
    logprobs = [forward(policy, microbatch, temperature)[0] for microbatch in microbatches]
    reshard(policy)
    return logprobs


def optimizer_step(
    gang: Gang, resident: Resident, batch: StepBatch, part: LossPart, settings: StepSettings
) -> dict[str, float]:
    """One update. Returns the sums of all microbatches and ranks, with `loss` and `grad_norm`.

    `part` divides by global counts; FSDP averages gradients over ranks, so each part is multiplied by their number.
    StepRefused, on all ranks and without an update, when the loss or the gradient is not finite.
    """
    assert batch.num_tokens > 0 and batch.microbatches, "an empty step has no gradient"
    names: list[str] = []
    totals: Tensor | None = None
    for index, microbatch in enumerate(batch.microbatches):
        set_last(resident.policy, index == len(batch.microbatches) - 1)
        loss, sums = part(microbatch, *forward(resident.policy, microbatch, settings.temperature))
        (loss * gang.size).backward()
        names = ["loss", *sums]
        found = torch.stack([loss, *sums.values()]).detach().double()
        totals = found if totals is None else totals + found
    assert totals is not None
    gradients = resident.gradients()
    squares = torch.stack([gradient.double().square().sum() for gradient in gradients]).sum()
    reduced = gang.sum(torch.cat([totals, squares[None]]).cpu()).tolist()
    result = dict(zip([*names, "grad_norm"], [*reduced[:-1], math.sqrt(reduced[-1])], strict=True))
    if not (math.isfinite(result["loss"]) and math.isfinite(result["grad_norm"])):
        raise StepRefused(f"{settings.address}: loss {result['loss']}, gradient norm {result['grad_norm']}; no update was made")
    if result["grad_norm"] > settings.grad_clip:
        torch._foreach_mul_(gradients, settings.grad_clip / result["grad_norm"])  # pyright: ignore[reportPrivateImportUsage]
    resident.apply(gradients, settings.learning_rate)
    return result
