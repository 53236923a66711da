"""Linear layers by oneDNN: the numbers of float64, the same bits again,
and a row's bits wherever it is."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoModelForCausalLM

from rlpipe.models import linear
from rlpipe.models.linear import FastLinear, fast_linear, use_fast_linears
from tests import trainer_world as world
from tests.engine_fixtures import tiny_config

SIZES = st.integers(1, 130)


def draws(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def gradients(function: object, input: Tensor, weight: Tensor, bias: Tensor | None, upstream: Tensor) -> list[Tensor]:
    leaves = [tensor.clone().requires_grad_(True) for tensor in (input, weight, bias) if tensor is not None]
    output = function(*leaves)  # pyright: ignore[reportCallIssue]
    return [output.detach(), *torch.autograd.grad(output, leaves, upstream)]


@settings(deadline=None, max_examples=60)
@given(rows=SIZES, inputs=SIZES, outputs=SIZES, with_bias=st.booleans(), is_batched=st.booleans())
def test_values_and_gradients_are_those_of_float64(
    rows: int, inputs: int, outputs: int, with_bias: bool, is_batched: bool
) -> None:
    input, weight = draws(*([2, rows] if is_batched else [rows]), inputs), draws(outputs, inputs, seed=1)
    bias, upstream = draws(outputs, seed=2) if with_bias else None, draws(*input.shape[:-1], outputs, seed=3)
    found = gradients(fast_linear, input, weight, bias, upstream)
    exact = gradients(
        functional.linear, *(t if t is None else t.double() for t in (input, weight, bias)), upstream.double()
    )  # pyright: ignore[reportArgumentType]
    torch_s = gradients(functional.linear, input, weight, bias, upstream)
    for one, oracle, other in zip(found, exact, torch_s, strict=True):
        assert one.dtype is torch.float32 and one.shape == oracle.shape
        worst = max(float((other.double() - oracle).abs().max()), 1e-6 * float(oracle.abs().max()))
        assert float((one.double() - oracle).abs().max()) <= 8 * worst
    assert all(
        torch.equal(a, b) for a, b in zip(found, gradients(fast_linear, input, weight, bias, upstream), strict=True)
    )


@pytest.mark.parametrize("rows", [8, 16, 32, 64, 128])
@pytest.mark.parametrize(("inputs", "outputs"), [(128, 384), (384, 128), (128, 101), (576, 1536)])
def test_the_bits_of_a_row_do_not_depend_on_its_place_or_its_neighbours(rows: int, inputs: int, outputs: int) -> None:
    weight, row = draws(outputs, inputs), draws(inputs, seed=1)
    alone = fast_linear(row.expand(rows, inputs).contiguous(), weight)
    assert torch.equal(alone, alone[:1].expand_as(alone))
    for place in (0, rows // 2, rows - 1):
        among = draws(rows, inputs, seed=2)
        among[place] = row
        assert torch.equal(fast_linear(among, weight)[place], alone[0])


@pytest.mark.parametrize("of_weight", [False, True])
def test_inputs_of_any_layout_and_weights_that_are_frozen(of_weight: bool) -> None:
    for input in (
        draws(12),
        draws(12, 5).t(),
        draws(7, 24)[:, ::2],
        draws(1, 12).expand(6, 12),
        draws(3, 12, 2).transpose(1, 2),
    ):
        weight = draws(9, 12, seed=1).requires_grad_(of_weight)
        leaves = [input.clone().requires_grad_(True), *([weight] if of_weight else [])]
        results = [
            torch.autograd.grad(function(leaves[0].expand_as(input), weight).square().sum(), leaves)
            for function in (fast_linear, functional.linear)
        ]
        assert len(results[0]) == 1 + of_weight
        for one, other in zip(*results, strict=True):
            assert torch.allclose(one, other, rtol=1e-4, atol=1e-4)


def test_beside_a_frozen_weight_the_input_is_not_kept() -> None:
    input, weight = draws(4, 6).requires_grad_(True), draws(5, 6, seed=1)
    hidden = input * 1.0
    output = fast_linear(hidden, weight)
    hidden.detach().mul_(2)  # torch refuses a backward pass whose saved tensors were changed
    assert torch.allclose(torch.autograd.grad(output.sum(), input)[0], weight.sum(0).expand(4, 6), atol=1e-5)


def test_a_second_derivative_is_refused() -> None:
    input, weight = draws(4, 6).requires_grad_(True), draws(5, 6, seed=1).requires_grad_(True)
    (first,) = torch.autograd.grad(fast_linear(input, weight).square().sum(), input, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


def test_what_onednn_is_not_for_is_torch_s() -> None:
    for input, weight in [
        (draws(3, 4).double(), draws(5, 4).double()), (draws(3, 4).bfloat16(), draws(5, 4).bfloat16()),
        (draws(0, 4), draws(5, 4)),
    ]:  # fmt: skip
        assert torch.equal(fast_linear(input, weight), functional.linear(input, weight))


def test_a_model_computes_by_it_where_it_is_faster_and_no_name_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = torch.arange(24)[None]
    lm = AutoModelForCausalLM.from_config(tiny_config(), dtype=torch.float32).eval()
    names, own = [name for name, _ in lm.named_parameters()], lm(tokens).logits
    monkeypatch.setattr(linear, "onednn_is_faster", lambda: False)
    use_fast_linears(lm)
    assert not any(isinstance(module, FastLinear) for module in lm.modules())
    monkeypatch.setattr(linear, "onednn_is_faster", lambda: True)
    use_fast_linears(lm)
    assert not any(type(module) is nn.Linear for module in lm.modules())
    assert [name for name, _ in lm.named_parameters()] == names
    assert torch.allclose(lm(tokens).logits, own, atol=1e-5)


@pytest.mark.parametrize(
    ("facts", "maker"),
    [
        ("processor : 0\nvendor_id\t: GenuineIntel\nmodel name : Intel(R) Xeon(R), not AuthenticAMD\n", "GenuineIntel"),
        ("processor : 0\nvendor_id\t: AuthenticAMD\n", "AuthenticAMD"),
        ("processor : 0\nCPU implementer\t: 0x41\n", "0x41"),
        ("", "unknown"),
    ],
)
def test_the_maker_of_the_processor_is_part_of_what_bits_depend_on(
    facts: str, maker: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    linear.onednn_is_faster()  # it is known once, for the whole process
    monkeypatch.setattr(linear, "CPU_FACTS", tmp_path / "cpuinfo")
    assert linear.cpu_maker() == "unknown"
    (tmp_path / "cpuinfo").write_text(facts)
    assert linear.cpu_maker() == maker
    assert world.one_rank(tmp_path).fingerprint()["products"].endswith(f" on {maker}")
