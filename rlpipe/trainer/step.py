"""The resident policy with its optimizer, and one optimizer step: forward and backward of all
microbatches, one reduction, gradient clipping, then the update, or a refusal on all ranks.

Legend: B sequences of a microbatch, T their scored tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from rlpipe.algorithms.divergence import TopTokens, jensen_shannon
from rlpipe.algorithms.logprobs import Beside
from rlpipe.base.errors import StepRefused
from rlpipe.base.values import JsonDict, Metrics
from rlpipe.config.training import BETA1, OptimizerConfig
from rlpipe.records.rollout import TokenGaps
from rlpipe.trainer.batches import Microbatch, collate
from rlpipe.trainer.flops import Work, attention_tokens, work_of
from rlpipe.trainer.model import PolicyModel, own_rows, reshard
from rlpipe.trainer.moments import MOMENTS, AwayMoments
from rlpipe.trainer.packing import Rows, TrainSequence, plan_texts, shapes, text_tokens
from rlpipe.trainer.ranks import Ranks


class Scores(NamedTuple):
    """What a forward pass gives for each token of a microbatch, 0 outside its mask.
    `divergence_BT`: from the teacher's top tokens; None where the microbatch has none.
    """

    logprobs_BT: Tensor
    entropy_BT: Tensor
    divergence_BT: Tensor | None = None


# -> (this microbatch's part of the loss, sums by name, the same names every time)
LossPart = Callable[[Microbatch, Scores], tuple[Tensor, dict[str, Tensor]]]


@dataclass(frozen=True)
class StepBatch:
    """This rank's microbatches of one step, and the counts over the whole step, which are the
    denominators of its loss.
    """

    microbatches: list[Microbatch]
    num_tokens: int  # scored tokens of all ranks
    num_sequences: int  # sequences with a scored token, of all ranks
    tokens: int
    slots: int
    work: Work


@dataclass
class Resident:
    """A policy in training.

    `shards` are this rank's rows of every parameter that is trained: what the optimizer updates, in
    place.

    `rows`: the ways to put sequences into rows that this model allows. `away`: the moments, where
    they are off the device while passes run.
    """

    policy: PolicyModel
    config: PretrainedConfig
    generation_config: JsonDict
    shards: dict[str, nn.Parameter]
    optimizer: torch.optim.AdamW
    rows: Rows
    away: AwayMoments | None
    gaps: list[TokenGaps] | None = (
        None  # of the iteration that was trained last, on the host of rank 0; None after a load
    )

    @torch.no_grad()
    def exchange(self, others: list[Tensor]) -> None:
        """Swaps the trained weights with `others`, in place; a second call restores them.

        Not to be called within a forward pass.
        """
        assert len(others) == len(self.shards), "no weights were kept"
        for shard, kept in zip(self.shards.values(), others, strict=True):
            here = shard.detach().clone()
            shard.copy_(kept)
            kept.copy_(here)

    def gradients(self) -> list[Tensor]:
        """This rank's rows of every gradient, in the order of `shards`; zeros for a parameter that
        the loss does not depend on (an image tower).
        """
        return [
            torch.zeros_like(own_rows(parameter), requires_grad=False)
            if parameter.grad is None
            else own_rows(parameter.grad)
            for _, parameter in self.policy.trained()
        ]

    def apply(self, gradients: list[Tensor], rate: float, settings: OptimizerConfig) -> None:
        """Does one AdamW update with these gradients, then frees them."""
        for (name, parameter), shard in zip(self.policy.trained(), self.shards.values(), strict=True):
            assert own_rows(parameter).data_ptr() == shard.data_ptr(), (
                f"{name}: the optimizer holds other memory than the policy"
            )
        betas = (BETA1, settings.beta2)
        self.optimizer.param_groups[0].update(lr=rate, betas=betas, weight_decay=settings.weight_decay)
        if self.away is not None:
            self.away.update(self.optimizer, dict(zip(self.shards.values(), gradients, strict=True)))
        else:
            for shard, gradient in zip(self.shards.values(), gradients, strict=True):
                shard.grad = gradient
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.policy.zero_grad(set_to_none=True)

    def held(self) -> Iterator[Tensor]:
        """The tensors of the optimizer that are in device memory."""
        for entry in self.optimizer.state.values():
            yield from (tensor for name, tensor in entry.items() if self.away is None or name not in MOMENTS)

    @property
    def optimizer_step(self) -> int:
        return int(next(iter(self.optimizer.state.values()))["step"])


def make_resident(
    ranks: Ranks, policy: PolicyModel, config: PretrainedConfig, generation_config: JsonDict, rows: Rows
) -> Resident:
    """Returns the policy with a fresh optimizer (AdamW, step 0), whose moments are on the device or
    off it, by `trainer.offload`.
    """
    shards = {name: nn.Parameter(own_rows(parameter).detach()) for name, parameter in policy.trained()}
    adamw = torch.optim.AdamW(list(shards.values()), lr=0.0, fused=True)
    away = AwayMoments(ranks, [*shards.values()]) if ranks.options.trainer.offload == "optimizer" else None
    kept = away.entries() if away else {}
    for shard in shards.values():
        moments = kept.get(shard) or {moment: torch.zeros_like(shard, requires_grad=False) for moment in MOMENTS}
        adamw.state[shard] = {"step": torch.zeros((), dtype=torch.float32, device=shard.device), **moments}
    return Resident(policy, config, generation_config, shards, adamw, rows, away)


@dataclass(frozen=True)
class StepSettings:
    optimizer: OptimizerConfig
    step: int  # the global index, from which the learning rate is computed
    temperature: float
    # of the data, for the text of StepRefused. Example: "runs/a/rl/00003/batch step 2"
    address: str
    entropy_trained: bool = True  # the loss has an entropy term
    teacher_beta: float = 0.0  # of the divergence from a teacher's top tokens


def learning_rate(settings: OptimizerConfig, step: int) -> float:
    """The learning rate of the global optimizer step `step`. A pure function: a resumed run needs
    no scheduler state.

    Linear warm-up over `warmup_steps`, which ends at the peak; then constant, or a cosine or linear
    decay to 0 at `decay_steps` (counted from step 0).
    """
    peak, warmup_steps = settings.learning_rate, settings.warmup_steps
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    if settings.schedule == "constant":
        return peak
    share = min((step - warmup_steps) / (settings.decay_steps - warmup_steps), 1.0)
    return peak * (1 - share) if settings.schedule == "linear" else peak * 0.5 * (1 + math.cos(math.pi * share))


def plan_batch(
    ranks: Ranks, policy: PolicyModel, rows: Rows, sequences: list[TrainSequence], reference: PolicyModel | None = None
) -> StepBatch:
    """Packs the sequences of one step in the way that costs least with the policy's attention, or
    with the `reference`'s where that one needs a mask of L x L; leaves out those without a scored
    token. This rank reads only the tokens of its own microbatches. UserError when a sequence is too
    long.
    """
    kept = [sequence for sequence in sequences if sequence.num_scored]
    tokens_max, attention = ranks.options.trainer.tokens_max, attention_tokens(policy)
    if reference is not None and attention_tokens(reference) is None:
        attention = None
    texts, plans = plan_texts(kept, ranks.size, tokens_max, rows, ranks.context_ranks, attention)
    lengths = list(map(text_tokens, texts))
    microbatches = [collate(texts, filled).to(ranks.device) for filled in plans[ranks.rank]]
    num_tokens = sum(sequence.num_scored for sequence in kept)
    return StepBatch(
        microbatches,
        num_tokens,
        len(kept),
        sum(sequence.num_tokens for sequence in kept),
        sum(slots for slots, _ in shapes(plans[:: ranks.context_ranks], lengths)),
        work_of(texts),
    )


def forward(
    policy: PolicyModel,
    microbatch: Microbatch,
    temperature: float,
    entropy_trained: bool = True,
    beside: Beside | None = None,
) -> tuple[Tensor, ...]:
    """Returns the logprobs and entropies of a microbatch's scored tokens, [N], and what is computed
    beside.
    """
    return policy(
        microbatch.tokens_RL,
        microbatch.positions_RL,
        microbatch.source_N,
        microbatch.target_N,
        temperature,
        entropy_trained,
        microbatch.branch_RL,
        beside,
    )


def scored(policy: PolicyModel, microbatch: Microbatch, settings: StepSettings) -> Scores:
    """The scores on which a step trains."""
    beside = microbatch.teacher_top and partial(_divergence, microbatch.teacher_top, settings)
    values = forward(policy, microbatch, settings.temperature, settings.entropy_trained, beside)
    return Scores(*map(microbatch.spread, values))


def _divergence(top: TopTokens, settings: StepSettings, logits_CV: Tensor, place: slice) -> tuple[Tensor]:
    how = {"temperature": settings.temperature, "beta": settings.teacher_beta}
    return (jensen_shannon(logits_CV, top.at(place), **how),)


@torch.no_grad()
def frozen_logprobs(policy: PolicyModel, microbatches: list[Microbatch], temperature: float) -> list[Tensor]:
    """Logprobs_BT of every microbatch, without gradient.

    A collective: every rank must pass the same number of microbatches.
    """
    logprobs = [microbatch.spread(forward(policy, microbatch, temperature)[0]) for microbatch in microbatches]
    reshard(policy)
    return logprobs


def optimizer_step(
    ranks: Ranks, resident: Resident, batch: StepBatch, part: LossPart, settings: StepSettings
) -> Metrics:
    """Does one update of the weights.

    Returns the sums of all microbatches and ranks, with `loss`, `grad_norm` and `learning_rate`.

    StepRefused, on all ranks and without an update, when the loss or the gradient is not finite.

    `part` divides by global counts; FSDP averages gradients over ranks, so each part is multiplied
    by the number of ranks. All ranks of a context-parallel group have the same loss; each has the
    gradient that came through its own slices, and their sum is the gradient.
    """
    policy = resident.policy
    assert batch.num_tokens > 0 and batch.microbatches, "an empty step has no gradient"
    names: list[str] = []
    totals: Tensor | None = None
    for microbatch in batch.microbatches:
        loss, sums = part(microbatch, scored(policy, microbatch, settings))
        # gradients are reduced after every microbatch: unsharded until the last one they would take
        # 4 bytes a parameter on each rank
        (loss * ranks.size).backward()
        names = ["loss", *sums]
        part_sums = torch.stack([loss, *sums.values()]).detach().double()
        totals = part_sums if totals is None else totals + part_sums
    assert totals is not None
    gradients = resident.gradients()
    squares = torch.stack([gradient.double().square().sum() for gradient in gradients]).sum() / ranks.copies
    reduced = ranks.sum(torch.cat([ranks.once(totals), squares[None]]).cpu()).tolist()
    result = dict(zip([*names, "grad_norm"], [*reduced[:-1], math.sqrt(reduced[-1])], strict=True))
    if not (math.isfinite(result["loss"]) and math.isfinite(result["grad_norm"])):
        raise StepRefused(
            f"{settings.address}: loss {result['loss']}, gradient norm {result['grad_norm']}; no update was made"
        )
    if result["grad_norm"] > settings.optimizer.grad_clip:
        torch._foreach_mul_(  # pyright: ignore[reportPrivateImportUsage]
            gradients, settings.optimizer.grad_clip / result["grad_norm"]
        )
    rate = learning_rate(settings.optimizer, settings.step)
    resident.apply(gradients, rate, settings.optimizer)
    return result | {"learning_rate": rate}


def summary(steps: list[Metrics], names: Sequence[str], batches: list[StepBatch]) -> Metrics:
    """The means of `names` over the steps (0 without a step), the last learning rate, and the token
    counts of all batches.
    """
    slots = sum(batch.slots for batch in batches)
    return {f"train/{name}": sum(step[name] for step in steps) / max(len(steps), 1) for name in names} | {
        "train/learning_rate": steps[-1]["learning_rate"] if steps else 0.0,
        "train/num_tokens": sum(batch.num_tokens for batch in batches),
        "train/num_tokens_processed": sum(batch.tokens for batch in batches),
        "train/packing_efficiency": sum(batch.tokens for batch in batches) / max(slots, 1),
    }
