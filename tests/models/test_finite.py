"""Weights that are no numbers: named by tensor, in every number type that has such, and never
served or trained from."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save, save_file
from transformers import AutoConfig

from rlpipe.base.errors import StoreError
from rlpipe.engines.host import EngineHost
from rlpipe.engines.weights import Probe
from rlpipe.models.checkpoint import Checkpoint, local_files, tensors_of
from rlpipe.models.finite import PIECE_BYTES, not_finite
from rlpipe.models.small import small_config, small_model
from rlpipe.store.adapter_files import ADAPTER_WEIGHTS, PREFIX
from rlpipe.store.backend import open_store
from rlpipe.store.opening import create_or_continue
from rlpipe.trainer.model import adapter_rows
from tests import trainer_world as world
from tests.deltas_world import save as save_policy
from tests.engine_world import config
from tests.store.test_run import tiny

INF, NAN, MAX = float("inf"), float("nan"), torch.finfo(torch.float32).max
COUNT = PIECE_BYTES // 2 + 7  # more than one piece of any type


@pytest.mark.parametrize(("dtype", "bad"), [
    (torch.float64, [NAN, INF, -INF, 1e39]), (torch.float32, [NAN, INF, -INF]), (torch.float16, [NAN, INF, -INF]),
    (torch.bfloat16, [NAN, INF, -INF]),
    (torch.complex64, [complex(0, NAN), complex(-INF, 0)]), (torch.float8_e5m2, [NAN, INF, -INF]),
    (torch.float8_e4m3fn, [NAN]),
])  # fmt: skip
def test_a_value_that_no_model_has_is_found_wherever_it_is(
    dtype: torch.dtype, bad: list[complex], tmp_path: Path
) -> None:
    largest = min(MAX, torch.finfo(dtype).max)
    good = torch.tensor([0.0, -0.0, largest, -largest, 1.0]).to(dtype).repeat(COUNT // 5)
    path = tmp_path / "w.safetensors"
    others = {"empty": torch.empty(0, dtype=dtype), "ids": torch.full((3,), -1), "b": good}
    save_file(others, path)
    assert not_finite(path) == ""
    for value in bad:
        for at in (0, COUNT // 2, -1):
            changed = good.clone()
            changed[at] = torch.tensor(
                value, dtype=torch.complex128 if isinstance(value, complex) else torch.float64
            ).to(dtype)
            save_file(others | {"c": changed}, path)
            assert not_finite(path) == "c", (value, at)


def test_types_that_have_no_such_value_are_not_looked_at_and_a_torn_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    path.write_bytes(
        save(
            {"q": torch.full((8,), 0xFF, dtype=torch.uint8).view(torch.float4_e2m1fn_x2), "flags": torch.tensor([True])}
        )
    )
    assert not_finite(path) == ""
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(StoreError, match=r"w\.safetensors is torn"):
        not_finite(path)


def test_the_trainer_reads_no_row_that_is_not_finite(tmp_path: Path) -> None:
    lm = small_model(small_config(AutoConfig.for_model("llama")))
    name, tensor = next((name, tensor) for name, tensor in tensors_of(lm).items() if tensor.ndim == 2)
    with torch.no_grad():
        tensor[1, 0] = NAN
    lm.save_pretrained(tmp_path)
    checkpoint = Checkpoint(str(tmp_path), local_files(tmp_path), lm)
    assert torch.isfinite(checkpoint.rows(name, [*tensor.shape], 2, len(tensor))).all()
    with pytest.raises(StoreError, match=rf"{name} holds values that are NaN or infinite"):
        checkpoint.rows(name, [*tensor.shape], 0, 2)


def test_the_trainer_reads_no_adapter_that_is_not_finite(tmp_path: Path) -> None:
    store, ranks = open_store(f"file://{tmp_path}/store"), world.one_rank(tmp_path)
    ref = world.artifact(
        store, "runs/a/rl/00000/policy", {ADAPTER_WEIGHTS: save({f"{PREFIX}x": torch.tensor([[0.0], [INF]])})}
    )
    rows = adapter_rows(ranks, ref)
    assert rows("x", [2, 1], 0, 1).tolist() == [[0.0]]
    with pytest.raises(StoreError, match=rf"runs/a/rl/00000/policy: {PREFIX}x holds values"):
        rows("x", [2, 1], 0, 2)


def test_a_host_gives_its_engines_no_difference_that_makes_a_number_none(tmp_path: Path) -> None:
    """Whoever can write the store can seal a difference again: its hashes are right."""
    run, ranks = create_or_continue(tiny(open_store(f"file://{tmp_path}/store"))), world.one_rank(tmp_path)
    good, bad = torch.ones(64, dtype=torch.bfloat16), torch.ones(64, dtype=torch.bfloat16)
    bad[9] = NAN
    files = {"config.json": b'{"model_type": "llama"}', "model.safetensors": save({"w": good})}
    base = save_policy(ranks, run, 1, files, None)
    changed = save_policy(ranks, run, 2, files | {"model.safetensors": save({"w": bad})}, base)
    host, probe = EngineHost(config(), run.store, tmp_path / "work"), Probe([1, 2], [-1.0])
    assert host._fetch(base, 1, probe, None).version == 1
    with pytest.raises(
        StoreError, match=r"model\.safetensors: w holds values that are NaN or infinite, which no trained policy has"
    ):
        host._fetch(changed, 2, probe, None)
