"""Tests at every load, with the loaded weights, that the policy's forward pass gives the same as
the language model's own for each text alone.
"""

from __future__ import annotations

import logging
import math
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlpipe.base.errors import UserError
from rlpipe.models.branched import supports_branched, use_branched
from rlpipe.models.causal import MODEL_FAULTS, WINDOW_TESTED, other_windows, small_windows
from rlpipe.models.context_parallel import uses_context_group
from rlpipe.models.flex import leave_attention, leave_flex, own_attention, try_kernels, use_flex, uses_flex
from rlpipe.models.fused import as_written, leave_fused, use_fused, uses_fused
from rlpipe.models.passes import use_passes
from rlpipe.trainer.model import PolicyModel, own_rows
from rlpipe.trainer.packing import Rows, TrainSequence
from rlpipe.trainer.probe_rows import LENGTHS, behind, own_logprobs, row_logprobs, sequence, settle
from rlpipe.trainer.ranks import Ranks

log = logging.getLogger(__name__)
LONG = (200, 150, 40, 9)  # lengths of more than one block of flex_attention
PROMPT = 11  # tokens of the shared prompt
assert min(LENGTHS[1], PROMPT) > WINDOW_TESTED
# rounding by another order of arithmetic stays below these: FAR for one text computed in two
# shapes, NEAR for one shape with other tokens elsewhere in it, which changes only the number of
# tokens per expert
FAR = {"float32": 1e-4, "bfloat16": 0.3}
FAR_PACKED = {"float32": 1e-5, "bfloat16": 0.3}  # or TIMES the difference of single rows
# relative to the gradient's norm; for a wrong gradient the distance is about 1
FAR_GRADIENT = {"float32": 1e-3, "bfloat16": 0.2}
NEAR = {"float32": 1e-5, "bfloat16": 0.02}
EXACT, TIMES = 1e-6, 4.0
FLEX_DEVICES = ("cuda",)  # on a CPU flex_attention has no kernel for the backward pass
FUSED_DEVICES = ("cuda",)
FIRST_TOKENS = 2048


@dataclass(frozen=True)
class Proof:
    """The mean absolute differences of the logprobs of tokens.

    `single`, `packed`, `shared`: between such rows and the model's own forward pass over each text
    alone. `ahead`: of single rows, when later tokens change; `aside`, `leak`, `branch_leak`: of
    single, packed and shared rows, when the other sequences change.
    """

    single: float
    packed: float
    ahead: float
    aside: float
    leak: float
    shared: float = math.inf  # infinite for a model that takes no mask of ours
    branch_leak: float = math.inf

    @property
    def is_finite(self) -> bool:
        return all(map(math.isfinite, (self.single, self.packed, self.ahead, self.aside, self.leak)))

    def rows(self, family: str, dtype: str) -> Rows:
        """The most efficient rows that change no logprob: with shared prompts, packed, or one
        sequence per row.

        UserError naming the family when even single rows are wrong.
        """
        if not self.is_finite:
            raise UserError(
                f"model: {family}: its logprobs are not finite; its weights are damaged, or too large for {dtype}"
            )
        if self.ahead > NEAR[dtype] or self.single > FAR[dtype]:
            what = (
                "it looks ahead" if self.ahead > NEAR[dtype] else "a row is computed in another way than a text alone"
            )
            raise UserError(
                f"model: {family} cannot be trained here: its logprobs in a batch differ by"
                f" {max(self.ahead, self.single):.2g} per token ({what}); use a causal language model"
            )
        far, leak_max = max(FAR_PACKED[dtype], TIMES * self.single), max(EXACT, TIMES * self.aside)
        if self.packed > far or self.leak > leak_max:
            return Rows.SINGLE
        return Rows.SHARED if self.shared <= far and self.branch_leak <= leak_max else Rows.PACKED


