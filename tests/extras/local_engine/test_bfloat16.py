"""The local engine in bfloat16: its logprobs are near those of the model's own forward pass, in
bfloat16 and in float32."""

from __future__ import annotations

import functools
import random
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from rlpipe.config.source import read_config
from rlpipe.engines.weights import Probe, Weights
from rlpipe.extras.local_engine.kind import LOCAL
from rlpipe.extras.local_engine.model import keep_dtypes
from rlpipe.extras.local_engine.protocol import ModelLimits, parse_generate
from rlpipe.extras.local_engine.scheduler import Scheduler
from rlpipe.models.causal import empty_model
from rlpipe.models.checkpoint import tensors_of
from rlpipe.models.small import small_config
from tests.engine_fixtures import VOCAB, reference_logprobs, tiny_model
from tests.extras.local_engine.test_invariance import local_model
from tests.paths import PRESETS

LIMITS = ModelLimits(VOCAB, 512, (2,))


@functools.cache
def own_model() -> Any:
    return AutoModelForCausalLM.from_pretrained(tiny_model(0), dtype=torch.bfloat16).eval()


def own_logprobs(prompt: list[int], tokens: list[int]) -> Tensor:
    """As `reference_logprobs`, by the model's own forward pass in bfloat16."""
    with torch.inference_mode():
        logits = own_model()(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits.double(), -1).gather(1, torch.tensor(tokens)[:, None])[:, 0]


def prompts() -> list[list[int]]:
    draw = random.Random(5)
    return [[draw.randrange(3, VOCAB) for _ in range(length)] for length in (3, 22, 32, 33, 70, 130)]


def check_near(logprobs: list[float], prompt: list[int], tokens: list[int]) -> None:
    """Checks logprobs of `tokens` after `prompt`; the bounds are four times the largest seen."""
    given = torch.tensor(logprobs, dtype=torch.float64)
    from_own = (given - own_logprobs(prompt, tokens)).abs()
    from_float32 = (given - reference_logprobs(tiny_model(0), prompt, tokens)).abs()
    assert from_own.mean() < 0.016 and from_own.max() < 0.08
    assert 1e-3 < from_float32.mean() < 0.06 and from_float32.max() < 0.3, "1e-3: it does compute in bfloat16"


def test_sampled_logprobs_are_near_the_model_s_own() -> None:
    scheduler = Scheduler(local_model("cpu", "bfloat16"), "1", torch.get_num_threads())
    params = {"max_new_tokens": 24, "ignore_eos": True}
    bodies = [{"input_ids": prompt, "sampling_params": params, "return_logprob": True} for prompt in prompts()]
    calls = [parse_generate(body, LIMITS, str(index), index) for index, body in enumerate(bodies)]
    with torch.inference_mode():
        for call in calls:
            scheduler.submit(call)
        while scheduler.live:
            scheduler.step()
    for call in calls:
        (job,) = call.jobs
        assert len(job.tokens) == 24
        check_near(job.logprobs, [*job.prompt], job.tokens)


def test_scores_are_near_the_model_s_own() -> None:
    with torch.inference_mode():
        for prompt in prompts():
            check_near(local_model("cpu", "bfloat16").score(tuple(prompt), 0)[0], prompt[:1], prompt[1:])


def test_the_engine_of_a_run_gets_the_run_s_dtype(tmp_path: Path) -> None:
    """Not that of the folder: a model of the hub may be saved in another one."""
    for sets, dtype in (([], "float32"), (["model.dtype=bfloat16"], "bfloat16")):
        argv = LOCAL.argv(read_config("tiny", sets, PRESETS), Weights(tmp_path, 1, Probe([1, 2], [-1.0])), [])
        assert argv[argv.index("--dtype") + 1] == dtype


def test_weights_keys_and_values_take_half_the_memory() -> None:
    half, whole = local_model("cpu", "bfloat16"), local_model("cpu")
    assert {parameter.dtype for parameter in half.lm.parameters()} == {torch.bfloat16}
    assert 2 * half.empty_slots(16, 64).nbytes == whole.empty_slots(16, 64).nbytes


def test_biases_of_routers_are_not_rounded() -> None:
    """As in the trainer: they differ by less than bfloat16 tells."""
    config = small_config(AutoConfig.for_model("deepseek_v3"))
    lm = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    keep_dtypes(lm, tensors_of(empty_model(config)))
    kinds = {name.rpartition(".")[2]: tensor.dtype for name, tensor in tensors_of(lm).items()}
    assert kinds.pop("e_score_correction_bias") is torch.float32
    assert set(kinds.values()) == {torch.bfloat16}
