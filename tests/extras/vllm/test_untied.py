"""The untied export: the same model to transformers, whole or not there."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from rlpipe.base.errors import StoreError
from rlpipe.engines.weights import HEAD
from rlpipe.extras.vllm import untied as export_room
from rlpipe.extras.vllm.untied import EMBEDDING, untied
from rlpipe.models.folder import tensor_shapes
from tests.engine_fixtures import edit_config, tiny_model


def copy_of(seed: int, folder: Path, shard_size: str = "5GB") -> Path:
    AutoModelForCausalLM.from_pretrained(tiny_model(seed)).save_pretrained(folder, max_shard_size=shard_size)
    (folder / "tokenizer_config.json").write_text("{}")
    return folder


def logits(folder: Path) -> torch.Tensor:
    loaded: Any = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    lm, info = loaded
    assert not any(info.values()), info  # nothing missing, unexpected or of another shape
    with torch.inference_mode():
        return lm.eval()(torch.arange(3, 60)[None]).logits


@pytest.mark.parametrize("shard_size", ["5GB", "1MB"])
def test_transformers_gives_the_same_logits_bit_for_bit(tmp_path: Path, shard_size: str) -> None:
    tied = copy_of(0, tmp_path / "policy", shard_size)
    export = untied(tied)
    assert export == tmp_path / "policy-untied" and (export / "tokenizer_config.json").read_text() == "{}"
    assert torch.equal(logits(export), logits(tied))
    shapes = tensor_shapes(export)
    assert shapes == {**tensor_shapes(tied), HEAD: shapes[EMBEDDING]}
    lm = AutoModelForCausalLM.from_pretrained(export)
    assert lm.lm_head.weight.data_ptr() != lm.model.embed_tokens.weight.data_ptr()
    num_files = len(list(tied.glob("*.safetensors")))
    assert (num_files > 1) == (shard_size == "1MB") and len(list(export.glob("*.safetensors"))) == num_files + 1


def test_it_is_built_once_and_costs_only_the_head(tmp_path: Path) -> None:
    tied = copy_of(0, tmp_path / "policy")
    export = untied(tied)
    before = {path.name: path.stat().st_mtime_ns for path in export.iterdir()}
    assert untied(tied) == export and untied(export) == export
    assert {path.name: path.stat().st_mtime_ns for path in export.iterdir()} == before
    assert (export / "model-00001-of-00002.safetensors").samefile(tied / "model.safetensors")
    assert json.loads((tied / "config.json").read_text())["tie_word_embeddings"] is True
    assert sorted(path.name for path in tmp_path.iterdir()) == ["policy", "policy-untied"]


def test_an_interrupted_build_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tied = copy_of(0, tmp_path / "policy")
    monkeypatch.setattr(export_room, "_copy_as_head", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        untied(tied)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["policy"]
    monkeypatch.undo()
    assert torch.equal(logits(untied(tied)), logits(tied))


def test_another_process_may_win(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tied = copy_of(0, tmp_path / "policy")
    winner = untied(tied)
    shutil.copytree(winner, tmp_path / "won")
    shutil.rmtree(winner)
    build = export_room._build_untied
    monkeypatch.setattr(
        export_room, "_build_untied", lambda *given: (build(*given), shutil.copytree(tmp_path / "won", winner))
    )
    assert untied(tied) == winner and sorted(path.name for path in tmp_path.iterdir()) == [
        "policy",
        "policy-untied",
        "won",
    ]


def test_what_a_loader_would_read_two_ways_is_refused(tmp_path: Path) -> None:
    export = untied(copy_of(0, tmp_path / "policy"))
    edit_config(export, tie_word_embeddings=True)
    with pytest.raises(StoreError, match="should have"):
        untied(export)
