"""The arithmetic of a model's passes, and the share of a GPU's peak that it is: model FLOPs
utilisation (MFU).

After PaLM (Chowdhery et al. 2022, https://arxiv.org/abs/2204.02311), appendix B: 6 N + 12 L H Q T a
token for a forward and a backward pass, N parameters, L layers, H heads, Q numbers of a head, T
tokens of the sequence. A third of that is a forward pass. N without embeddings that are only looked
up, of a layer's experts those that a token is sent to, and the head for the tokens whose logits are
made, the scored ones. Recomputed activations and padding are no model FLOPs; windows and the causal
half are not taken off, as there.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch

from rlpipe.base.values import Metrics
from rlpipe.models.causal import expert_layers
from rlpipe.models.flex import uses_flex
from rlpipe.trainer.gang import Gang
from rlpipe.trainer.model import PolicyModel
from rlpipe.trainer.packing import Text, text_pairs, text_tokens

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
    """The work of a pass over texts, on all ranks. `scored`: tokens whose logits are made. `pairs`:
    pairs of tokens, as if each saw all of its sequence."""

    tokens: int
    scored: int
    pairs: int


def work_of(texts: list[Text]) -> Work:
    """A prompt that several completions share is computed once."""
    scored = sum(sequence.num_scored for text in texts for sequence in text)
    return Work(sum(map(text_tokens, texts)), scored, sum(map(text_pairs, texts)))


def forward_flops(policy: PolicyModel, work: Work) -> float | None:
    """FLOPs of one forward pass: 2 x (parameters x tokens + head x scored) + pair_flops x pairs.

    None for a family that does not say what its head is, or how many experts a token is sent to.
    """
    head, parameters = getattr(policy.lm.get_output_embeddings(), "weight", None), used_parameters(policy)
    if head is None or parameters is None:
        return None
    return 2.0 * (parameters * work.tokens + head.numel() * work.scored) + pair_flops(policy) * work.pairs


def flex_tokens(policy: PolicyModel) -> float | None:
    """With flex_attention: at this length of a text its attention, of which the causal half is
    computed, costs as much as all else in its layers. None for a policy with another attention,
    that takes a mask of L x L.
    """
    if not uses_flex(policy.lm):
        return None
    parameters = used_parameters(policy)
    # too many, so attention is held to be cheap: what is shared is then no other
    if parameters is None:
        parameters = sum(one.numel() for one in policy.lm.parameters())
    return 4.0 * parameters / max(pair_flops(policy), 1.0)


def used_parameters(policy: PolicyModel) -> float | None:
    """The number of parameters that a token of a pass is multiplied with, without the head; None
    for a family that does not say how many experts a token is sent to."""
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
    """FLOPs of attention for a token and one that it sees: 4 x layers x heads x head_dim."""
    text = policy.lm.config.get_text_config()
    heads = getattr(text, "num_attention_heads", None) or 0  # no layer of some families has any
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // max(heads, 1)
    return 4.0 * text.num_hidden_layers * heads * head_dim


def peak_flops(device: torch.device, dtype: str) -> float | None:
    """FLOP/s of a GPU that is known by its name; None for others, and for a CPU."""
    if device.type != "cuda":
        return None
    words = set(re.findall(r"\w+", torch.cuda.get_device_name(device)))
    teras = next((half if dtype == "bfloat16" else single for names, half, single in PEAKS if names <= words), None)
    return None if teras is None else 1e12 * teras


def mfu(gang: Gang, seconds: float, done: list[tuple[PolicyModel, Work, int]]) -> Metrics:
    """`train/mfu`, given the forward passes that were done over some work by a policy.

    Nothing where peak or arithmetic is not known.
    """
    peak, whole = peak_flops(gang.device, gang.options.dtype), 0.0
    if peak is None or seconds <= 0:
        return {}
    for policy, work, passes in done:
        one = forward_flops(policy, work)
        if one is None:
            return {}
        whole += passes * one
    return {"train/mfu": whole / (seconds * peak * gang.size)}
