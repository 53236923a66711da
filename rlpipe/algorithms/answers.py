"""What completions answer: where in a text the answer stands, how many of an evaluation set pass, pass@k, the majority. Pure.

An answer is looked for in one pass: a policy may write thousands of tags and braces that do not close.
"""

from __future__ import annotations

import math
import re
from collections import Counter

import numpy as np

from rlpipe.records.rollout import Group, Rollout

BOX = "\\boxed{"
HASHED = re.compile(r"####[ \t]*(.*)")


def last_answer(completion: str) -> str | None:
    """The text of the last `<answer>` that is closed; None when there is none. Not by a regular expression: those are quadratic."""
    end = completion.rfind("</answer>")
    start = completion.rfind("<answer>", 0, max(end, 0))
    return completion[start + len("<answer>") : end] if start >= 0 else None


def last_box(text: str) -> str | None:
    """What is inside the last `\\boxed{...}` whose braces close, braces within braces included; None when there is none."""
    opened: list[int] = []  # after each brace that is open
    first = end = -1
    for brace in re.finditer(r"[{}]", text):
        if brace[0] == "{":
            opened.append(brace.end())
        elif opened:
            inside = opened.pop()
            if inside > first and text.endswith(BOX, 0, inside):
                first, end = inside, brace.start()
    return text[first:end] if first >= 0 else None


def answer_text(completion: str) -> str:
    """The text that counts as the answer: the last `<answer>` element, else the last `\\boxed{}`, else what the last `####` is
    followed by on its line, else the whole completion; stripped."""
    if (tagged := last_answer(completion)) is not None:
        return tagged.strip()
    if (boxed := last_box(completion)) is not None:
        return boxed.strip()
    if hashed := HASHED.findall(completion):
        return hashed[-1].strip()
    return completion.strip()


def pass_at_k(num_completions: int, num_passed: int, k: int) -> float:
    """The chance that at least one of k completions passes, drawn without replacement: 1 - C(n-c, k) / C(n, k).

    The unbiased estimator of Chen et al. 2021 (arXiv 2107.03374, section 2.1), in whole numbers.
    """
    assert 0 <= num_passed <= num_completions and 1 <= k <= num_completions
    return 1.0 - math.comb(num_completions - num_passed, k) / math.comb(num_completions, k)


def majority_passes(answers: list[str], passed: list[bool]) -> bool:
    """Whether the most frequent answer is right: a completion that gave it passed. Of equally frequent ones the first counts."""
    assert len(answers) == len(passed) > 0
    chosen = Counter(answers).most_common(1)[0][0]  # equal counts: in the order of first appearance
    return any(right for answer, right in zip(answers, passed, strict=True) if answer == chosen)


def set_metrics(name: str, rollouts: Group, threshold: float) -> dict[str, float]:
    """The metrics of one evaluation set from its scored rollouts: of each prompt, rollout 0 is greedy, the others are sampled.

    `<set>_greedy`, `_pass_at_1`, `_reward_mean`, `_length_tokens_mean`; with n > 1 sampled completions `_pass_at_<k>` for
    k = 2, 4, 8, ... up to n, and `_maj_at_<n>`; `_format_rate` where the reward has such a part.
    """
    sampled = [rollout for rollout in rollouts if rollout.rollout_index > 0]
    greedy = [_passes(rollout, threshold) for rollout in rollouts if rollout.rollout_index == 0]
    metrics = {
        "greedy": np.mean(greedy),
        "pass_at_1": np.mean([_passes(rollout, threshold) for rollout in sampled]),
        "reward_mean": np.mean([rollout.reward or 0.0 for rollout in sampled]),
        "length_tokens_mean": np.mean([len(rollout.completion_tokens) for rollout in sampled]),
        **_over_completions(sampled, threshold),
    }
    formats = [rollout.reward_parts["format"] for rollout in sampled if "format" in rollout.reward_parts]
    metrics |= {"format_rate": np.mean(formats)} if formats else {}
    return {f"{name}_{key}": float(value) for key, value in metrics.items()}


def _passes(rollout: Rollout, threshold: float) -> bool:
    assert rollout.reward is not None, "an evaluation counts scored rollouts"
    return rollout.reward >= threshold


def _over_completions(sampled: Group, threshold: float) -> dict[str, float]:
    prompts: dict[str, Group] = {}
    for rollout in sampled:
        prompts.setdefault(rollout.prompt_id, []).append(rollout)
    passed = [[_passes(rollout, threshold) for rollout in group] for group in prompts.values()]
    count = len(passed[0])
    assert all(len(passes) == count for passes in passed), "every prompt has the same number of completions"
    if count == 1:
        return {}
    powers = [2**power for power in range(1, count.bit_length()) if 2**power <= count]
    metrics = {f"pass_at_{k}": float(np.mean([pass_at_k(count, sum(passes), k) for passes in passed])) for k in powers}
    answers = [[answer_text(rollout.completion) for rollout in group] for group in prompts.values()]
    majority = [majority_passes(*pair) for pair in zip(answers, passed, strict=True)]
    return metrics | {f"maj_at_{count}": float(np.mean(majority))}
