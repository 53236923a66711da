"""What a plan says of disk and hours: by the shapes, by what is kept, and
by passes that were timed here."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest
import torch
from transformers import AutoConfig

from rlpipe.base.values import size_text
from rlpipe.checks.content import Lengths
from rlpipe.config.pipeline import PipelineConfig
from rlpipe.config.source import read_config
from rlpipe.extras.plan import trial
from rlpipe.extras.plan.cost import disk_lines, disk_of, rollout_bytes, time_lines
from rlpipe.extras.plan.sizes import ModelSizes, Speed
from rlpipe.extras.plan.trial import _speed_of, measured_speed
from rlpipe.models.causal import hf_config
from rlpipe.models.small import small_config
from rlpipe.store.cache import BYTES_MAX
from tests.extras.plan.conftest import SIZED
from tests.extras.plan.test_plan_memory import PRESETS, QWEN3_30B_A3B, SMOLLM2

SIZES = ModelSizes(parameters=10**9, layer=1, rest=1, kv_token=1, microbatch=1)
ASKED = {"tokens_max": 64, "threads": 1, "places": 2, "engine_threads": 1}
GEMMA3 = {"model_type": "gemma3_text", "vocab_size": 300, "hidden_size": 32,
          "intermediate_size": 64, "num_hidden_layers": 7,
          "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 8}  # fmt: skip


def config(*sets: str) -> PipelineConfig:
    return read_config(
        "tiny", ["sft.num_steps=10", "sft.segment_steps=5", "sft.warmup_steps=1", "sft.decay_steps=10", *sets], PRESETS
    )


@pytest.mark.parametrize(
    ("sets", "policies", "states"),
    [
        (
            ["rl.num_iterations=10"],
            1 + 2 + 10,
            2 + 2,
        ),  # base, two segments of SFT, RL; a state each segment and each five iterations
        (["rl.num_iterations=10", "checkpoint.keep_policies_last=3", "checkpoint.keep_states=1"], 1 + 2 + 3, 2 + 1),
        (
            ["rl.num_iterations=10", "checkpoint.keep_policies_last=3", "checkpoint.keep_policies_every=5"],
            1 + 2 + 4,
            2 + 2,
        ),
        (["rl.num_iterations=2", "checkpoint.state_every=1"], 1 + 2 + 2, 2 + 2),
    ],
)
def test_the_whole_run_is_what_stays_of_policies_and_states(sets: list[str], policies: int, states: int) -> None:
    planned = config(*sets)
    total = policies * 4e9 + states * 12e9 + planned.rl.num_iterations * rollout_bytes(planned)
    assert f"in all at most {size_text(total)} in the store" in disk_lines(planned, SIZES)[1]


def test_an_adapter_makes_small_policies_of_a_large_base() -> None:
    planned = config("rl.num_iterations=10", "model.adapter=lora")
    lines = "\n".join(disk_lines(planned, ModelSizes(10**9, 1, 1, 1, 1, adapter=10**6)))
    assert "a policy of 4.0 MB" in lines and "a state of 12.0 MB" in lines and "base 4.00 GB" in lines


def test_a_disk_that_is_too_small_is_a_warning(tmp_path: Path) -> None:
    planned = config(f"store={tmp_path}/not/yet", "rl.num_iterations=10")
    assert not any("WARNING" in line for line in disk_lines(planned, ModelSizes(1000, 1, 1, 1, 1)))
    warned = [line for line in disk_lines(planned, ModelSizes(10**15, 1, 1, 1, 1)) if "WARNING" in line]
    assert warned and f"store={tmp_path}/not/yet: its disk has" in warned[0]
    assert len(disk_lines(config("store=s3://bucket/x"), SIZES)) == 2  # nobody knows what is free there


def test_scratch_has_room_for_the_cache_of_a_store_elsewhere(tmp_path: Path) -> None:
    for iterations, cached in ((10, 10 * rollout_bytes(config())), (50_000, BYTES_MAX)):
        here, elsewhere = (
            disk_of(config(f"store={store}", f"rl.num_iterations={iterations}"), SIZES).scratch
            for store in (tmp_path, "s3://bucket/x")
        )
        assert elsewhere - here == cached


def test_hours_are_what_the_passes_take_by_their_number() -> None:
    sets = ["rl.num_iterations=100", "trainer.tokens_max=1000", "rl.num_prompts=10",
            "rl.group_size=8", "rl.completion_tokens_max=100",
            "engines.count=1", "engines.in_flight_max=40", "evaluation.every=50", "evaluation.prompts_max=20",
            "evaluation.num_completions=1",
            "model.context_tokens_max=128", "sft.batch_size=10"]  # fmt: skip
    lines = time_lines(
        config(*sets), Speed(train_s=3.0, forward_s=1.0, decode_s=0.5, share=1.0), Lengths(prompt=20, conversation=50)
    )
    # a prompt once a group; the proximal logprobs are a forward pass
    train_s = 10 * (20 + 800) / 1000 * (3 + 1)
    sample_s = 2 * 100 * 0.5  # 80 rollouts in 40 places
    total_h = (10 * 10 * 50 / 1000 * 3 + 100 * (train_s + sample_s) + 3 * 1 * 100 * 0.5) / 3600
    assert f"trains {train_s:.1f} s and samples {sample_s:.1f} s; in all {total_h:.2f} h" in lines[0]


@pytest.mark.parametrize(
    "model",
    [{**SMOLLM2, "vocab_size": 300, "hidden_size": 36, "intermediate_size": 64}, GEMMA3],
    ids=["llama", "gemma3"],
)
def test_a_model_is_timed_by_its_first_layers(model: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []
    real = trial._passes
    monkeypatch.setattr(trial, "has_amx", lambda: False)
    monkeypatch.setattr(
        trial, "_passes", lambda shorter, *rest: tried.append(shorter.num_hidden_layers) or real(shorter, *rest)
    )
    timed = measured_speed(hf_config(model), torch.float32, 32, ASKED)
    assert tried == [1, 3] and isinstance(timed, Speed)
    assert timed.train_s > 0 and timed.forward_s > 0 and timed.decode_s > 0
    monkeypatch.setattr(trial, "_passes", lambda shorter, *_: [10.0 + 2 * shorter.num_hidden_layers] * 3)
    whole = 10.0 + 2 * model["num_hidden_layers"]  # what is in no layer, and each layer
    assert measured_speed(hf_config(model), torch.float32, 32, ASKED) == Speed(whole, whole, whole, ANY, ANY)


@pytest.mark.parametrize(("dtype", "amx", "gain"), [("float32", True, 4), ("float32", False, 0), ("bfloat16", True, 0)])
def test_a_plan_says_where_bfloat16_is_faster(
    monkeypatch: pytest.MonkeyPatch, dtype: str, amx: bool, gain: int
) -> None:
    taken_s = {torch.float32: 8.0, torch.bfloat16: 2.0}
    monkeypatch.setattr(trial, "has_amx", lambda: amx)
    monkeypatch.setattr(trial, "_passes", lambda _, dtype, *__: [taken_s[dtype]] * 3)
    timed = measured_speed(hf_config(GEMMA3), getattr(torch, dtype), 32, ASKED)
    assert isinstance(timed, Speed) and timed.bfloat16 == gain
    said = [line for line in time_lines(config(), timed, Lengths()) if "'bfloat16'" in line]
    assert said == (["  with model.dtype = 'bfloat16' this processor trains 4.0 times as fast"] if gain else [])


def test_a_plan_says_that_it_was_measured_beside_other_work(monkeypatch: pytest.MonkeyPatch) -> None:
    def waits(*_: object) -> list[float]:
        time.sleep(0.2)
        return [1.0] * 3

    monkeypatch.setattr(trial, "_passes", waits)
    waited = measured_speed(hf_config(GEMMA3), torch.float32, 32, ASKED)
    assert isinstance(waited, Speed) and waited.share < 0.5
    for timed, too_long in [(waited, True), (replace(waited, share=1.0), False)]:
        assert ("TOO LONG" in time_lines(config(), timed, Lengths())[0]) == too_long


def test_where_nothing_was_timed_a_plan_says_why() -> None:
    large = measured_speed(hf_config(QWEN3_30B_A3B), torch.bfloat16, 32, ASKED)
    parts = {"training": {"dtype": "float32"}, "context_tokens_max": 32, "timed": ASKED}
    alone = _speed_of(small_config(AutoConfig.for_model("recurrent_gemma")), parts)
    for speed_or_why, said in [
        (large, r"a model of its first 3 layers would take 19\.93 GB, and is too large to be timed here"),
        (alone, "the first layers of family recurrent_gemma alone are no model .*Attention"),
        (SIZED.speed, "no GPU is tried by a plan"),
    ]:
        (line,) = time_lines(config(), speed_or_why, Lengths())
        assert re.match(f"time: not estimated, {said}", line), line
