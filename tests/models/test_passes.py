"""Norms and rotary embeddings in few passes give what a family's own code gives."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig
from transformers.models.qwen3 import modeling_qwen3

from rlpipe.models import passes
from rlpipe.models.causal import empty_model
from rlpipe.models.fused import Replaced, as_written, leave_fused, small_modules, uses_fused
from rlpipe.models.passes import RmsNorm, rotary, use_passes
from rlpipe.models.small import VOCABULARY, small_config, small_model
from tests.models.test_fused import forgotten as forgotten
from tests.models.test_fused import passes as both_passes


def test_gradients_are_those_of_finite_differences() -> None:
    random = torch.Generator().manual_seed(0)
    input, weight = (torch.randn(size, generator=random, dtype=torch.float64) for size in ((2, 3, 8), (8,)))
    input.requires_grad_()
    for shift in (0.0, 1.0):

        def norm(input: Tensor, weight: Tensor, shift: float = shift) -> Tensor:
            return RmsNorm.apply(input, weight, 1e-5, shift)  # pyright: ignore[reportReturnType]

        trained = weight.clone().requires_grad_()
        assert torch.autograd.gradcheck(norm, (input, trained))
        frozen = [torch.autograd.grad(norm(input, each).sum(), input)[0] for each in (weight, trained)]
        assert torch.equal(*frozen)
    angles = torch.randn((2, 1, 3, 8), generator=random, dtype=torch.float64)  # its halves may differ
    heads = torch.randn((2, 4, 3, 8), generator=random, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(passes._Rotation.apply, (heads, angles.cos(), angles.sin()))


# weights by themselves, weights minus 1 and four norms a layer, norms without weights and rotation
# of neighbours, a rotation of a part of the head
@pytest.mark.parametrize(
    "family", ["qwen3", *(pytest.param(name, marks=pytest.mark.slow)
                          for name in ("llama", "gemma3_text", "llama4_text", "phi3", "gpt_neox", "olmo2", "cohere2"))]
)  # fmt: skip
def test_both_passes_are_those_of_the_familys_own_code(family: str) -> None:
    lm = small_model(small_config(AutoConfig.for_model(family)))
    tokens = torch.arange(2 * 19).view(2, 19) % VOCABULARY
    expected = both_passes(lm, tokens)
    use_passes(lm)
    given = both_passes(lm, tokens)
    with as_written():
        assert all(map(torch.equal, both_passes(lm, tokens), expected))
    for one, other in zip(given, expected, strict=True):
        assert (one - other).norm() <= 1e-5 * other.norm() + 1e-7
    leave_fused(lm)
    assert not uses_fused(lm) and all(map(torch.equal, both_passes(lm, tokens), expected))


def test_norms_of_a_model_without_weights_are_found() -> None:
    """As a policy's are when it is loaded: its weights are parts on other ranks."""
    for family, found in (("qwen3", True), ("gemma3_text", True), ("gpt_neox", False)):
        lm = empty_model(small_config(AutoConfig.for_model(family)))
        use_passes(lm)
        norms = [module for module in small_modules(lm) if type(module).__name__.endswith("Norm")]
        assert all("forward" in vars(module) for module in norms) and uses_fused(lm) == found


class AnotherNorm(nn.Module):
    def __init__(self, power: float) -> None:
        super().__init__()
        self.weight, self.eps, self.power = nn.Parameter(torch.ones(8)), 1e-6, power

    def forward(self, input: Tensor) -> Tensor:
        return input * (input.pow(2).mean(-1, keepdim=True) + self.eps).pow(self.power) * self.weight


def test_what_computes_something_else_is_left() -> None:
    assert passes._norm_of(AnotherNorm(-0.5)) is not None
    assert passes._norm_of(AnotherNorm(-0.501)) is None
    assert passes._norm_of(nn.LayerNorm(8)) is None
    plain = modeling_qwen3.apply_rotary_pos_emb
    assert isinstance(passes._rotary_of(plain), Replaced)
    assert passes._rotary_of(lambda query, key, cos, sin: plain(query, key, cos, -sin)) is None
    assert passes._rotary_of(lambda query: query) is None
    query, angles = torch.randn(1, 4, 3, 8), torch.randn(1, 3, 8)
    ours = rotary(lambda query, cos, sin: query + cos + sin, query, cos=angles.cos(), sin=angles.sin())
    assert torch.equal(ours, query + angles.cos() + angles.sin()), "called in another way"


def test_other_numbers_than_float32_are_computed_as_written() -> None:
    query, key = torch.randn(1, 4, 3, 8, dtype=torch.bfloat16), torch.randn(1, 2, 3, 8, dtype=torch.bfloat16)
    angles = torch.randn(1, 3, 8, dtype=torch.bfloat16)
    plain = modeling_qwen3.apply_rotary_pos_emb
    ours = rotary(plain, query, key, angles.cos(), angles.sin())
    assert all(map(torch.equal, ours, plain(query, key, angles.cos(), angles.sin())))
