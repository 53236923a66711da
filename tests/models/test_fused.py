"""What is compiled of a family's code gives what its own code gives,
and is left where it does not."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig
from transformers.models.qwen3 import modeling_qwen3

from rlpipe.base.errors import UserError
from rlpipe.models import fused
from rlpipe.models.fused import as_written, leave_fused, use_fused, uses_fused
from rlpipe.models.small import VOCABULARY, small_config, small_model
from rlpipe.trainer import selftest
from rlpipe.trainer.packing import Rows
from rlpipe.trainer.trainer import Trainer
from tests import trainer_world as world
from tests.models.test_flex import NoRoom, small_policy
from tests.models.test_flex import backward_on_a_cpu as backward_on_a_cpu

pytestmark = [
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]
# what the compiler traces, run operation by operation: a CPU takes a minute to make kernels of it
TRACED = "aot_eager"


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """Their rotary positions are a function of the family's file: what a test leaves there, those
    behind it would compute with."""
    yield
    fused.fused.cache_clear()
    for name, file in list(sys.modules.items()):
        if name.startswith("transformers.models.") and isinstance(left := vars(file).get(fused.ROTARY), fused.Replaced):
            setattr(file, fused.ROTARY, left.written)


def passes(lm: torch.nn.Module, tokens: Tensor) -> list[Tensor]:
    """The logits, and every gradient of their uneven sum."""
    logits = lm(input_ids=tokens, use_cache=False).logits
    (logits * torch.linspace(-1, 1, logits.numel(), dtype=logits.dtype).view_as(logits)).sum().backward()
    gradients = [parameter.grad for parameter in lm.parameters() if parameter.grad is not None]
    lm.zero_grad(set_to_none=True)
    return [logits.detach(), *gradients]


# norms of heads, two more norms a layer, MLPs without a gate and no rotary positions
@pytest.mark.parametrize(
    "family", ["gpt2", *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen3", "gemma2"))]
)
def test_both_passes_are_those_of_the_familys_own_code(family: str) -> None:
    lm = small_model(small_config(AutoConfig.for_model(family)))
    tokens = torch.arange(2 * 19).view(2, 19) % VOCABULARY
    expected = passes(lm, tokens)
    use_fused(lm, TRACED)
    given = passes(lm, tokens)
    with as_written():
        assert all(map(torch.equal, passes(lm, tokens), expected))
    assert uses_fused(lm) and len(given) == len(expected)
    for one, other in zip(given, expected, strict=True):
        assert (one - other).norm() <= 1e-5 * other.norm() + 1e-7
    leave_fused(lm)
    assert not uses_fused(lm) and all(map(torch.equal, passes(lm, tokens), expected))


def load(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Trainer:
    monkeypatch.setattr(selftest, "FLEX_DEVICES", ("cpu",))
    monkeypatch.setattr(selftest, "FUSED_DEVICES", ("cpu",))
    monkeypatch.setattr(selftest, "FIRST_TOKENS", 300)
    monkeypatch.setattr(selftest, "use_fused", partial(use_fused, backend=TRACED))
    trainer = Trainer(world.one_rank(folder, activation_checkpointing=True))
    world.run(trainer, "load", world.load_new())
    assert trainer.resident is not None and trainer.resident.rows is Rows.SHARED
    return trainer


@pytest.mark.slow
def test_the_proof_keeps_them_where_they_are_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "rlpipe")
    trainer = load(tmp_path, monkeypatch)
    assert trainer.resident is not None and uses_fused(trainer.resident.policy.lm)
    assert "attention is computed by flex_attention, norms and MLPs by kernels, rows are shared" in caplog.text
    data = world.batch(trainer.ranks.store, "batch", world.rollout_rows(6, 4))
    assert world.run(trainer, "train", world.train("a", "b", "rl", data))["metrics"]["train/onpolicy_abs"] == 0
    leave_fused(trainer.resident.policy.lm)  # the function is its family's


@pytest.mark.slow
def test_those_that_give_something_else_are_left_and_flex_attention_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "rlpipe")
    right = fused.Replaced.__call__

    def wrong(self: fused.Replaced, *given: object, **named: object) -> object:
        out = right(self, *given, **named)
        return out if fused._PLAIN or not isinstance(out, Tensor) else out * 1.5

    monkeypatch.setattr(fused.Replaced, "__call__", wrong)
    trainer = load(tmp_path, monkeypatch)
    assert trainer.resident is not None and not uses_fused(trainer.resident.policy.lm)
    assert "norms and MLPs are computed as its own code has them" in caplog.text
    assert "attention is computed by flex_attention, rows are shared" in caplog.text


@pytest.mark.slow
def test_a_backward_pass_that_no_kernel_has_ends_the_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it left in sharded weights would be added to the first gradient."""
    right = fused.Replaced.__call__

    def without_backward(self: fused.Replaced, *given: object, **named: object) -> object:
        out = right(self, *given, **named)
        return out if fused._PLAIN or not isinstance(out, Tensor) else NoRoom.apply(out)

    monkeypatch.setattr(fused.Replaced, "__call__", without_backward)
    with pytest.raises(UserError, match=r"qwen3 has no gradient here .*OutOfResources"):
        load(tmp_path, monkeypatch)
    assert not isinstance(modeling_qwen3.apply_rotary_pos_emb, fused.Replaced), (
        "others of its family in this process would use it"
    )


def test_where_flex_attention_is_at_fault_nothing_is_said_of_norms(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(selftest, "FUSED_DEVICES", ("cpu",))
    policy = small_policy("bloom")
    assert selftest.flex_rows(world.one_rank(tmp_path), policy) is None and not uses_fused(policy.lm)
    (record,) = [record for record in caplog.records if record.name == "rlpipe.trainer.ranks"]
    assert "does not support flex_attention" in record.getMessage()
