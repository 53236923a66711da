"""TRL's side of benchmarks/compare_trl.py, run by the Python of TRL's own environment: reads a job,
trains, writes what it saw.

~/.cache/rlpipe/trl-VERSION/bin/python benchmarks/trl_worker.py JOB.json RESULT.json
"""

from __future__ import annotations

import json
import sys
import time
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, TrainerCallback


@cache
def verifier() -> Any:
    import reasoning_gym

    return reasoning_gym.create_dataset("spell_backward")


def reward(completion: str, answer: str) -> float:
    """The preset's: 0.5 for the verifier of reasoning_gym, 0.5 for the exact
    answer; `format` has weight 0."""
    from reasoning_gym.utils import extract_answer

    partial = verifier().score_answer(extract_answer(completion), {"answer": answer})
    before_end, end, _ = completion.rpartition("</answer>")
    _, start, last = before_end.rpartition("<answer>")
    exact = bool(start and end) and last.strip().lower() == answer.strip().lower()
    return 0.5 * partial + 0.5 * exact


def text_of(tokenizer: Any, tokens: list[int]) -> str:
    """The text that rlpipe's rewards get: without what begins, ends or pads it, but with other
    special tokens. TRL's own text lacks all of them, so a policy that writes one inside its answer
    would get the whole reward on one side only.
    """
    ends = {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id}
    return tokenizer.decode([token for token in tokens if token not in ends], skip_special_tokens=False)


def check_rewards(tokenizer: Any, rollouts: list[list[Any]]) -> None:
    """AssertionError unless rlpipe's own rollouts, [tokens, answer, reward], get here the reward
    that rlpipe gave them."""
    for tokens, answer, expected in rollouts:
        assert abs(reward(text_of(tokenizer, tokens), answer) - expected) < 1e-9, (
            tokens,
            answer,
            expected,
        )


class Seen(TrainerCallback):
    """What was done, an entry a generation cycle; `sequences` and
    `trained_tokens` an entry an optimizer step."""

    def __init__(self, steps: int, tokenizer: Any) -> None:
        self.steps, self.last, self.tokenizer = steps, 0.0, tokenizer
        self.seconds: list[float] = []
        self.rewards: list[float] = []
        self.tokens: list[int] = []
        self.answers: list[str] = []
        self.sequences: list[int] = []
        self.trained_tokens: list[int] = []

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.last = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step % self.steps == 0:
            now = time.perf_counter()
            self.seconds.append(now - self.last)
            self.last = now

    def score(self, completion_ids: list[list[int]], answer: list[str], **_: Any) -> list[float]:
        """The reward function that TRL calls, once a cycle."""
        texts = [text_of(self.tokenizer, tokens) for tokens in completion_ids]
        rewards = [reward(*each) for each in zip(texts, answer, strict=True)]
        self.rewards.append(sum(rewards) / len(rewards))
        self.tokens.append(sum(map(len, completion_ids)))
        self.answers.extend(answer)
        return rewards


def trained(job: dict[str, Any], seen: Seen) -> None:
    from datasets import Dataset  # pyright: ignore[reportMissingImports]
    from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports]

    class Trainer(GRPOTrainer):
        def compute_loss(self, model: Any, inputs: Any, *rest: Any, **named: Any) -> Any:
            seen.sequences.append(len(inputs["completion_ids"]))
            seen.trained_tokens.append(int(inputs["completion_mask"].sum()))
            return super().compute_loss(model, inputs, *rest, **named)

    torch.set_num_threads(job["threads"])
    tokenizer = seen.tokenizer
    for prompt in job["prompts"]:
        tokens = tokenizer.apply_chat_template(prompt["messages"], add_generation_prompt=True, return_dict=False)
        assert tokens == prompt["tokens"], "the prompt is not the tokens that rlpipe's policy was asked"
    check_rewards(tokenizer, job["rollouts"])
    rows = [{"prompt": prompt["messages"], "answer": prompt["answer"]} for prompt in job["prompts"]]
    rollouts = job["num_prompts"] * job["group_size"]
    settings = GRPOConfig(
        output_dir=job["output"], use_cpu=True, bf16=job["dtype"] == "bfloat16", seed=job["seed"],
        max_steps=job["iterations"] * job["num_steps"],
        # one generation of all rollouts feeds num_steps optimizer steps
        per_device_train_batch_size=rollouts // job["num_steps"], gradient_accumulation_steps=1,
        steps_per_generation=job["num_steps"], num_generations=job["group_size"],
        num_iterations=1, shuffle_dataset=False,
        max_completion_length=job["completion_tokens_max"], temperature=1.0, top_p=1.0, top_k=0,
        loss_type="dapo", scale_rewards="group", beta=0.0, epsilon=job["clip_low"], epsilon_high=job["clip_high"],
        learning_rate=job["learning_rate"], lr_scheduler_type="constant", warmup_steps=0, optim="adamw_torch_fused",
        adam_beta1=0.9, adam_beta2=job["beta2"], weight_decay=job["weight_decay"], max_grad_norm=job["grad_clip"],
        # what would only cost TRL time
        gradient_checkpointing=False, save_strategy="no", logging_strategy="no", report_to="none", disable_tqdm=True,
        # with bf16 its products alone are in it
        dataloader_pin_memory=False, model_init_kwargs={"dtype": "float32"},
    )  # fmt: skip
    trainer = Trainer(
        model=job["model"], args=settings, train_dataset=Dataset.from_list(rows), processing_class=tokenizer,
        reward_funcs=seen.score, callbacks=[seen],
    )  # fmt: skip
    trainer.train()


def main() -> None:
    job_path, result_path = map(Path, sys.argv[1:])
    job = json.loads(job_path.read_text())
    seen = Seen(job["num_steps"], AutoTokenizer.from_pretrained(job["model"]))
    trained(job, seen)
    asked = [prompt["answer"] for prompt in job["prompts"] for _ in range(job["group_size"])]
    assert seen.answers == asked, "TRL drew other prompts than rlpipe, or in another order"
    names = ("seconds", "rewards", "tokens", "sequences", "trained_tokens")
    result_path.write_text(json.dumps({name: getattr(seen, name) for name in names}))


if __name__ == "__main__":
    main()
