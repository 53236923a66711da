"""A simulated run for the tests of `rlpipe why`: a policy that spells words backward, better from
iteration to iteration, and what goes wrong."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from rlpipe.base.values import Metrics
from rlpipe.config.pipeline import PipelineConfig
from rlpipe.config.source import override_config
from rlpipe.extras.why.around import WINDOW, Around
from rlpipe.extras.why.scored_group import ScoredGroup
from rlpipe.records.columns import to_parquet, to_table
from rlpipe.records.kinds import Span
from rlpipe.records.prompt import Prompt
from rlpipe.records.rollout import SCORES, Rollout
from rlpipe.rewards.score import label
from rlpipe.store.documents import sealed
from rlpipe.store.forks import differences
from rlpipe.store.run import Run
from tests.extras.queries.test_queries import commit_files
from tests.nearness import near
from tests.store.test_run import record_of

LETTERS = "abcdefghijklmnopqrstuvwxyz"
HEAD = list(range(1000, 1020))  # the tokens of the template
REWARDS = 'rl.rewards={exact = 0.6, "tests.nearness:near" = 0.3, format = 0.1}'


@dataclass
class Asked:
    """What is sampled next: a fault changes it before, or the rollout after."""

    iteration: int
    word: str
    skill: float
    label: str = ""
    head: list[int] = field(default_factory=lambda: HEAD)


Before = Callable[[random.Random, Asked], Asked]
After = Callable[[random.Random, Rollout, Prompt], Rollout]


@dataclass(frozen=True)
class Planted:
    """What happens from iteration `at` on."""

    before: Before = lambda rng, asked: asked
    after: After = lambda rng, rollout, prompt: rollout
    metrics: Metrics = field(default_factory=dict)
    sets: tuple[str, ...] = ()


def tokens_of(text: str) -> np.ndarray:
    return np.array([ord(letter) for letter in text], dtype=np.int32)


def rewarded(rollout: Rollout, parts: dict[str, float], config: PipelineConfig) -> Rollout:
    weights = {label(name): weight for name, weight in config.rl.rewards.items()}
    parts = {name: value for name, value in parts.items() if name in weights}
    total = sum(weights[name] * value for name, value in parts.items())
    return replace(rollout, reward=total, reward_parts=parts)


def sampled(
    rng: random.Random, config: PipelineConfig, asked: Asked, prompt: Prompt, group: int, index: int
) -> Rollout:
    right = rng.random() < asked.skill ** (len(asked.word) / 4)
    answer = asked.word[::-1] if right else "".join(rng.choice(LETTERS) for _ in asked.word)
    formed = rng.random() < 0.97
    completion = f"<answer>{answer}</answer>" if formed else answer
    tokens = tokens_of(completion)
    rollout = Rollout(
        prompt_id=prompt.prompt_id, group_index=group, rollout_index=index, prompt=str(prompt.messages[0]["content"]),
        prompt_tokens=prompt.prompt_tokens, completion=completion, completion_tokens=tokens,
        loss_mask=np.ones(len(tokens), np.int8),
        rollout_logprobs=np.full(len(tokens), -0.5, np.float32), weight_version=asked.iteration,
        weight_versions=(Span(asked.iteration, len(tokens)),), finish_reason="stop", seed=1, engine="e",
    )  # fmt: skip
    exact = float(formed and answer == prompt.answer)
    parts = {"exact": exact, "near": near(prompt.for_reward(), completion), "format": float(formed)}
    return rewarded(rollout, parts, config)


def around(
    run: Run,
    seed: int,
    planted: Planted | None = None,
    *,
    at: int = 6,
    count: int = 12,
    prompts: int = 12,
    size: int = 6,
) -> Around:
    """The groups of a run with a fault from `at` on."""
    rng, nothing = random.Random(seed), Planted()
    before = run.config
    after = override_config(before, list(planted.sets if planted else ()))
    groups: list[ScoredGroup] = []
    metrics: dict[int, Metrics] = {}
    for iteration in range(max(0, at - WINDOW), min(count, at + WINDOW)):
        fault = planted if planted and iteration >= at else nothing
        config = after if iteration >= at else before
        for group in range(prompts):
            word = "".join(rng.choice(LETTERS) for _ in range(rng.choice([3, 4, 5, 6])))
            asked = fault.before(
                rng, Asked(iteration, word, 0.55 + 0.3 * (1 - np.exp(-iteration / 5)) + rng.gauss(0, 0.03))
            )
            label, text = asked.label or asked.word[::-1], f"spell {asked.word}"
            prompt_tokens = np.array([*asked.head, *tokens_of(asked.word), 7, 8, 9], dtype=np.int32)
            prompt = Prompt(
                f"words/{iteration}-{group}", "words", [{"role": "user", "content": text}], label, {}, prompt_tokens
            )
            rollouts = [sampled(rng, config, asked, prompt, group, index) for index in range(size)]
            groups.append(ScoredGroup(iteration, prompt, [fault.after(rng, rollout, prompt) for rollout in rollouts]))
        metrics[iteration] = {
            "train/learning_rate": config.rl.learning_rate, "train/mismatch_abs_mean": 1e-6 * rng.uniform(0.5, 2),
            "train/kl": 4e-3 * iteration**2 * rng.uniform(0.8, 1.2), "train/proximal_kl": 1e-3 * rng.uniform(0.5, 2),
            **fault.metrics,
        }  # fmt: skip
    return Around(
        run, at, groups, metrics, after, before, differences(after, before) if planted and planted.sets else []
    )


def store(whole: Around) -> None:
    """Commits the iterations of the simulated run: prompts, scores and records."""
    run = whole.run
    for iteration, metrics in whole.metrics.items():
        groups = [group for group in whole.groups if group.iteration == iteration]
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        tables = {
            "prompts": to_parquet(to_table([group.prompt for group in groups], Prompt)),
            "scores": to_parquet(to_table(rollouts, Rollout, SCORES)),
        }
        refs = {
            name: commit_files(run, ("rl", iteration, f"{name}/round-0"), {f"{name}.parquet": data})
            for name, data in tables.items()
        }
        means = {"rollout/reward_mean": float(np.mean([rollout.reward or 0.0 for rollout in rollouts]))}
        record = record_of(run, iteration, {**metrics, **means}, {"prompts": refs["prompts"]})
        assert run.store.create(run.iteration_key(iteration), sealed(record))