def proven_rows(ranks: Ranks, policy: PolicyModel) -> Rows:
    """Tests with the loaded weights which rows this model allows; the same on all ranks. UserError
    as `Proof.rows`. A collective.

    On GPUs flex_attention is tried first; without it each sequence has a row of its own, which
    needs no L x L mask. On CPUs attention over pieces is tried first, for the same reason.
    """
    if ranks.device.type in FLEX_DEVICES and (rows := flex_rows(ranks, policy)) is not None:
        return rows
    if ranks.device.type == "cpu" and not ranks.context and (rows := branched_rows(ranks, policy)) is not None:
        return rows
    if ranks.context and not uses_context_group(policy.lm):
        raise UserError(
            f"model: {policy.lm.config.model_type}: its attention is computed in its own way{_alone(ranks)}"
        )
    family, proof = policy.lm.config.model_type, _of_ranks(ranks, policy)
    try:
        rows = proof.rows(family, ranks.options.dtype)
    except UserError as error:
        raise UserError(f"{error}{_alone(ranks)}") from None
    if rows is Rows.SINGLE and ranks.rank == 0:
        log.warning(
            "%s: each sequence is trained in a row of its own, because packed sequences would attend to each other"
            " (logprobs differ by %.2g per token)",
            family,
            proof.leak,
        )
    far = gradient_distance(ranks, policy, Rows.SINGLE) if ranks.context else 0.0
    if not far <= FAR_GRADIENT[ranks.options.dtype]:
        raise UserError(f"model: {family} cannot be trained here: its gradients differ by {far:.2g}{_alone(ranks)}")
    # packed rows take an L x L mask, with which a GPU cannot use its fast kernels; on a CPU padding
    # costs more than the mask
    return Rows.SINGLE if ranks.device.type == "cuda" else rows


def branched_rows(ranks: Ranks, policy: PolicyModel) -> Rows | None:
    """As `proven_rows`, with attention over pieces, which the policy then uses. None, and the
    policy uses its own attention, where that gives other results.
    """
    lm, rows, fault = policy.lm, Rows.SINGLE, ""
    if not supports_branched(lm) or other_windows(lm.config):
        return None
    use_branched(lm)
    use_passes(lm)
    try:
        rows = _of_ranks(ranks, policy).rows(lm.config.model_type, ranks.options.dtype)
        fault = "" if rows >= Rows.PACKED else "packed sequences see each other"
    except MODEL_FAULTS as error:
        fault = f"{error!s:.300}"
    if not fault and not (far := gradient_distance(ranks, policy, Rows.PACKED)) <= FAR_GRADIENT[ranks.options.dtype]:
        fault = f"its gradients differ by {far:.2g}"
    if not fault:
        return rows
    log.info("%s: attention is computed with a mask of whole rows (%s)", lm.config.model_type, fault)
    leave_attention(lm)
    leave_fused(lm)
    settle(policy, ranks.device)
    return None


def flex_rows(ranks: Ranks, policy: PolicyModel) -> Rows | None:
    """As `proven_rows`, with flex_attention, which the policy then uses. None, and the policy uses
    its own attention, where flex_attention gives other results. On GPUs norms, rotary embeddings
    and MLPs are fused kernels, too, unless these give other results.
    """
    lm, faults = policy.lm, list[str]()
    for choose in (use_fused, leave_fused) if ranks.device.type in FUSED_DEVICES else (leave_fused,):
        choose(lm)
        try:
            rows, fault = _tried_flex(ranks, policy)
        except UserError:
            # the load fails, but the process goes on, with other models of this family
            leave_fused(lm)
            raise
        if not fault:
            how = "flex_attention, norms and MLPs by kernels" if uses_fused(lm) else "flex_attention"
            log.info("%s: attention is computed by %s, rows are %s", lm.config.model_type, how, rows.name.lower())
            for own in faults:  # faults of the fused kernels alone
                ranks.warn(
                    f"{lm.config.model_type}: norms and MLPs are computed as its own code has them, a fifth slower"
                    f" ({own})"
                )
            return rows
        faults.append(fault)
        leave_flex(lm)
        settle(policy, ranks.device)
    how = (
        "attention is computed as its own code has it, not by flex_attention: one sequence a row, several times slower"
    )
    ranks.warn(f"{lm.config.model_type}: {how} ({faults[-1]})")
    return None


