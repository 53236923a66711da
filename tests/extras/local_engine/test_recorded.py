"""A step that was recorded as a graph gives the bits of the model's own code,
and only such a step is recorded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from rlpipe.extras.local_engine import recorded
from rlpipe.extras.local_engine.model import LocalModel, StepShape
from rlpipe.extras.local_engine.recorded import Recorded
from rlpipe.models.small import small_config, small_model

SLOTS, BUCKET = 16, 64


@pytest.fixture(autouse=True)
def early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded, "RECORD_AFTER", 2)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3", "gemma3_text", "qwen3_moe"])
def test_a_recorded_step_has_the_same_bits_before_and_after_a_reload(family: str, tmp_path: Path) -> None:
    """gemma3_text adds 1 to its norms' weights: a graph must not keep the sum."""
    lm = small_model(small_config(AutoConfig.for_model(family)))
    lm.save_pretrained(tmp_path / "a")
    with torch.no_grad():
        for parameter in lm.parameters():
            parameter.mul_(1.3).add_(0.01)
    lm.save_pretrained(tmp_path / "b")
    random = torch.Generator().manual_seed(0)
    with torch.inference_mode():
        model = LocalModel(str(tmp_path / "a"), "cpu", 1)
        kv_N2SHLD = model.empty_slots(SLOTS, BUCKET)

        def check_steps() -> None:
            for _ in range(4):
                tokens_S = torch.randint(0, 90, (SLOTS,), generator=random)
                position_S = torch.randint(0, BUCKET, (SLOTS,), generator=random)
                given_SV = model.decode(tokens_S, position_S, kv_N2SHLD, len(tokens_S), BUCKET)
                assert torch.equal(given_SV, model._decode(tokens_S, position_S, kv_N2SHLD, torch.arange(BUCKET)))
            assert [step.proven and step.graph and step.graph.is_verified for step in model._passes.values()] == [True]

        check_steps()
        model.reload(str(tmp_path / "b"))
        check_steps()
        model.release()
        model.resume()
        check_steps()


def test_what_looks_at_values_is_not_recorded() -> None:
    step = Recorded(lambda numbers: numbers * 2 if numbers.max() > 5 else numbers)
    for value in (1.0, 1.0, 1.0, 9.0):
        assert step(torch.tensor([value])).tolist() == [18.0 if value == 9 else value] and not step.proven


def test_a_graph_with_other_bits_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = torch.jit.trace
    monkeypatch.setattr(
        torch.jit, "trace", lambda function, *inputs, **how: trace(lambda x: function(x) + 1e-6, *inputs, **how)
    )
    step = Recorded(lambda numbers: numbers * 2)
    for _ in range(4):
        assert step(torch.ones(3)).tolist() == [2.0] * 3 and not step.proven


def test_a_graph_that_kept_what_it_had_of_old_weights_is_used_for_no_shape() -> None:
    factor = [2.0]
    first = Recorded(lambda numbers: numbers * factor[0])
    for _ in range(4):
        assert first(torch.ones(3)).tolist() == [2.0] * 3
    second = Recorded(lambda numbers: numbers * factor[0], first.graph)
    assert second(torch.ones(5)).tolist() == [2.0] * 5 and first.proven and second.proven
    factor[0] = 3.0
    for step in (first, second):
        step.weights_changed()
    for _ in range(3):
        assert first(torch.ones(3)).tolist() == [3.0] * 3 and second(torch.ones(5)).tolist() == [3.0] * 5
    assert not first.proven and not (second.proven and second.graph is first.graph)


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text", "qwen3_moe"])
def test_two_graphs_serve_all_shapes_and_are_verified_once_a_load(family: str, tmp_path: Path) -> None:
    """One of steps in which all rows have requests, one of others."""
    small_model(small_config(AutoConfig.for_model(family))).save_pretrained(tmp_path)
    random = torch.Generator().manual_seed(0)
    shapes = [StepShape(*sizes) for sizes in
              ((48, 48, 128), (32, 32, 64), (16, 16, 64), (16, 2, 64), (16, 1, 128), (16, 4, 64))]  # fmt: skip
    with torch.inference_mode():
        model = LocalModel(str(tmp_path), "cpu", 48)
        kv_N2SHLD = model.empty_slots(48, 128)

        def check(shape: StepShape, times: int = 1) -> None:
            for _ in range(times):
                tokens_S, position_S = (torch.randint(0, 60, (shape.rows,), generator=random) for _ in range(2))
                given_SV = model._step(tokens_S, position_S, kv_N2SHLD, shape)
                part = kv_N2SHLD[:, :, : shape.used, :, : shape.length]
                assert torch.equal(given_SV, model._decode(tokens_S, position_S, part, torch.arange(shape.length)))

        for shape in shapes:
            check(shape, 4)
        assert all(step.proven for step in model._passes.values())
        assert len({id(step.graph) for step in model._passes.values()}) == 2
        model.reload(str(tmp_path))
        calls = list[StepShape]()
        for shape, step in model._passes.items():
            by_code = step._function
            step._function = lambda *given, shape=shape, by_code=by_code: (calls.append(shape), by_code(*given))[1]
        for shape in shapes:
            check(shape, 2)
        assert calls == [shapes[0], shapes[3]]
