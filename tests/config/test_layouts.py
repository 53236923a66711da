"""What is to run fits the GPUs that it is given, and a batch fits a rank: refused in
one line when the config is read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlpipe.base.errors import UserError
from rlpipe.config.source import override_config, read_config
from rlpipe.store.backend import open_store
from rlpipe.store.opening import open_existing
from tests.paths import ROOT

PRESETS = ROOT / "flows" / "presets"
GPUS = ["model.dtype=bfloat16", "trainer.gpu_ids=[0]", "engines.kind=sglang", "engines.count=1"]
FOUR = ["trainer.ranks=4", "trainer.gpu_ids=[0,1,2,3]"]


@pytest.mark.parametrize(
    ("sets", "line"),
    [
        (["trainer.ranks=8", "trainer.gpu_ids=[0,1,2,3]"], "trainer.ranks=8: .*set trainer.ranks = 4"),
        (["trainer.gpu_ids=[0,1,2,3,4,5,6,7]"], "trainer.ranks=1: .*set trainer.ranks = 8"),
        ([*FOUR, "trainer.context_ranks=3"], "trainer.context_ranks=3: .*; set .* to 1 or 2 or 4"),
        ([*FOUR, "trainer.context_ranks=2", "trainer.tokens_max=64", "model.context_tokens_max=200"],
         "trainer.tokens_max=64: .*is split over trainer.context_ranks=2 ranks; set trainer.tokens_max = 100 or more"),
        (["engines.count=8", "engines.gpu_ids=[4,5,6,7]"], "engines.count=8: 4 GPUs .*set engines.count = 4"),
        (["engines.count=4", "engines.gpu_ids=[1,2]"], "engines.count=4: 2 GPUs .*set engines.count = 2"),
        (["engines.count=2", "engines.gpu_ids=[1,2,3]"], "engines.count=2: 3 GPUs .*set engines.count = 1"),
        (["engines.gpu_ids=[1,2]", "engines.kind=local"],
         "engines.count=1: the local engine runs on one .*engines.count = 2"),
        (["engines.gpu_ids=[1,1]"], "engines.gpu_ids=.*name each once"),
        (["engines.gpu_ids=[-1]"], "engines.gpu_ids=.*from 0"),
        (["engines.gpu_ids=[1,2,3,4]", "engines.count=2", "engines.flags=['--tp', '4']"],
         "engines.flags=.*: with these flags an engine uses 4 GPUs, and it has 2"),
        (["engines.gpu_ids=[1,2]", "engines.flags=['--dp-size=2']"],
         "engines.flags=.*: with these flags an engine uses 4 GPUs, and it has 2"),
        (["scratch=s3://bucket/fast"], "scratch=.*: must be a folder on a disk of this machine"),
        (["trainer.tokens_max=64"],
         "trainer.tokens_max=64: .*model.context_tokens_max=128 .*set trainer.tokens_max = 128"),
    ],
)  # fmt: skip
def test_what_cannot_run_is_refused_in_one_line(sets: list[str], line: str) -> None:
    with pytest.raises(UserError, match=rf"^{line}[^\n]*$"):
        read_config("tiny", [*GPUS, *sets], PRESETS)


@pytest.mark.parametrize(
    ("sets", "line"),
    [
        (["engines.kind=local"],
         "engines.transport='tensor': local engines read weights from disk; set engines.kind = 'sglang'"),
        (["engines.kind=vllm"],
         "engines.transport='tensor': vllm engines read weights from disk; set engines.kind = 'sglang'"),
        (["model.adapter=lora"],
         "engines.transport='tensor': engines load the adapter of model.adapter='lora' from files; set .* 'disk'"),
        (["engines.flags=['--pp-size=2']"],
         "engines.flags=.*: SGLang cannot receive tensors with --pp-size; remove this flag"),
        (["engines.flags=['--dp', '2']"],
         "engines.flags=.*: SGLang cannot receive tensors with --dp; remove this flag"),
        (["trainer.gpu_ids=[0]", "model.dtype=bfloat16"],
         "engines.transport='tensor': trainer and engines must both have GPUs, or both have none"),
        (["trainer.gpu_ids=[0]", "model.dtype=bfloat16", "engines.gpu_ids=[0]", "engines.colocate=true"],
         "engines.transport='tensor': NCCL cannot connect two processes on one GPU"),
        (["engines.place=elsewhere"],
         "engines.transport='tensor': engines on other machines .* cannot reach a trainer"),
    ],
)  # fmt: skip
def test_what_cannot_send_tensors_is_refused_in_one_line(sets: list[str], line: str) -> None:
    tensor = ["engines.transport=tensor", "engines.kind=sglang", "engines.count=1"]
    with pytest.raises(UserError, match=rf"^{line}[^\n]*$"):
        read_config("tiny", [*tensor, *sets], PRESETS)
    assert read_config("tiny", tensor, PRESETS).engines.transport == "tensor"


@pytest.mark.parametrize(
    "flags",
    [
        [],
        ["--tp", "2"],
        ["--tensor-parallel-size=1", "--pp-size", "2"],
        ["--tp-size", "1", "--dp=2"],
        ["--dp-size", "2", "--enable-dp-attention"],
        ["--tp", "8", "--tp", "2"],
    ],
)
def test_flags_that_take_the_share_of_an_engine_are_taken(flags: list[str]) -> None:
    sets = ["engines.gpu_ids=[1,2,3,4]", "engines.count=2", f"engines.flags={json.dumps(flags)}"]
    assert read_config("tiny", [*GPUS, *sets], PRESETS).engines.flags == flags


def test_the_advice_on_shared_gpus_does_not_share_them() -> None:
    with pytest.raises(
        UserError, match=r"^engines\.gpu_ids=\[0, 1\]: \[0\] are also in trainer\.gpu_ids.*give each GPU to one"
    ) as refused:
        read_config("tiny", [*GPUS, "engines.gpu_ids=[0,1]"], PRESETS)
    assert "deployment" not in str(refused.value)
    read_config("two-node", [], PRESETS)  # the same numbers, of another machine


def test_float32_on_gpus_is_asked_for_or_not_had() -> None:
    with pytest.raises(UserError, match=r"^model\.dtype is not given: on GPUs float32 .*set model\.dtype = 'bfloat16'"):
        read_config("tiny", ["trainer.gpu_ids=[0]"], PRESETS)
    config = read_config("tiny", ["trainer.gpu_ids=[0]", "model.dtype=float32"], PRESETS)
    assert override_config(config, ["seed=1"]).model.dtype == "float32"  # a fork keeps what its parent has
    assert read_config("tiny", [], PRESETS).model.dtype == "float32"


def test_a_run_that_was_started_so_is_still_read(tmp_path: Path) -> None:
    record = json.loads((ROOT / "tests" / "run_b8afe6a.json").read_text())
    record["config"]["trainer"] |= {"gpu_ids": [0, 1], "tokens_max": 64}
    store = open_store(f"file://{tmp_path}/store")
    store.create("runs/old/run.json", json.dumps(record).encode())
    old = open_existing(store, "old").config
    assert old.trainer.gpu_ids == [0, 1]
    with pytest.raises(UserError, match=r"set trainer\.ranks = 2"):
        override_config(old, ["run=new"])


def test_presets_for_gpus_are_bfloat16_with_activation_checkpointing() -> None:
    configs = [read_config(path.stem, [], PRESETS) for path in sorted(PRESETS.glob("*.toml"))]
    on_gpus = [config for config in configs if config.trainer.gpu_ids]
    assert len(on_gpus) >= 3
    assert all(config.model.dtype == "bfloat16" and config.trainer.activation_checkpointing for config in on_gpus)
