"""The step against a plain loop over unpacked sequences, and its invariance: microbatch size and order change nothing.

Why it holds: every loss is a sum over tokens (or sequences) divided by counts of the whole step, so a gradient is a sum of
independent parts, and a packed sequence sees only itself (block-diagonal mask, restarting positions).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from rlpipe.losses import aggregate, importance_weights, kl, policy_loss
from rlpipe.trainer.batches import TrainSequence, read_rl_steps
from rlpipe.trainer.gang import Gang
from rlpipe.trainer.jobs import Trainer
from rlpipe.trainer.model import hf_config
from rlpipe.trainer.rl import RlSettings, _part, _with_frozen
from rlpipe.trainer.state import Resident
from rlpipe.trainer.step import StepSettings, forward, optimizer_step, plan_batch
from rlpipe.types import JsonDict, StepRefused
from tests import trainer_world as world

HOW = StepSettings(learning_rate=0.0, grad_clip=1e9, temperature=1.0, address="here")
LOUD: JsonDict = {"entropy_coef": 0.01, "importance_high": 1.05, "kl_coef": 0.3, "objective": "ppo"}


@pytest.fixture(scope="module")
def gang(tmp_path_factory: pytest.TempPathFactory) -> Gang:
    return world.solo_gang(tmp_path_factory.mktemp("gang"), tokens_max=512)


@pytest.fixture(scope="module")
def sequences(gang: Gang) -> list[TrainSequence]:
    ref = world.batch(gang.store, "batch", world.rollout_rows(6, 4))
    (step,) = read_rl_steps(gang.store, ref, 1)
    return step


def resident_of(gang: Gang) -> Resident:
    trainer = Trainer(gang)
    trainer.run("load", world.load_new())
    assert trainer.resident is not None
    return trainer.resident


def gradients(gang: Gang, sequences: list[TrainSequence], settings: JsonDict, reference_seed: int = 1) -> dict[str, Tensor]:
    """The gradient of one step, read out of a fresh AdamW: its first moment is (1 - beta1) times the gradient."""
    resident = resident_of(gang)
    reference = Trainer(gang)
    reference.run("load", world.load_new(seed=reference_seed))
    assert reference.resident is not None
    batch = plan_batch(gang, sequences)
    batch = _with_frozen(batch, resident.policy, reference.resident.policy, 1.0)
    optimizer_step(gang, resident, batch, _part(batch, RlSettings.from_json({**world.RL, **LOUD, **settings})), HOW)
    moments = {name: resident.optimizer.state[shard]["exp_avg"].clone() for name, shard in resident.shards.items()}
    assert all(moment.abs().max() > 0 for moment in moments.values())
    return moments


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-6) -> None:
    assert found.keys() == expected.keys()
    for name, moment in expected.items():
        error = float((found[name].double() - moment.double()).norm() / moment.double().norm())
        assert error < tolerance, f"{name} differs by {error}"


def plain_gradients(sequences: list[TrainSequence], settings: JsonDict) -> dict[str, Tensor]:
    """One unpacked sequence at a time through the HF model in float64, with its own logits."""
    config = hf_config(world.MODEL)
    models = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        models.append(AutoModelForCausalLM.from_config(config, dtype=torch.float32).double().eval())
    policy, reference = models
    kept = [sequence for sequence in sequences if len(sequence.scored)]
    counts = {"num_tokens": sum(len(s.scored) for s in kept), "num_sequences": len(kept), "length": settings["length"]}
    for sequence in kept:
        rows = []
        for model in (policy, reference):
            logits = model(torch.tensor(sequence.tokens)[None]).logits[0, sequence.scored - 1]
            table = torch.log_softmax(logits, -1)
            rows.append((table[range(len(sequence.scored)), sequence.tokens[sequence.scored]][None], table))
        (logprobs, table), (reference_logprobs, _) = rows
        mask, rollout = torch.ones_like(logprobs), torch.tensor(sequence.rollout_logprobs, dtype=torch.float64)[None]
        losses = policy_loss(
            logprobs, logprobs.detach(), torch.full_like(mask, sequence.advantage), mask, objective=settings["objective"]
        )
        losses = losses * importance_weights(logprobs, rollout, mask, mode="token_truncate", high=settings["importance_high"])
        losses = losses + settings["kl_coef"] * kl(logprobs, reference_logprobs.detach(), estimator="k3")
        losses = losses - settings["entropy_coef"] * -(table.exp() * table).sum(-1)[None]
        aggregate(losses, mask, mode=settings["aggregation"], **counts).backward()
    return {name: 0.1 * parameter.grad for name, parameter in policy.named_parameters()}  # pyright: ignore[reportOptionalOperand]


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "fixed_length"])
def test_gradient_is_that_of_a_plain_loop(gang: Gang, sequences: list[TrainSequence], aggregation: str) -> None:
    settings = {**world.RL, **LOUD, "aggregation": aggregation}
    assert_same(gradients(gang, sequences, settings), plain_gradients(sequences, settings), tolerance=3e-6)


@pytest.mark.parametrize("changes", [{"tokens_max": 128}, {"tokens_max": 4096}, {"activation_checkpointing": True}])
@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
def test_gradient_does_not_depend_on_the_microbatch(
    gang: Gang, sequences: list[TrainSequence], aggregation: str, changes: dict[str, Any]
) -> None:
    other = dataclasses.replace(gang, options=dataclasses.replace(gang.options, **changes))
    settings = {"aggregation": aggregation}
    assert_same(gradients(other, sequences, settings), gradients(gang, sequences, settings))


def test_gradient_does_not_depend_on_the_order(gang: Gang, sequences: list[TrainSequence]) -> None:
    assert_same(gradients(gang, sequences[::-1], {}), gradients(gang, sequences, {}))


def test_microbatches_of_padding_and_unscored_sequences_change_nothing(gang: Gang, sequences: list[TrainSequence]) -> None:
    resident = resident_of(gang)
    empty = dataclasses.replace(
        sequences[0], scored=sequences[0].scored[:0], rollout_logprobs=sequences[0].rollout_logprobs[:0]
    )
    batch = plan_batch(gang, [*sequences, empty])
    assert batch.num_sequences == len([s for s in sequences if len(s.scored)])
    padding = plan_batch(gang, sequences[:1]).microbatches[0]
    padding = dataclasses.replace(padding, mask_BT=torch.zeros_like(padding.mask_BT))
    logprobs, entropy = forward(resident.policy, padding, 1.0)
    frozen = dataclasses.replace(padding, proximal_logprobs_BT=logprobs.detach())
    loss, sums = _part(batch, RlSettings.from_json(world.RL))(frozen, logprobs, entropy)
    loss.backward()
    assert loss.item() == 0 and all(value.item() == 0 for value in sums.values())
    assert all(not gradient.any() for gradient in resident.gradients())


def test_a_step_that_is_not_finite_changes_nothing(gang: Gang, sequences: list[TrainSequence]) -> None:
    resident = resident_of(gang)
    before = world.fingerprint(list(resident.shards.values()))
    poisoned = [dataclasses.replace(sequences[0], advantage=float("nan")), *sequences[1:]]
    batch = plan_batch(gang, poisoned)
    batch = _with_frozen(batch, resident.policy, None, 1.0)
    how = dataclasses.replace(HOW, learning_rate=1e-3, address="runs/a/rl/00003/batch step 2")
    with pytest.raises(StepRefused, match="runs/a/rl/00003/batch step 2: loss nan"):
        optimizer_step(gang, resident, batch, _part(batch, RlSettings.from_json(world.RL)), how)
    assert world.fingerprint(list(resident.shards.values())) == before and resident.optimizer_step == 0


def test_gradient_clip_bounds_the_norm(gang: Gang, sequences: list[TrainSequence]) -> None:
    resident = resident_of(gang)
    batch = plan_batch(gang, sequences)
    batch = _with_frozen(batch, resident.policy, None, 1.0)
    done = optimizer_step(
        gang, resident, batch, _part(batch, RlSettings.from_json(world.RL)), dataclasses.replace(HOW, grad_clip=0.01)
    )
    moments = torch.stack([entry["exp_avg"].square().sum() for entry in resident.optimizer.state.values()])
    assert done["grad_norm"] > 0.01
    assert float(moments.sum().sqrt()) == pytest.approx(0.1 * 0.01, rel=1e-4)
