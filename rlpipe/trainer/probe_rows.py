"""Pseudorandom texts, and their logprobs: by the policy's forward pass over rows, and by the
model's own over each text alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from rlpipe.trainer.batches import collate
from rlpipe.trainer.model import PolicyModel, reshard
from rlpipe.trainer.packing import Rows, TrainSequence, sequence_of, text_tokens
from rlpipe.trainer.step import forward

LENGTHS = (29, 17, 5, 3)  # longest first; the longer ones exceed every attention window of the test
ROOM = 8  # tokens of padding


def settle(policy: PolicyModel, device: torch.device) -> None:
    """Runs a forward pass to its end, after one that failed: otherwise FSDP would stay in the
    middle of that one.
    """
    policy.zero_grad(set_to_none=True)
    own_logprobs(policy, [sequence(LENGTHS[-1], policy.lm.config.get_text_config().vocab_size, 0)], device)


@torch.no_grad()
def own_logprobs(policy: PolicyModel, sequences: Sequence[TrainSequence], device: torch.device) -> list[Tensor]:
    """Logprobs of every token but the first, on the host, by the model's own forward pass over each
    sequence.
    """
    logprobs = [policy.plain_logprobs(torch.from_numpy(sequence.tokens).to(device)).cpu() for sequence in sequences]
    reshard(policy)
    return logprobs


def row_logprobs(
    policy: PolicyModel,
    sequences: list[TrainSequence],
    rows: Rows,
    device: torch.device,
    padding: int = 0,
    gradient: bool = False,
) -> list[Tensor]:
    """Logprobs of the scored tokens, on the host, by the policy's forward pass over rows.
    `padding`: the token with which rows are padded.
    """
    texts = [sequences] if rows is Rows.SHARED else [[sequence] for sequence in sequences]
    lengths = list(map(text_tokens, texts))
    planned = [[index] for index in range(len(texts))] if rows is Rows.SINGLE else [[*range(len(texts))]]
    # as in training, rows of one sequence are padded only to the longest of them
    microbatch = collate(texts, planned, 0 if rows is Rows.SINGLE else ROOM)
    for tokens_L, row in zip(microbatch.tokens_RL, planned, strict=True):
        tokens_L[sum(lengths[index] for index in row) :] = padding
    microbatch = microbatch.to(device)
    with torch.set_grad_enabled(gradient):
        logprobs_N, _ = forward(policy, microbatch, temperature=1.0)
    if not gradient:
        reshard(policy)
    return list(logprobs_N.cpu().split([sequence.num_scored for sequence in sequences]))


def behind(prompt: np.ndarray, text: TrainSequence) -> TrainSequence:
    """The text as the completion of a prompt."""
    tokens = np.concatenate([prompt, text.tokens])
    return sequence_of(tokens, np.arange(len(prompt), len(tokens)), num_shared=len(prompt))


def sequence(length: int, vocab_size: int, salt: int) -> TrainSequence:
    """A sequence of pseudorandom tokens, the same on every machine."""
    seed = length.to_bytes(1 + (length > 255), "big") + bytes([salt])
    digest = hashlib.shake_128(seed).digest(4 * length)
    tokens = np.frombuffer(digest, dtype="<u4").astype(np.int64) % vocab_size
    return sequence_of(tokens, np.arange(1, length))
