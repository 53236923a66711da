"""A segment of SFT steps: the same gang, packing and step as RL, with the cross-entropy of the masked tokens."""

from __future__ import annotations

import math
import time

import torch
from torch import Tensor

from rlpipe.losses import sft_loss
from rlpipe.store.artifacts import read_manifest
from rlpipe.trainer.batches import Microbatch, TrainSequence, conversations_of_step, read_conversations
from rlpipe.trainer.gang import Gang
from rlpipe.trainer.settings import SftSettings, learning_rate
from rlpipe.trainer.state import Resident
from rlpipe.trainer.step import LossPart, StepSettings, frozen_logprobs, optimizer_step, plan_batch
from rlpipe.types import ArtifactRef, JsonDict, StepRefused

VALIDATION = "validation.parquet"


def train_sft(gang: Gang, resident: Resident, data: ArtifactRef, settings: SftSettings) -> JsonDict:
    """Runs the global steps first_step .. first_step + num_steps - 1. StepRefused names the data folder and the step."""
    conversations: list[TrainSequence] = []
    with gang.together():
        conversations = read_conversations(gang.store, data)
    resident.configure((settings.beta1, settings.beta2), settings.weight_decay)
    started = time.monotonic()
    losses: list[float] = []
    grad_norms: list[float] = []
    rate = 0.0
    num_tokens = tokens = slots = 0
    for index in range(settings.num_steps if conversations else 0):
        step = settings.first_step + index
        chosen = conversations_of_step(len(conversations), step, settings.batch_size, settings.seed)
        batch = plan_batch(gang, [conversations[row] for row in chosen])
        rate = learning_rate(settings, step)
        if batch.num_tokens:
            how = StepSettings(rate, settings.grad_clip, 1.0, f"{data.folder} step {step}")
            done = optimizer_step(gang, resident, batch, _part(batch.num_tokens), how)
            losses.append(done["loss"])
            grad_norms.append(done["grad_norm"])
        num_tokens, tokens, slots = num_tokens + batch.num_tokens, tokens + batch.tokens, slots + batch.slots
        gang.report(index + 1, settings.num_steps)
    metrics = {
        "train/loss": sum(losses) / max(len(losses), 1),
        "train/grad_norm": sum(grad_norms) / max(len(grad_norms), 1),
        "train/learning_rate": rate,
        "train/num_tokens": num_tokens,
        "train/packing_efficiency": tokens / max(slots, 1),
        "train_s": time.monotonic() - started,
    }
    return metrics | _validation(gang, resident, data, settings.batch_size) | {"losses": losses}


def _validation(gang: Gang, resident: Resident, data: ArtifactRef, batch_size: int) -> JsonDict:
    """The mean cross-entropy of the masked tokens of `validation.parquet`, where the data has one; nothing is updated."""
    sequences: list[TrainSequence] = []
    with gang.together():
        files = read_manifest(gang.store, data.folder, data.sha256).files
        if any(record.plain_name == VALIDATION for record in files):
            sequences = read_conversations(gang.store, data, VALIDATION)
    if not sequences:
        return {}
    total, num_tokens = torch.zeros(1, dtype=torch.float64), 0
    for first in range(0, len(sequences), batch_size):
        batch = plan_batch(gang, sequences[first : first + batch_size])
        num_tokens += batch.num_tokens
        for logprobs_BT in frozen_logprobs(resident.policy, batch.microbatches, 1.0):  # 0 outside the mask
            total -= logprobs_BT.double().sum().cpu()
    loss = float(gang.sum(total)) / num_tokens
    if not math.isfinite(loss):
        raise StepRefused(f"{data.folder}: the validation loss is {loss}")
    return {"train/validation_loss": loss}


def _part(num_tokens: int) -> LossPart:
    def part(microbatch: Microbatch, logprobs_BT: Tensor, entropy_BT: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return sft_loss(logprobs_BT, microbatch.mask_BT, num_tokens=num_tokens), {}

    return part
