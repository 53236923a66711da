"""`hf:<folder>` with a real (tiny, random) reward model in its own process: it scores what
transformers does, and outlives its deaths."""

import os
import shutil
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
)

from rlpipe.base.errors import EngineError, UserError
from rlpipe.data.new_tokenizer import build_tokenizer
from rlpipe.processes.worker import Worker
from rlpipe.rewards import process as process_module
from rlpipe.rewards import worker
from rlpipe.rewards.pool import RewardPool, check_rewards
from tests.deadlines import DEADLINE_S, SHORT_S, until

MESSAGES = [{"role": "user", "content": "2 + 3?"}]
CONTEXT_TOKENS = 256


def said(completion: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": completion}]


def item(completion: str, turns: list[dict[str, str]] | None = None) -> dict[str, Any]:
    prompt = {"prompt_id": "set/0", "messages": MESSAGES, "answer": "5", "metadata": {}}
    return {
        "prompt": prompt,
        "completion": completion,
        "rollout": {"num_tokens": 1, "finish_reason": "stop", "environment": None, "turns": turns or said(completion)},
    }


def tiny_config() -> LlamaConfig:
    return LlamaConfig(
        vocab_size=512, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=CONTEXT_TOKENS, num_labels=2,
    )  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "reward-model"
    build_tokenizer(["2 + 3?", "4 + 1?"], path)
    torch.manual_seed(0)
    LlamaForSequenceClassification(tiny_config()).save_pretrained(path)
    return path


def expected(folder: Path, completions: list[str], output: int) -> list[float]:
    """What transformers itself computes, one conversation at a time."""
    return expected_of(folder, [said(completion) for completion in completions], output)


def expected_of(folder: Path, conversations: list[list[dict[str, str]]], output: int) -> list[float]:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    model.config.pad_token_id = tokenizer.pad_token_id
    rewards = []
    for turns in conversations:
        text = tokenizer.apply_chat_template([*MESSAGES, *turns], tokenize=False)
        tokens = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"][:, :CONTEXT_TOKENS]
        with torch.inference_mode():
            rewards.append(model(input_ids=tokens).logits[0, output].item())
    return rewards


def worker_of(pool: RewardPool) -> Worker:
    (worker,) = pool._scorers[-1].processes.workers  # pyright: ignore[reportAttributeAccessIssue]
    return worker


def pid_of(pool: RewardPool) -> int:
    process = worker_of(pool)._process
    assert process is not None
    return process.keeper.pid


@pytest.mark.e2e
def test_it_scores_what_transformers_does_and_survives_its_process(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    name = f"hf:{folder}"
    args = {name: {"batch_size": 3, "tokens_max": CONTEXT_TOKENS, "output": 1}}
    completions = [
        "5",
        "It is 4.",
        "",
        "ab " * 40,
        "x",
        "[" * 1_000_000,
        "\x00\ud800",
        "<|end|>",
        "(" * 10_000_000,
        "5",
    ]
    texts = [text.encode(errors="replace").decode() for text in completions]
    with RewardPool({name: 2.0, "exact": 1.0}, args, workers=1, timeout_s=DEADLINE_S) as pool:
        scores = pool.score([item(text) for text in texts])
        told = [score.parts["reward-model"] for score in scores]
        assert told == pytest.approx(expected(folder, [text[:10_000] for text in texts], output=1), abs=1e-5)
        assert len({round(value, 6) for value in told}) >= 6
        assert [score.reward for score in scores] == pytest.approx([2 * value for value in told])
        assert "were cut to tokens_max=256" in caplog.text

        os.kill(pid_of(pool), signal.SIGKILL)  # idle: nobody's fault
        # until the pool knows, the child of the killed keeper still answers, under its pid
        until(lambda: worker_of(pool)._process is None)
        assert [score.reward for score in pool.score([item("5")])] == pytest.approx([2 * told[0]])

        many = [item(str(number)) for number in range(1500)]
        before = pid_of(pool)
        killer = threading.Timer(0.1, os.kill, (before, signal.SIGKILL))  # in the middle of a batch
        killer.start()
        scores = pool.score(many)
        killer.join()
        assert all(score.reason is None for score in scores)
        assert pid_of(pool) != before, "it was done before it was killed: score more"
        last = pid_of(pool)
    assert not psutil.pid_exists(last)


@pytest.mark.e2e
def test_a_rollout_of_several_turns_is_a_conversation(folder: Path) -> None:
    turns = [*said("1"), {"role": "tool", "content": "4"}, *said("5")]
    with RewardPool({f"hf:{folder}": 1.0}, {f"hf:{folder}": {"output": 1}}, workers=1, timeout_s=DEADLINE_S) as pool:
        scores = pool.score([item("145", turns), item("145")])
    assert [score.reward for score in scores] == pytest.approx(expected_of(folder, [turns, said("145")], 1), abs=1e-5)
    assert scores[0].reward != scores[1].reward


@pytest.mark.slow
def test_a_process_that_hangs_is_replaced_a_bounded_number_of_times(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"hf:{folder}"
    items = [item(str(number)) for number in range(5)]
    for losses_max, reasons in ((8, [None] * 5), (1, ["reward_unavailable"] * 5)):
        monkeypatch.setattr(process_module, "LOSSES_MAX", losses_max)
        with RewardPool({name: 1.0}, {name: {"batch_size": 2}}, workers=1, timeout_s=SHORT_S) as pool:
            os.killpg(pid_of(pool), signal.SIGSTOP)
            assert [score.reason for score in pool.score(items)] == reasons
    assert pool.last_error and "1 processes in a row were lost (it did not answer in time)" in pool.last_error


@pytest.mark.e2e
def test_a_close_while_it_scores_ends_the_scoring(folder: Path) -> None:
    pool = RewardPool({f"hf:{folder}": 1.0}, workers=1, timeout_s=DEADLINE_S)
    os.killpg(pid_of(pool), signal.SIGSTOP)  # it never answers
    with ThreadPoolExecutor(1) as thread:
        scoring = thread.submit(pool.score, [item("5")] * 20)
        until(lambda: hasattr(pool._scorers[0], "_items"), "it scores")
        pool.close()
        with pytest.raises(EngineError, match="closed while there was something to score"):
            scoring.result(timeout=DEADLINE_S)


def changed(folder: Path, to: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> str:
    """The name of the reward whose weights are those of `folder`, changed."""
    shutil.copytree(folder, to)
    tensors = load_file(to / "model.safetensors")
    change(tensors)
    save_file(tensors, to / "model.safetensors", {"format": "pt"})
    return f"hf:{to}"


WRONG: dict[str, tuple[Callable[[dict[str, torch.Tensor]], object], str]] = {
    "no head": (lambda tensors: tensors.pop("score.weight"), r"score\.weight is missing"),
    "a tensor less": (lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"),
                      r"1 of its tensors .*layers\.1\.mlp\.up_proj\.weight is missing"),
    "another shape": (lambda tensors: tensors.update({"model.norm.weight": torch.ones(7)}),
                      r"model\.norm\.weight has the shape \[7\]"),
    "a block more": (lambda tensors: tensors.update({"model.layers.2.mlp.up_proj.weight": torch.ones(7)}),
                     r"model\.layers\.2\.mlp\.up_proj\.weight is unknown"),
    "no number": (lambda tensors: tensors["score.weight"].fill_(torch.nan),
                  r"score\.weight of model\.safetensors holds values that are NaN or infinite"),
}  # fmt: skip


def test_weights_that_are_not_the_models_are_named(folder: Path, tmp_path: Path) -> None:
    for wrong, (change, said) in WRONG.items():
        with pytest.raises(UserError, match=said):
            worker.check_reward_model(changed(folder, tmp_path / wrong, change).removeprefix("hf:"))
    other_head = changed(folder, tmp_path / "head", lambda tensors: tensors.update({"lm_head.weight": torch.ones(7)}))
    worker.check_reward_model(other_head.removeprefix("hf:"))


@pytest.mark.slow
def test_they_are_named_before_a_run_begins_and_where_it_scores(folder: Path, tmp_path: Path) -> None:
    change, said = WRONG["a tensor less"]
    name = changed(folder, tmp_path / "m", change)
    with pytest.raises(UserError, match=f"{name}: {said}"):
        check_rewards({name: 1.0}, {}, 10.0)
    with pytest.raises(UserError, match=f"{name}: {said}"):
        RewardPool({name: 1.0}, workers=1, timeout_s=DEADLINE_S)


@pytest.mark.parametrize(
    "config",
    [b"[]", b"{", b'{"architectures": [5]}', b'{"architectures": "x"}', b'{"architectures": {}, "id2label": [1]}'],
)
def test_an_odd_config_is_one_line(config: bytes, folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "m")
    (tmp_path / "m" / "config.json").write_bytes(config)
    with pytest.raises(UserError, match=f"rl.reward_args.hf:{tmp_path}/m: folder {tmp_path}/m"):
        check_rewards({f"hf:{tmp_path}/m": 1.0}, {}, 10.0)


def test_a_model_of_another_kind_is_refused(tmp_path: Path, folder: Path) -> None:
    headless = tmp_path / "headless"
    shutil.copytree(folder, headless)
    LlamaForCausalLM(tiny_config()).save_pretrained(headless)
    with pytest.raises(UserError, match="holds a LlamaForCausalLM"):
        check_rewards({f"hf:{headless}": 1.0}, {}, 10.0)


@pytest.mark.slow
def test_a_folder_and_an_output_are_checked_without_loading(folder: Path) -> None:
    check_rewards({f"hf:{folder}": 1.0}, {}, 10.0)
    with pytest.raises(UserError, match=r"output=2: the model .* has the outputs 0 to 1"):
        check_rewards({f"hf:{folder}": 1.0}, {f"hf:{folder}": {"output": 2}}, 10.0)
