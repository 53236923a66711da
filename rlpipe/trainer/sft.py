"""A segment of SFT steps: the same trainer processes, packing and step as RL, with the
cross-entropy of the tokens in the loss mask.
"""

from __future__ import annotations

import math
import time
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from rlpipe.algorithms.losses import sft_loss
from rlpipe.base.errors import StepRefused
from rlpipe.base.references import ArtifactRef
from rlpipe.base.values import Metrics
from rlpipe.trainer.batches import Microbatch, conversations_of_step, read_conversations
from rlpipe.trainer.flops import TRAINED, mfu
from rlpipe.trainer.jobs import JobResult, SftJob
from rlpipe.trainer.ranks import Ranks
from rlpipe.trainer.step import (
    Resident,
    Scores,
    StepBatch,
    StepSettings,
    frozen_logprobs,
    optimizer_step,
    plan_batch,
    summary,
)


def train_sft(ranks: Ranks, resident: Resident, job: SftJob) -> JobResult:
    """Runs the global steps first_step .. first_step + num_steps - 1.

    StepRefused names the data folder and the step.
    """
    settings, data = job.settings, job.data
    conversations = ranks.in_turn(lambda folder: read_conversations(ranks.store, data, "conversations.parquet", folder))
    resident.policy.experts.forget()
    started = time.monotonic()
    steps: list[Metrics] = []
    batches: list[StepBatch] = []
    for step in range(job.first_step, job.first_step + settings.num_steps):
        chosen = conversations_of_step(len(conversations), step, settings.batch_size, job.seed)
        batch = plan_batch(ranks, resident.policy, resident.rows, [conversations[row] for row in chosen])
        if batch.num_tokens:
            how = StepSettings(settings, step, 1.0, f"{data.folder} step {step}", entropy_trained=False)
            steps.append(optimizer_step(ranks, resident, batch, partial(_cross_entropy, batch.num_tokens), how))
        batches.append(replace(batch, microbatches=[]))  # only its counts are needed
        ranks.report(len(batches), settings.num_steps)
    train_s = time.monotonic() - started
    beside = {"losses": [sums["loss"] for sums in steps], "train_s": train_s}
    beside |= mfu(ranks, train_s, [(resident.policy, batch.work, TRAINED) for batch in batches])
    beside["train/peak_memory_gib"] = ranks.peak_memory_gib()
    beside |= resident.policy.experts.metrics(ranks.sum)
    validation = _validation(ranks, resident, data, settings.batch_size)
    return JobResult(summary(steps, ("loss", "grad_norm"), batches) | validation | beside)


def _cross_entropy(num_tokens: int, microbatch: Microbatch, scores: Scores) -> tuple[Tensor, dict[str, Tensor]]:
    return sft_loss(scores.logprobs_BT, microbatch.mask_BT, num_tokens=num_tokens), {}


def _validation(ranks: Ranks, resident: Resident, data: ArtifactRef, batch_size: int) -> Metrics:
    """The mean cross-entropy of the tokens in the loss mask of `validation.parquet`, if the data
    has one. Makes no update.
    """
    sequences = ranks.in_turn(lambda folder: read_conversations(ranks.store, data, "validation.parquet", folder))
    if not sequences:
        return {}
    total, num_tokens = torch.zeros(1, dtype=torch.float64), 0
    for first in range(0, len(sequences), batch_size):
        batch = plan_batch(ranks, resident.policy, resident.rows, sequences[first : first + batch_size])
        num_tokens += batch.num_tokens
        for logprobs_BT in frozen_logprobs(resident.policy, batch.microbatches, 1.0):  # 0 outside the mask
            total -= logprobs_BT.double().sum().cpu()
    loss = float(ranks.sum(ranks.once(total))) / num_tokens
    if not math.isfinite(loss):
        raise StepRefused(f"{data.folder}: the validation loss is {loss}")
    return {"train/validation_loss": loss}
