"""The step against a plain loop over unpacked sequences, and its invariance: microbatch
size and order change nothing.

Why it holds: every loss is a sum over tokens (or sequences) divided by counts of the whole step, so
a gradient is a sum of independent parts, and a packed sequence sees only itself (block-diagonal
mask, restarting positions).
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from rlpipe.algorithms.advantages import row_advantages
from rlpipe.algorithms.losses import aggregate, entropy, importance_weights, kl, policy_terms
from rlpipe.base.errors import StepRefused
from rlpipe.base.values import JsonDict
from rlpipe.config.training import OptimizerConfig, RlConfig
from rlpipe.models.causal import hf_config
from rlpipe.trainer.batches import RlBatch, collate
from rlpipe.trainer.gap import Gaps
from rlpipe.trainer.model import PolicyModel
from rlpipe.trainer.packing import Rows, TrainSequence
from rlpipe.trainer.ranks import Ranks
from rlpipe.trainer.rl import TOKEN_SUMS, advantages, as_recorded, loss_part, placed, with_frozen
from rlpipe.trainer.step import Resident, StepBatch, StepSettings, optimizer_step, plan_batch, scored
from rlpipe.trainer.trainer import Trainer
from tests import maths_oracle as oracle
from tests import trainer_world as world
from tests.batches import read_rl_batch

HOW = StepSettings(OptimizerConfig(learning_rate=1e-9, grad_clip=1e9), step=0, temperature=1.0, address="here")
LOUD: JsonDict = {
    "entropy_coef": 0.01,
    "importance_high": 1.05,
    "kl": "loss",
    "kl_coef": 0.3,
    "clip_low": 0.05,
    "clip_high": 0.06,
}
REWARD_KL: JsonDict = {"kl": "reward", "kl_coef": 0.3, "kl_estimator": "k1"}
# every estimator, objective, importance mode and aggregation, in pairs that a user may choose
OPTIONS: dict[str, JsonDict] = {
    "ppo": {"importance_low": 0.97},
    "ppo, dual clip": {
        "dual_clip": 1.03, "aggregation": "sequence_mean", "estimator": "dr_grpo",
        "importance": "token_mask", "importance_low": 0.96,
    },
    "gspo": {"objective": "gspo", "aggregation": "sequence_mean", "clip_low": 0.01,
             "clip_high": 0.01, "estimator": "rloo"},
    "cispo": {"objective": "cispo", "aggregation": "fixed_length", "kl_estimator": "k2", "estimator": "maxrl"},
    "sapo": {"objective": "sapo", "importance": "sequence_truncate", "importance_high": 1.1, "estimator": "opo"},
    "dppo": {"objective": "dppo", "importance": "none", "clip_low": 2e-4, "clip_high": 2e-4,
             "estimator": "opo", **REWARD_KL},
    "ppo, the engine's logprobs": {"proximal": "engine", "importance": "none", "kl_estimator": "k2"},
    "reinforce++": {"objective": "reinforce", "estimator": "reinforce_plus_plus", "gamma": 0.95, **REWARD_KL},
    "reinforce++ baseline": {
        "estimator": "reinforce_plus_plus_baseline", "importance": "sequence_mask", "importance_high": 1.2, **REWARD_KL,
    },
}  # fmt: skip
CASES = ["ppo", *(pytest.param(name, marks=pytest.mark.slow) for name in OPTIONS if name != "ppo")]


@dataclass(frozen=True)
class World:
    """A batch, and the frozen policies: proximal_logprobs are another policy's, so that
    every ratio and clip is at work."""

    ranks: Ranks
    rollouts: RlBatch
    proximal: PolicyModel
    reference: PolicyModel


def resident_of(ranks: Ranks, seed: int = 0) -> Resident:
    trainer = Trainer(ranks)
    world.run(trainer, "load", world.load_new(seed=seed))
    assert trainer.resident is not None
    return trainer.resident


def with_options(ranks: Ranks, **changes: Any) -> Ranks:
    trainer = ranks.options.trainer.model_copy(update=changes)
    return dataclasses.replace(ranks, options=ranks.options.model_copy(update={"trainer": trainer}))


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    return world.one_rank(tmp_path_factory.mktemp("trainer"), tokens_max=512)


@pytest.fixture(scope="module")
def setup(ranks: Ranks) -> World:
    ref = world.batch(ranks.store, "batch", world.rollout_rows(6, 4))
    return World(ranks, read_rl_batch(ranks.store, ref, 1), resident_of(ranks, 1).policy, resident_of(ranks, 2).policy)


@pytest.fixture
def sequences(setup: World) -> list[TrainSequence]:
    return setup.rollouts.steps[0]


def settings_of(name: str) -> RlConfig:
    return RlConfig.model_validate({**world.RL, **LOUD, **OPTIONS[name]})


def ready(
    ranks: Ranks,
    setup: World,
    sequences: list[TrainSequence],
    policy: PolicyModel,
    settings: RlConfig,
    rows: Rows = Rows.PACKED,
) -> StepBatch:
    """One step over `sequences`, with everything that comes before the first update."""
    batch = plan_batch(ranks, policy, rows, sequences)
    if settings.proximal == "engine":
        batch = with_frozen(as_recorded(batch), None, setup.reference, 1.0)
    else:
        batch = with_frozen(batch, policy, setup.reference, 1.0)
    return placed(batch, "advantages_BT", advantages(ranks, setup.rollouts, [batch], settings))


def gradients(
    ranks: Ranks, setup: World, sequences: list[TrainSequence], name: str, rows: Rows = Rows.PACKED
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """The gradient of one step and its sums.

    It is read out of a fresh AdamW: the first moment is (1 - beta1) times it.
    """
    resident, settings = resident_of(ranks), settings_of(name)
    batch = ready(ranks, setup, sequences, setup.proximal, settings, rows)
    sums = optimizer_step(ranks, resident, batch, loss_part(batch, settings, Gaps(), moved=False), HOW)
    moments = {name: resident.optimizer.state[shard]["exp_avg"].clone() for name, shard in resident.shards.items()}
    assert all(moment.abs().max() > 0 for moment in moments.values())
    return moments, sums


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 2e-6) -> None:
    assert found.keys() == expected.keys()
    for name, moment in expected.items():
        error = float((found[name].double() - moment.double()).norm() / moment.double().norm())
        assert error < tolerance, f"{name} differs by {error}"


def plain_model(seed: int) -> Any:
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(hf_config(world.MODEL), dtype=torch.float32).double().eval()


def plain_token_sums(
    logprobs: list[list[float]], advantages: list[float], logits: list[list[float]], settings: RlConfig
) -> dict[str, float]:
    """TOKEN_SUMS of one sequence, all tokens of which count.

    `logprobs`: those of policy, proximal, reference and rollout.
    """
    policy, proximal, reference, rollout = logprobs
    start = policy if settings.proximal == "engine" else proximal
    weighing = (proximal, rollout, [1] * len(policy), settings.importance)
    weights = oracle.importance_weights(*weighing, settings.importance_low, settings.importance_high)
    unbounded = oracle.importance_weights(*weighing[:3], settings.importance.replace("mask", "truncate"), 0.0, math.inf)
    clips = (settings.objective, settings.clip_low, settings.clip_high, settings.dual_clip)
    clipped = oracle.clipped(policy, rollout if settings.objective == "dppo" else proximal, advantages, *clips)
    return {
        "entropy": math.fsum(oracle.entropy(row) for row in logits),
        "clip_fraction_low": sum(below for below, _ in clipped),
        "clip_fraction_high": sum(above for _, above in clipped),
        "proximal_kl": math.fsum(oracle.kl(p, q, "k3") for p, q in zip(proximal, policy, strict=True)),
        "mismatch_abs_mean": math.fsum(oracle.kl(p, q, "abs") for p, q in zip(start, rollout, strict=True)),
        "importance_mean": math.fsum(weights),
        "importance_clipped_fraction": sum(weight != other for weight, other in zip(weights, unbounded, strict=True)),
        "teacher_kl": 0.0,  # there is none (test_teaching.py)
        "teacher_divergence": 0.0,
        "onpolicy_abs": math.fsum(oracle.kl(p, q, "abs") for p, q in zip(policy, start, strict=True)),
        "reference_abs": math.fsum(oracle.kl(p, q, "abs") for p, q in zip(policy, reference, strict=True)),
    }


def plain_gradients(rollouts: RlBatch, settings: RlConfig) -> tuple[dict[str, Tensor], dict[str, float]]:
    """One unpacked sequence at a time through the HF model in float64, with its own logits; the
    loss and TOKEN_SUMS come with it."""
    models = [plain_model(seed) for seed in (0, 1, 2)]
    kept = [sequence for sequence in rollouts.steps[0] if len(sequence.scored)]
    counts = {
        "num_tokens": sum(len(s.scored) for s in kept),
        "num_sequences": len(kept),
        "length": settings.completion_tokens_max,
    }
    rows = []
    for sequence in kept:
        logits = [model(torch.tensor(sequence.tokens)[None]).logits[0, sequence.scored - 1] for model in models]
        chosen = (range(len(sequence.scored)), sequence.tokens[sequence.scored])
        rows.append(([torch.log_softmax(each, -1)[chosen][None] for each in logits], logits[0]))
    kl_N = torch.cat([kl(p, r, estimator=settings.kl_estimator).flatten() for (_, p, r), _ in rows]).detach().numpy()
    advantages_B = row_advantages(
        rollouts.rewards_B, rollouts.group_index_B, rollouts.lengths_B, estimator=settings.estimator,
        gamma=settings.gamma, kl_N=kl_N if settings.kl == "reward" else None, kl_coef=settings.kl_coef,
    )  # fmt: skip
    sums = Counter[str]()
    for sequence, ((logprobs, proximal, reference), logits) in zip(kept, rows, strict=True):
        proximal, reference, mask = proximal.detach(), reference.detach(), torch.ones_like(logprobs)
        rollout = torch.tensor(sequence.rollout_logprobs, dtype=torch.float64)[None]
        proximal = rollout if settings.proximal == "engine" else proximal
        own_N = advantages_B[sequence.row]
        losses, _, _ = policy_terms(
            logprobs, rollout if settings.objective == "dppo" else proximal, torch.tensor(own_N)[None], mask,
            objective=settings.objective, clip_low=settings.clip_low, clip_high=settings.clip_high,
            dual_clip=settings.dual_clip,
        )  # fmt: skip
        bounds = {"low": settings.importance_low, "high": settings.importance_high}
        losses = losses * importance_weights(proximal, rollout, mask, mode=settings.importance, **bounds)[0]
        if settings.kl == "loss":
            losses = losses + settings.kl_coef * kl(logprobs, reference, estimator=settings.kl_estimator)
        loss = aggregate(
            losses - settings.entropy_coef * entropy(torch.log_softmax(logits, -1))[None],
            mask,
            mode=settings.aggregation,
            **counts,
        )
        loss.backward()
        told = [each[0].tolist() for each in (logprobs, proximal, reference, rollout)]
        sums.update({"loss": loss.item(), **plain_token_sums(told, own_N.tolist(), logits.tolist(), settings)})
    return {name: 0.1 * parameter.grad for name, parameter in models[0].named_parameters()}, dict(sums)


@pytest.mark.parametrize("name", OPTIONS)
def test_gradient_is_that_of_a_plain_loop(
    ranks: Ranks, setup: World, sequences: list[TrainSequence], name: str
) -> None:
    found, sums = gradients(ranks, setup, sequences, name)
    expected, plain = plain_gradients(setup.rollouts, settings_of(name))
    assert_same(found, expected, tolerance=2e-5)
    assert plain.keys() == {"loss", *TOKEN_SUMS}
    assert {told: sums[told] for told in plain} == pytest.approx(plain, rel=1e-5, abs=1e-6)
    settings = settings_of(name)
    assert (sums["clip_fraction_low"] > 0) == (settings.objective in ("ppo", "gspo", "cispo", "dppo")), (
        "a clip was not at work"
    )
    assert (sums["importance_clipped_fraction"] > 0) == (settings.importance != "none"), "no weight was bounded"


@pytest.mark.parametrize("name", CASES)
def test_gradient_depends_neither_on_the_microbatch_nor_on_the_order(
    ranks: Ranks, setup: World, sequences: list[TrainSequence], name: str
) -> None:
    expected, sums = gradients(ranks, setup, sequences, name)
    shuffled = [sequences[index] for index in np.random.default_rng(3).permutation(len(sequences))]
    for tokens_max, order in ((128, sequences), (4096, shuffled)):
        other = with_options(ranks, tokens_max=tokens_max)
        policy = resident_of(ranks).policy
        assert len(plan_batch(other, policy, Rows.PACKED, order).microbatches) != len(
            plan_batch(ranks, policy, Rows.PACKED, sequences).microbatches
        )
        found, other_sums = gradients(other, setup, order, name)
        assert_same(found, expected)
        assert other_sums == pytest.approx(sums, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_gradient_does_not_depend_on_how_rows_are_filled(
    ranks: Ranks, setup: World, sequences: list[TrainSequence], name: str
) -> None:
    expected, sums = gradients(ranks, setup, sequences, name, Rows.SINGLE)
    shared = plan_batch(ranks, resident_of(ranks).policy, Rows.SHARED, sequences).microbatches
    assert any(microbatch.branch_RL is not None for microbatch in shared)
    for rows in (Rows.PACKED, Rows.SHARED):
        found, other_sums = gradients(ranks, setup, sequences, name, rows)
        assert_same(found, expected)
        assert other_sums == pytest.approx(sums, rel=1e-4, abs=1e-5)


def test_gradient_does_not_depend_on_activation_checkpointing(
    ranks: Ranks, setup: World, sequences: list[TrainSequence]
) -> None:
    other = with_options(ranks, activation_checkpointing=True)
    assert_same(gradients(other, setup, sequences, "ppo")[0], gradients(ranks, setup, sequences, "ppo")[0])


def test_microbatches_of_padding_and_unscored_sequences_change_nothing(
    ranks: Ranks, setup: World, sequences: list[TrainSequence]
) -> None:
    resident, settings = resident_of(ranks), settings_of("reinforce++")
    empty = dataclasses.replace(sequences[0], loss_mask=0 * sequences[0].loss_mask, num_scored=0)
    batch = plan_batch(ranks, resident.policy, Rows.PACKED, [*sequences, empty])
    assert batch.num_sequences == len([s for s in sequences if len(s.scored)])
    padding = collate([], [])
    alone = with_frozen(dataclasses.replace(batch, microbatches=[padding]), resident.policy, setup.reference, 1.0)
    whole = with_frozen(batch, resident.policy, setup.reference, 1.0)
    both = dataclasses.replace(whole, microbatches=[*alone.microbatches, *whole.microbatches])
    told = [advantages(ranks, setup.rollouts, [each], settings) for each in (whole, both)]
    assert all(map(np.array_equal, *told)), "padding has no KL"
    (frozen,) = placed(alone, "advantages_BT", told[0]).microbatches
    loss, sums = loss_part(batch, settings, Gaps(), moved=False)(frozen, scored(resident.policy, padding, HOW))
    loss.backward()
    assert loss.item() == 0 and all(value.item() == 0 for value in sums.values())
    assert all(not gradient.any() for gradient in resident.gradients())


def test_a_step_that_is_not_finite_changes_nothing(ranks: Ranks, setup: World, sequences: list[TrainSequence]) -> None:
    resident, settings = resident_of(ranks), settings_of("ppo")
    before = world.fingerprint(list(resident.shards.values()))
    poisoned = [dataclasses.replace(sequences[0], logprobs=sequences[0].logprobs * np.nan), *sequences[1:]]
    batch = ready(ranks, setup, poisoned, resident.policy, settings)
    how = StepSettings(
        OptimizerConfig(learning_rate=1e-3), step=0, temperature=1.0, address="runs/a/rl/00003/batch step 2"
    )
    with pytest.raises(StepRefused, match="runs/a/rl/00003/batch step 2: loss nan"):
        optimizer_step(ranks, resident, batch, loss_part(batch, settings, Gaps(), moved=False), how)
    assert world.fingerprint(list(resident.shards.values())) == before and resident.optimizer_step == 0


def test_gradient_clip_bounds_the_norm(ranks: Ranks, setup: World, sequences: list[TrainSequence]) -> None:
    resident, settings = resident_of(ranks), settings_of("ppo")
    batch = ready(ranks, setup, sequences, resident.policy, settings)
    how = dataclasses.replace(HOW, optimizer=OptimizerConfig(grad_clip=0.01))
    done = optimizer_step(ranks, resident, batch, loss_part(batch, settings, Gaps(), moved=False), how)
    moments = torch.stack([entry["exp_avg"].square().sum() for entry in resident.optimizer.state.values()])
    assert done["grad_norm"] > 0.01
    assert float(moments.sum().sqrt()) == pytest.approx(0.1 * 0.01, rel=1e-4)