def _tried_flex(ranks: Ranks, policy: PolicyModel) -> tuple[Rows, str]:
    """Switches to flex_attention; returns the rows that it allows, and the reason why it cannot be
    used (empty if it can).
    """
    lm, rows, fault, first = policy.lm, Rows.SINGLE, "", list[TrainSequence]()
    try:
        if own := other_windows(lm.config):
            raise UserError(f"its own code bounds attention ({', '.join(own)})")
        with ranks.together():
            try_kernels(lm, ranks.device, getattr(torch, ranks.options.dtype))
        use_flex(lm)
        first = [sequence(_first_tokens(lm), lm.config.get_text_config().vocab_size, 0)] if uses_fused(lm) else []
        if first:
            row_logprobs(policy, first, Rows.SINGLE, ranks.device)
        rows = _of_ranks(ranks, policy).rows(lm.config.model_type, ranks.options.dtype)
        fault = "" if rows >= Rows.PACKED else "packed sequences see each other"
    except MODEL_FAULTS as error:
        fault = f"{error!s:.300}"
    if not fault and first and any(parameter.requires_grad for parameter in policy.parameters()):
        _gradients(ranks, policy, first, Rows.SINGLE)
    if (
        not fault
        and not (far := gradient_distance(ranks, policy, Rows.SINGLE, Rows.PACKED)) <= FAR_GRADIENT[ranks.options.dtype]
    ):
        fault = f"its gradients differ by {far:.2g}"
    return rows, fault


def _first_tokens(lm: Any) -> int:
    """The length, in tokens, of the first text of both passes, the same in all runs: torch compiles
    kernels for all lengths from it, so the bits depend on it.
    """
    return min(FIRST_TOKENS, getattr(lm.config.get_text_config(), "max_position_embeddings", None) or FIRST_TOKENS)


def _alone(ranks: Ranks) -> str:
    """The advice for a fault with context parallelism: `trainer.context_ranks = 1`; empty without
    it.
    """
    count = ranks.context_ranks
    return f" with context-parallel groups of {count} ranks; use trainer.context_ranks = 1" if count > 1 else ""


def _mean(one_N: Tensor, other_N: Tensor) -> float:
    return float((one_N.double() - other_N.double()).abs().mean())


def _of_ranks(ranks: Ranks, policy: PolicyModel) -> Proof:
    try:
        own = asdict(prove(policy, ranks.device))
    except MODEL_FAULTS as error:
        family = policy.lm.config.model_type
        raise UserError(
            f"model: {family} cannot be trained here: its forward pass fails ({error!s:.300}){_alone(ranks)}"
        ) from error
    of_ranks = ranks.gather(own)
    # np.max keeps the nan of any rank
    return Proof(**{name: float(np.max([values[name] for values in of_ranks])) for name in own})


def gradient_distance(ranks: Ranks, policy: PolicyModel, *kinds: Rows) -> float:
    """Returns the largest `|g - h| / |h|` over `kinds` of rows: g is the gradient by the attention
    in use, h that by the model's own attention over single rows. The rows have several blocks. 0
    for a policy that is not trained.
    """
    vocab_size = policy.lm.config.get_text_config().vocab_size
    texts = [sequence(length, vocab_size, 0) for length in LONG]
    if not any(parameter.requires_grad for parameter in policy.parameters()):
        return 0.0
    with small_windows(policy.lm.config):
        with own_attention(policy.lm), as_written():
            own = _gradients(ranks, policy, texts, Rows.SINGLE)
        whole = max(_norm(ranks, own), np.finfo(np.float64).tiny)
        distances: list[float] = []
        for rows in kinds:
            apart = [one - other for one, other in zip(_gradients(ranks, policy, texts, rows), own, strict=True)]
            distances.append(_norm(ranks, apart) / whole)
    return float(np.max(distances))


def _norm(ranks: Ranks, parts: list[Tensor]) -> float:
    """The norm of tensors whose rows are on all ranks; the same on all."""
    own = float(torch.stack([part.double().square().sum() for part in parts]).sum())
    return math.sqrt(math.fsum(ranks.gather(own)))


