"""The model card: errors of metrics, and the licence of a base."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from rlpipe.algorithms.answers import set_metrics
from rlpipe.extras.serve.card import base_licence, standard_errors
from rlpipe.records.rollout import Rollout


def rollout(prompt: int, index: int, reward: float) -> Rollout:
    tokens = np.arange(2 + prompt, dtype=np.int32)
    zeros = np.zeros(len(tokens))
    return Rollout(
        f"a/b/{prompt}", prompt, index, "Say it", tokens, str(reward), tokens, zeros.astype(np.int8),
        zeros.astype(np.float32), 1, (), "stop", 0, "e", reward=reward, reward_parts={},
    )  # fmt: skip


def test_the_standard_errors_are_those_of_means_over_prompts() -> None:
    rng = np.random.default_rng(0)
    rewards = rng.integers(0, 2, (40, 5)).astype(float)  # a greedy one and four sampled ones a prompt
    rollouts = [rollout(prompt, index, rewards[prompt, index]) for prompt in range(40) for index in range(5)]
    errors, metrics = standard_errors(rollouts, 1.0), set_metrics("a/b", rollouts, 1.0)
    assert errors.keys() == metrics.keys()
    lengths = 2.0 + np.arange(40)
    any_of_four = (rewards[:, 1:].sum(1) > 0).astype(float)
    for name, by_prompt in {
        "greedy": rewards[:, 0], "pass_at_1": rewards[:, 1:].mean(1), "pass_at_4": any_of_four,
        "reward_mean": rewards[:, 1:].mean(1), "length_tokens_mean": lengths,
    }.items():  # fmt: skip
        assert metrics[f"a/b_{name}"] == pytest.approx(by_prompt.mean(), rel=1e-12)
        assert errors[f"a/b_{name}"] == pytest.approx(by_prompt.std(ddof=1) / np.sqrt(40), rel=1e-12)
    assert standard_errors(rollouts[:5], 1.0) == {}


@pytest.mark.parametrize(
    ("text", "licence"),
    [
        ("---\nlicense: apache-2.0\ntags: [x]\n---\n# It\nlicense: no\n", "apache-2.0"),
        ("---\nlicense: 'mit'\n---\n", "mit"),
        ("---\ntags: [x]\n---\nlicense: mit\n", ""),
        ("# It\nlicense: mit\n", ""),
        (None, ""),
    ],
)
def test_the_licence_is_that_of_the_front_matter(tmp_path: Path, text: str | None, licence: str) -> None:
    if text is not None:
        (tmp_path / "README.md").write_text(text)
    assert base_licence(str(tmp_path)) == licence and base_licence("") == ""
