"""The slots of one bucket: requests that decode together, and the sampling of a token for each.

The uniform of a token depends only on the request's seed and the token's index in its completion.

Legend: S slots, V vocabulary (padded with -inf), P padded prompt length.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from rlpipe.extras.local_engine.model import LENGTH_STEP, ROW_STEP, LocalModel, PrefixBlock, round_up, slot_count
from rlpipe.extras.local_engine.protocol import SamplingJob

VOCAB_STEP = 64  # with a multiple of 64, every row of the sampler starts on a vector's border
GREEDY_BELOW = 1e-6
LEAST = 1e-300  # where a probability rounds to 0 its logprob is a number all the same
# sampled together: larger tensors would be new pages of the kernel every time, 4 times slower
ROWS_MIN, VALUES = (16, 1 << 17)
TOP_K_OFF = 1 << 62
SETTINGS = np.dtype([("seed", np.uint64), ("temperature", np.float64), ("top_p", np.float64), ("top_k", np.int64)])


class SlotPool:
    """Jobs of one bucket length, sampled and decoded in step, in the first slots; the free ones
    among these compute padding.
    """

    def __init__(self, model: LocalModel, bucket: int) -> None:
        self.model = model
        self.bucket = bucket
        num_slots = slot_count(bucket, model.requests_max)
        self.kv_N2SHLD = model.empty_slots(num_slots, bucket)
        self.slots: dict[SamplingJob, int] = {}
        self.free = list(range(num_slots))
        padded_vocab = round_up(model.vocab_size + 1, VOCAB_STEP)  # +1: the bits of a logprob depend on this width
        self.logits_SV = torch.full((num_slots, padded_vocab), -torch.inf, device=model.device)
        self.logits_SV[:, : model.vocab_size] = 0
        self.settings_S = no_settings(num_slots)

    def admit(self, job: SamplingJob, block: PrefixBlock, row: int) -> None:
        """Puts a job into a free slot, with its prompt's keys, values and logits copied from a
        computed block.
        """
        padded = block.kv_N2RHPD.shape[4]
        assert padded <= self.bucket, "a prompt longer than its bucket"
        assert job not in self.slots and len(job.tokens) < job.sampling.max_new_tokens, (
            f"{job.rid} has nothing left to sample"
        )
        slot = self.slots[job] = self._first_free()
        self.kv_N2SHLD[:, :, slot, :, :padded] = block.kv_N2RHPD[:, :, row]
        self.logits_SV[slot, : self.model.vocab_size] = block.logits_RV[row]
        sampling = job.sampling
        top_k = sampling.top_k if sampling.top_k > 0 else TOP_K_OFF
        self.settings_S[slot] = (job.seed, sampling.temperature, sampling.top_p, top_k)

    def release(self, job: SamplingJob) -> None:
        """Frees the slot of a job."""
        slot = self.slots.pop(job)
        self.settings_S[slot] = no_settings(1)
        self.free.append(slot)

    def _first_free(self) -> int:
        slot = min(self.free)
        self.free.remove(slot)
        return slot

    def _rows(self) -> int:
        """The number of first slots that have all jobs, filled up to a whole step."""
        return min(round_up(max(self.slots.values()) + 1, ROW_STEP), len(self.settings_S))

    def _used(self) -> int:
        """The number of first slots that have all jobs, as attention and sampling count them."""
        return attended_rows(max(self.slots.values()) + 1)

    def _compact(self) -> None:
        """Moves jobs to the first slots where a step then computes fewer; their logits are not
        moved.
        """
        used = attended_rows(len(self.slots))
        for job, slot in self.slots.items():
            if slot >= used:
                to, end = self._first_free(), job.num_tokens
                self.kv_N2SHLD[:, :, to, :, :end] = self.kv_N2SHLD[:, :, slot, :, :end]
                self.settings_S[to] = self.settings_S[slot]
                self.settings_S[slot] = no_settings(1)
                self.slots[job] = to
                self.free.append(slot)

    def sample(self, weight_version: str) -> None:
        """Samples one token for every job."""
        # on a GPU a sum over one row alone may have other bits
        rows = self._used() if self.model.device.type == "cpu" else self._rows()
        settings_S, index_S = self.settings_S[:rows], np.zeros(rows, dtype=np.uint64)
        for job, slot in self.slots.items():
            index_S[slot] = len(job.tokens)
            if len(job.tokens) < job.sampling.min_new_tokens:
                self.logits_SV[slot, torch.tensor(job.stop_token_ids, dtype=torch.long)] = -torch.inf
        tokens_S, logprobs_S = sample(self.logits_SV[:rows], settings_S, uniforms(settings_S["seed"], index_S))
        tokens, logprobs = tokens_S.tolist(), logprobs_S.tolist()
        for job, slot in self.slots.items():
            job.tokens.append(tokens[slot])
            job.logprobs.append(logprobs[slot])
            job.versions.append(weight_version)

    def decode(self) -> None:
        """Computes the logits after the tokens sampled last; padding runs at position 0 of free
        slots.
        """
        self._compact()
        rows = self._rows()
        last, position = [0] * rows, [0] * rows
        for job, slot in self.slots.items():
            last[slot] = job.tokens[-1]
            position[slot] = job.num_tokens - 1
        assert max(position) < self.bucket, "a row outgrew its bucket"
        device = self.model.device
        last_S, position_S = torch.tensor(last, device=device), torch.tensor(position, device=device)
        length = min(round_up(max(position) + 1, LENGTH_STEP), self.bucket)
        logits_SV = self.model.decode(last_S, position_S, self.kv_N2SHLD, self._used(), length)
        self.logits_SV[:rows, : self.model.vocab_size] = logits_SV


def attended_rows(num_jobs: int) -> int:
    """The rows whose attention a step computes for so many jobs in the first slots: a whole step,
    or a power of two below it.
    """
    return 1 << (num_jobs - 1).bit_length() if num_jobs < ROW_STEP else round_up(num_jobs, ROW_STEP)


def no_settings(num_slots: int) -> np.ndarray:
    """The settings of unused slots: every token at temperature 1."""
    return np.full(num_slots, np.array((0, 1.0, 1.0, TOP_K_OFF), dtype=SETTINGS))


def uniforms(seeds_S: np.ndarray, token_index_S: np.ndarray) -> np.ndarray:
    """Float64 in [0, 1 - 2^-52], a counter-based hash (splitmix64's finaliser, twice) of (seed,
    index), both uint64.
    """
    assert seeds_S.dtype == np.uint64 and token_index_S.dtype == np.uint64, "the hash needs wrapping 64-bit products"
    mixed_S = _mix(_mix(seeds_S + np.uint64(0x9E3779B97F4A7C15)) + token_index_S * np.uint64(0x9E3779B97F4A7C15))
    # 52 bits: u * total stays below total in float64
    return (mixed_S >> np.uint64(12)).astype(np.float64) * 2.0**-52


def _mix(x_S: np.ndarray) -> np.ndarray:
    x_S = (x_S ^ (x_S >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x_S = (x_S ^ (x_S >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x_S ^ (x_S >> np.uint64(31))


def sample(logits_SV: Tensor, settings_S: np.ndarray, uniform_S: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and logprobs of all slots.

    Logprobs are of the temperature-scaled distribution, before top-k and top-p.
    """
    assert logits_SV.shape[0] == len(settings_S) == len(uniform_S) and logits_SV.dtype == torch.float32
    rows = max(ROWS_MIN, VALUES // logits_SV.shape[1])
    borders = [(first, first + rows) for first in range(0, len(uniform_S), rows)]
    parts = [_sample_rows(logits_SV[first:end], settings_S[first:end], uniform_S[first:end]) for first, end in borders]
    return np.concatenate([tokens for tokens, _ in parts]), np.concatenate([logprobs for _, logprobs in parts])


def _sample_rows(logits_SV: Tensor, settings_S: np.ndarray, uniform_S: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    device = logits_SV.device
    temperature_S, top_p_S, top_k_S = (
        torch.tensor(settings_S[name], device=device) for name in ("temperature", "top_p", "top_k")
    )
    greedy_S = temperature_S < GREEDY_BELOW
    scaled_SV = logits_SV.double()
    if (settings_S["temperature"] != 1).any():  # else a pass over all of it for the same bits
        scaled_SV /= temperature_S.masked_fill(greedy_S, 1.0)[:, None]
    probs_SV = torch.softmax(scaled_SV, dim=-1)
    kept_SV = probs_SV
    if (settings_S["top_p"] < 1).any() or (settings_S["top_k"] < logits_SV.shape[1]).any():
        kept_SV = _filtered(probs_SV, top_p_S, top_k_S)
    cdf_SV = kept_SV.cumsum(-1)
    target_S1 = torch.from_numpy(uniform_S).to(device)[:, None] * cdf_SV[:, -1:]
    tokens_S = torch.searchsorted(cdf_SV, target_S1, right=True)[:, 0].clamp_(max=logits_SV.shape[1] - 1)
    if (settings_S["temperature"] < GREEDY_BELOW).any():
        tokens_S = torch.where(greedy_S, logits_SV.argmax(-1), tokens_S)
    chosen_S = probs_SV.gather(1, tokens_S[:, None])[:, 0].clamp_min(LEAST).log()
    return tokens_S.cpu().numpy(), chosen_S.cpu().numpy()


def _filtered(probs_SV: Tensor, top_p_S: Tensor, top_k_S: Tensor) -> Tensor:
    """Sets the probabilities outside of top-k and top-p to 0; a slot without either keeps its exact
    bits.
    """
    sorted_SV, order_SV = probs_SV.sort(dim=-1, descending=True, stable=True)
    before_SV = sorted_SV.cumsum(-1) - sorted_SV
    rank_V = torch.arange(probs_SV.shape[1], device=probs_SV.device)
    # rounding may push the sum past 1, so top_p = 1 must not be compared with it
    keep_SV = (rank_V < top_k_S[:, None]) & ((before_SV <= top_p_S[:, None]) | (top_p_S[:, None] >= 1))
    return torch.where(torch.zeros_like(keep_SV).scatter(1, order_SV, keep_SV), probs_SV, 0.0)