def _gradients(ranks: Ranks, policy: PolicyModel, texts: list[TrainSequence], rows: Rows) -> list[Tensor]:
    """This rank's rows of the gradients of the mean logprob; zeros for parameters that it does not
    depend on.
    """
    # FSDP takes the mean over ranks, and each rank of a context-parallel group has a part of the
    # gradient
    parts = policy.context.ranks if policy.context and uses_context_group(policy.lm) else 1
    try:
        (torch.cat(row_logprobs(policy, texts, rows, ranks.device, gradient=True)).mean() * parts).backward()
    except MODEL_FAULTS as error:
        # no further pass may follow: FSDP would add the rest of this one to the next gradient
        raise UserError(
            f"model: {policy.lm.config.model_type} has no gradient here ({error!s:.300}){_alone(ranks)}"
        ) from error
    trained = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    gradients = [torch.zeros_like(one) if one.grad is None else one.grad for one in trained]
    policy.zero_grad(set_to_none=True)
    return [own_rows(one) for one in gradients]


def prove(policy: PolicyModel, device: torch.device) -> Proof:
    """Runs the sequences alone, one per row, packed, and as completions of one prompt; and again
    with other tokens at places that must not matter.
    """
    vocab_size = policy.lm.config.get_text_config().vocab_size
    texts, others = ([sequence(length, vocab_size, salt) for length in LENGTHS] for salt in (0, 1))
    later = [
        replace(text, completion=np.append(text.completion[:-1], other.tokens[-1]))
        for text, other in zip(texts, others, strict=True)
    ]
    with small_windows(policy.lm.config):
        own = torch.cat(own_logprobs(policy, texts, device))
        single, aside = tried(policy, texts, others, Rows.SINGLE, device)
        packed, leak = tried(policy, texts, others, Rows.PACKED, device)
        changed = row_logprobs(policy, later, Rows.SINGLE, device, padding=vocab_size // 2)
        # on a GPU without flex_attention rows hold one sequence anyway; and short texts would not
        # show a layer that counts places in a row instead of positions
        shareable = (device.type == "cpu" or uses_flex(policy.lm)) and not other_windows(policy.lm.config)
        shared, branch_leak = _prove_shared(policy, texts, others, device) if shareable else (math.inf, math.inf)
    return Proof(
        single=_mean(torch.cat(single), own),
        packed=_mean(torch.cat(packed), own),
        ahead=_mean(torch.cat([part[:-1] for part in single]), torch.cat([part[:-1] for part in changed])),
        aside=aside,
        leak=leak,
        shared=shared,
        branch_leak=branch_leak,
    )


def _prove_shared(
    policy: PolicyModel, texts: list[TrainSequence], others: list[TrainSequence], device: torch.device
) -> tuple[float, float]:
    """Returns `shared` and `branch_leak` of the sequences as completions of one prompt; infinite
    where the model does not take the mask.
    """
    prompt = sequence(PROMPT, policy.lm.config.get_text_config().vocab_size, 2).tokens
    texts, others = [behind(prompt, text) for text in texts], [behind(prompt, text) for text in others]
    own = [part[PROMPT - 1 :] for part in own_logprobs(policy, texts, device)]
    try:
        shared, leak = tried(policy, texts, others, Rows.SHARED, device)
    except MODEL_FAULTS as error:
        log.info(
            "%s: the rollouts of a group cannot share the computation of their prompt: %.300s",
            policy.lm.config.model_type,
            error,
        )
        settle(policy, device)
        return math.inf, math.inf
    return _mean(torch.cat(shared), torch.cat(own)), leak


def tried(
    policy: PolicyModel, texts: list[TrainSequence], others: list[TrainSequence], rows: Rows, device: torch.device
) -> tuple[list[Tensor], float]:
    """Returns the logprobs of the sequences in such rows, and the largest mean absolute difference
    of a sequence's logprobs when every second sequence is replaced.
    """
    given = row_logprobs(policy, texts, rows, device)
    halves = [
        [other if index % 2 == half else text for index, (text, other) in enumerate(zip(texts, others, strict=True))]
        for half in (0, 1)
    ]
    beside = [row_logprobs(policy, half, rows, device) for half in halves]
    return given, float(np.max([_mean(part, beside[1 - index % 2][index]) for index, part in enumerate(given)]))
