"""The FLOPs of a model's passes, and their share of a GPU's peak: model FLOPs utilisation (MFU).

After PaLM (Chowdhery et al. 2022, https://arxiv.org/abs/2204.02311), appendix B: 6 N + 12 L H Q T
per token for a forward and a backward pass, with N parameters, L layers, H heads, Q the head
dimension, T tokens of the sequence. A forward pass is a third of that. N leaves out embeddings,
which are only looked up, counts only the experts that a token is routed to, and the head only for
scored tokens, whose logits are computed. Recomputed activations and padding do not count; as in the
paper, windows and the causal half are not subtracted.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch

from rlpipe.base.values import Metrics
from rlpipe.models.branched import uses_branched
from rlpipe.models.causal import expert_layers
from rlpipe.models.flex import uses_flex
from rlpipe.trainer.model import PolicyModel
from rlpipe.trainer.packing import Text, text_pairs, text_tokens
from rlpipe.trainer.ranks import Ranks

# dense TFLOP/s in bfloat16, and in float32 without TF32, by the makers' data sheets; all words are
# in the name that the driver gives
PEAKS = [
    ({"A100"}, 312.0, 19.5),
    ({"H100", "PCIe"}, 756.0, 51.0),
    ({"H100", "NVL"}, 835.0, 60.0),
    ({"H100"}, 989.0, 67.0),
    ({"H200"}, 989.0, 67.0),
    ({"L40S"}, 362.0, 91.6),
    ({"B200"}, 2250.0, 75.0),
]
# what families call the experts of a token
CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k")
TRAINED = 3  # forward passes that a forward and a backward pass are


@dataclass(frozen=True)
class Work:
    """The work of a pass over texts, on all ranks. `scored`: the number of tokens whose logits are
    computed. `pairs`: pairs of tokens, as if each token saw its whole sequence.
    """

    tokens: int
    scored: int
    pairs: int


def work_of(texts: list[Text]) -> Work:
    """The work of a pass over these texts; a prompt that several completions share counts once."""
    scored = sum(sequence.num_scored for text in texts for sequence in text)
    return Work(sum(map(text_tokens, texts)), scored, sum(map(text_pairs, texts)))


def forward_flops(policy: PolicyModel, work: Work) -> float | None:
    """FLOPs of one forward pass: 2 x (parameters x tokens + head x scored) + pair_flops x pairs.

    None for a family whose head, or whose number of experts per token, is not known.
    """
    head, parameters = getattr(policy.lm.get_output_embeddings(), "weight", None), used_parameters(policy)
    if head is None or parameters is None:
        return None
    return 2.0 * (parameters * work.tokens + head.numel() * work.scored) + pair_flops(policy) * work.pairs


def attention_tokens(policy: PolicyModel) -> float | None:
    """The length of a text at which attention over visible pairs alone costs as much as all else in
    its layers. None for a policy with another attention, with an L x L mask.

    flex_attention computes the causal half. On a CPU a piece's pairs are all computed, at about
    half the speed of other products.
    """
    if not (uses_flex(policy.lm) or uses_branched(policy.lm)):
        return None
    parameters = used_parameters(policy)
    # parameters are overestimated, so attention counts as cheap, which does not change which
    # prompts are shared
    if parameters is None:
        parameters = sum(one.numel() for one in policy.lm.parameters())
    return (4.0 if uses_flex(policy.lm) else 1.0) * parameters / max(pair_flops(policy), 1.0)


def used_parameters(policy: PolicyModel) -> float | None:
    """The number of parameters that a token is multiplied with in a pass, without the head; None
    for a family whose number of experts per token is not known.
    """
    lm, text = policy.lm, policy.lm.config.get_text_config()
    looked_up, head = (
        getattr(part, "weight", None) for part in (lm.get_input_embeddings(), lm.get_output_embeddings())
    )
    parameters = sum(one.numel() for one in lm.parameters() if one is not looked_up and one is not head)
    for experts in expert_layers(lm):
        chosen = next((value for name in CHOSEN if isinstance(value := getattr(text, name, None), int)), None)
        if chosen is None:
            return None
        held = sum(parameter.numel() for parameter in experts.parameters())
        parameters -= held * (1 - chosen / experts.num_experts)
    return parameters


def pair_flops(policy: PolicyModel) -> float:
    """FLOPs of attention per pair of tokens: 4 x layers x heads x head_dim."""
    text = policy.lm.config.get_text_config()
    heads = getattr(text, "num_attention_heads", None) or 0  # some families have no attention
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // max(heads, 1)
    return 4.0 * text.num_hidden_layers * heads * head_dim


def peak_flops(device: torch.device, dtype: str) -> float | None:
    """The peak FLOP/s of a GPU, by its name; None for an unknown GPU, and for a CPU."""
    if device.type != "cuda":
        return None
    words = set(re.findall(r"\w+", torch.cuda.get_device_name(device)))
    teras = next((half if dtype == "bfloat16" else single for names, half, single in PEAKS if names <= words), None)
    return None if teras is None else 1e12 * teras


def mfu(ranks: Ranks, seconds: float, done: list[tuple[PolicyModel, Work, int]]) -> Metrics:
    """The metric `train/mfu`. `done`: (policy, work, its number of forward passes).

    Empty where the peak or the FLOPs are not known.
    """
    peak, whole = peak_flops(ranks.device, ranks.options.dtype), 0.0
    if peak is None or seconds <= 0:
        return {}
    for policy, work, passes in done:
        one = forward_flops(policy, work)
        if one is None:
            return {}
        whole += passes * one
    return {"train/mfu": whole / (seconds * peak * ranks.size)}
