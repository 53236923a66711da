"""The teacher's logprobs of a batch, and the gradient of distillation, against plain loops in
float64."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from rlpipe.base.errors import StoreError, UserError
from rlpipe.base.references import ArtifactRef
from rlpipe.base.values import JsonDict
from rlpipe.models.causal import hf_config
from rlpipe.records.rollout import TEACHER_FILE, TEACHER_TOP_FILE, TeacherLogprobs, TeacherTop
from rlpipe.store.artifacts import read_records
from rlpipe.trainer.board import Board
from rlpipe.trainer.jobs import STATUS_OK, check_place, job_of
from rlpipe.trainer.trainer import Trainer
from tests import trainer_world as world

PLACE = "runs/a/rl/00000/teacher_logprobs"
# one update on the weights that sampled: every ratio is 1, so the gradient is that of -A log pi
ONE_STEP: JsonDict = {"num_steps": 1, "importance": "none", "grad_clip": 1e9, "learning_rate": 1e-9}


@dataclass
class Classroom:
    """A trainer with the student loaded, a stored teacher, and a batch."""

    trainer: Trainer
    teacher: ArtifactRef
    rows: list[JsonDict]
    batch: ArtifactRef

    def taught(self, folder: str = PLACE, temperature: float = 1.0, top_k: int = 0) -> ArtifactRef:
        """The committed logprobs of the batch."""
        job = asking(self.batch, self.teacher, folder, temperature) | {"top_k": top_k}
        answer = world.run(self.trainer, "teacher", job)
        return world.saved(self.trainer.ranks.store, folder, answer["teacher"])

    def trained(self, logprobs: ArtifactRef | None, **settings: Any) -> JsonDict:
        """The metrics of an iteration, from fresh weights and a fresh optimizer."""
        world.run(self.trainer, "load", world.load_new())
        job = world.train("new", "one", "rl", self.batch, ONE_STEP | settings)
        job |= {"teacher_logprobs": logprobs.as_json() if logprobs else None}
        return world.run(self.trainer, "train", job)["metrics"]

    def gradients(self) -> dict[str, torch.Tensor]:
        """The gradient of the last step: AdamW's first moment is (1 - beta1) times it."""
        resident = self.trainer.resident
        assert resident is not None
        return {name: 10 * resident.optimizer.state[shard]["exp_avg"] for name, shard in resident.shards.items()}


def asking(batch: ArtifactRef, teacher: ArtifactRef, folder: str, temperature: float = 1.0) -> JsonDict:
    refs = {"data": batch.as_json(), "teachers": [teacher.as_json()]}
    return {**refs, "temperature": temperature, "folder": folder, "attempt": "a1"}


@pytest.fixture
def room(tmp_path: Path) -> Classroom:
    trainer = Trainer(world.one_rank(tmp_path, tokens_max=256))
    world.run(trainer, "load", world.load_new("teacher", seed=9))
    rows = world.rollout_rows(6, 4)
    rows[5] |= {"loss_mask": [0] * len(rows[5]["loss_mask"])}
    return Classroom(trainer, kept(trainer, "teacher"), rows, world.batch(trainer.ranks.store, "batch", rows))


def kept(trainer: Trainer, name: str) -> ArtifactRef:
    """What is resident, saved as a teacher."""
    made = world.run(trainer, "save", world.save(name, name, None))["policy"]
    return world.saved(trainer.ranks.store, name, made)


def plain_logprobs(seed: int, row: JsonDict, temperature: float = 1.0, lm: Any = None) -> torch.Tensor:
    """Of each scored token of a row, by one forward pass of the model alone, float64."""
    logprobs = all_logprobs(lm or double_model(seed), row, temperature)
    targets = torch.tensor(row["completion_tokens"])[np.flatnonzero(row["loss_mask"])]
    return logprobs.gather(1, targets[:, None])[:, 0]


def double_model(seed: int) -> Any:
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(hf_config(world.MODEL), dtype=torch.float32).double().eval()


def all_logprobs(lm: Any, row: JsonDict, temperature: float) -> torch.Tensor:
    """Of every token of the vocabulary at each scored position of a row, float64."""
    tokens = torch.tensor([row["prompt_tokens"] + row["completion_tokens"]])
    logprobs = torch.log_softmax(lm(tokens).logits[0, :-1] / temperature, dim=-1)[len(row["prompt_tokens"]) - 1 :]
    return logprobs[np.flatnonzero(row["loss_mask"])]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_stored_logprobs_are_those_of_the_teachers_own_forward_pass(room: Classroom, temperature: float) -> None:
    store = room.trainer.ranks.store
    stored = read_records(store, room.taught(temperature=temperature), TEACHER_FILE, TeacherLogprobs)
    assert [(row.group_index, row.rollout_index) for row in stored] == [(at // 4, at % 4) for at in range(24)]
    assert len(stored[5].logprobs) == 0, "a row without a trained token"
    for row, found in zip(room.rows, stored, strict=True):
        expected = plain_logprobs(9, row, temperature).detach().numpy()
        np.testing.assert_allclose(found.logprobs, expected, atol=5e-6)


@pytest.mark.parametrize("top_k", [0, 7])
def test_each_row_has_the_logprobs_of_the_teacher_of_its_set(room: Classroom, top_k: int) -> None:
    store, sets = room.trainer.ranks.store, ["words", "sums", "poems"]  # the first and the last have one teacher
    rows = [row | {"prompt_id": f"{sets[row['group_index'] % 3]}/{row['group_index']}"} for row in room.rows]
    world.run(room.trainer, "load", world.load_new("second", seed=5))
    refs = [ref.as_json() for ref in (room.teacher, kept(room.trainer, "second"))]
    job = asking(world.batch(store, "mixed", rows), room.teacher, PLACE)
    job |= {"teachers": refs, "of_set": {"words": 0, "sums": 1, "poems": 0}, "top_k": top_k}
    answer = world.run(room.trainer, "teacher", job)
    artifact = world.saved(store, PLACE, answer["teacher"])
    models, apart = [double_model(9), double_model(5)], {name: list[float]() for name in sets}
    for at, (row, found) in enumerate(
        zip(rows, read_records(store, artifact, TEACHER_FILE, TeacherLogprobs), strict=True)
    ):
        name = row["prompt_id"].split("/")[0]
        expected = plain_logprobs(0, row, lm=models[name == "sums"]).detach().numpy()
        np.testing.assert_allclose(found.logprobs, expected, atol=5e-6)
        apart[name] += [*(np.array(row["rollout_logprobs"])[np.flatnonzero(row["loss_mask"])] - expected)]
        assert (found.group_index, found.rollout_index) == (at // 4, at % 4)
    for name, values in apart.items():
        assert answer["metrics"][f"train/teacher_kl/{name}"] == pytest.approx(np.mean(values), rel=1e-5)
    top = list(read_records(store, artifact, TEACHER_TOP_FILE, TeacherTop)) if top_k else []
    for row, found in zip(rows, top, strict=bool(top)):
        lm = models[row["prompt_id"].startswith("sums")]
        logprobs, tokens = all_logprobs(lm, row, 1.0).topk(top_k)
        assert found.tokens.tolist() == tokens.flatten().tolist()
        np.testing.assert_allclose(found.logprobs, logprobs.detach().numpy().flatten(), atol=5e-6)
    assert {*room.trainer._frozen} == {"teacher-0", "teacher-1"}
    room.trained(None)
    assert not room.trainer._frozen, "an iteration without a teacher needs none of them"


def test_teachers_of_several_sizes_are_refused_where_top_tokens_are_all_of_one(room: Classroom) -> None:
    store = room.trainer.ranks.store
    rows = [row | {"prompt_id": "words/1"} for row in room.rows]
    world.run(room.trainer, "load", world.load_new("second", 5, world.MODEL | {"vocab_size": world.VOCAB + 8}))
    refs = [ref.as_json() for ref in (room.teacher, kept(room.trainer, "second"))]
    job = asking(world.batch(store, "mixed", rows), room.teacher, PLACE) | {"teachers": refs, "of_set": {"words": 1}}
    with pytest.raises(UserError, match=r"rl\.teacher_top_k=320: its teachers have .* tokens; use less than 320"):
        world.run(room.trainer, "teacher", job | {"top_k": world.VOCAB})
    assert world.run(room.trainer, "teacher", job | {"top_k": world.VOCAB - 1})["teacher"]


@pytest.mark.parametrize("objective", ["ppo", "reinforce", "cispo"])
@pytest.mark.parametrize("beside_rewards", [False, True])
def test_the_gradient_is_that_of_a_plain_loop_in_float64(room: Classroom, objective: str, beside_rewards: bool) -> None:
    rewards = np.array([row["reward"] if beside_rewards else 0.0 for row in room.rows]).reshape(6, 4)
    if not beside_rewards:
        room.batch = world.batch(room.trainer.ranks.store, "without", [row | {"reward": 0.0} for row in room.rows])
    metrics = room.trained(room.taught(), objective=objective, estimator="dr_grpo", teacher_coef=0.5)
    student = double_model(0)
    of_group = (rewards - rewards.mean(1, keepdims=True)).flatten()
    loss, apart, count = torch.zeros((), dtype=torch.float64), 0.0, sum(sum(row["loss_mask"]) for row in room.rows)
    for row, advantage in zip(room.rows, of_group, strict=True):
        policy, teacher = plain_logprobs(0, row, lm=student), plain_logprobs(9, row).detach()
        advantages = advantage + 0.5 * (teacher - policy.detach())
        loss = loss - (advantages * policy).sum() / count
        apart += float((policy.detach() - teacher).sum()) / count
    loss.backward()
    expected, found = {name: weight.grad for name, weight in student.named_parameters()}, room.gradients()
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert float((found[name].double() - gradient).norm() / gradient.norm()) <= 1e-5, name
    assert metrics["train/teacher_kl"] == pytest.approx(apart, rel=1e-5)


@pytest.mark.parametrize("top_k", [1, 7, world.VOCAB, 1000])
@pytest.mark.parametrize(("beta", "beside_rewards"), [(0.0, False), (0.3, False), (0.3, True), (1.0, False)])
def test_the_gradient_of_the_divergence_is_that_of_a_plain_loop_in_float64(
    room: Classroom, top_k: int, beta: float, beside_rewards: bool
) -> None:
    temperature, coef = 0.7, 0.5
    for row in room.rows:
        row["reward"] *= beside_rewards
    room.batch = world.batch(room.trainer.ranks.store, "another", room.rows)
    logprobs = room.taught(temperature=temperature, top_k=top_k)
    how = {"teacher_top_k": top_k, "teacher_beta": beta, "teacher_coef": coef, "temperature": temperature}
    metrics = room.trained(logprobs, objective="ppo", estimator="dr_grpo", **how)
    rewards = np.array([row["reward"] for row in room.rows]).reshape(6, 4)
    of_group = (rewards - rewards.mean(1, keepdims=True)).flatten()
    student, teacher = (double_model(seed) for seed in (0, 9))
    loss, apart, count = torch.zeros((), dtype=torch.float64), 0.0, sum(sum(row["loss_mask"]) for row in room.rows)
    for row, advantage in zip(room.rows, of_group, strict=True):
        loss = loss - advantage * plain_logprobs(0, row, temperature, student).sum() / count
        shares = [all_logprobs(lm, row, temperature).exp() for lm in (student, teacher)]
        for p, t in zip(shares[0], shares[1].detach(), strict=True):
            chosen = t.topk(min(top_k, len(t))).indices
            others = torch.ones(len(t), dtype=torch.bool).index_fill(0, chosen, False)
            if others.any():
                p, t = (torch.cat([each[chosen], each[others].sum()[None]]) for each in (p, t))
            m = beta * t + (1 - beta) * p
            forward, reverse = ((a * (a / b).log()).sum() for a, b in ((t, m), (p, m)))
            if beta in (0, 1):
                one = (p * (p / t).log()).sum() if beta else (t * (t / p).log()).sum()
            else:
                one = beta * forward + (1 - beta) * reverse
            loss, apart = loss + coef * one / count, apart + float(one.detach()) / count
    loss.backward()
    expected, found = {name: weight.grad for name, weight in student.named_parameters()}, room.gradients()
    squares = [
        (float((found[name].double() - one).norm()) ** 2, float(one.norm()) ** 2) for name, one in expected.items()
    ]
    wrong, whole = (math.sqrt(sum(values)) for values in zip(*squares, strict=True))
    assert wrong <= 1e-5 * whole, wrong / whole
    assert metrics["train/teacher_divergence"] == pytest.approx(apart, rel=1e-5, abs=5e-7)  # of differences in fp32


def test_top_tokens_change_no_logprob_and_small_microbatches_give_the_same(room: Classroom, tmp_path: Path) -> None:
    plain, top = room.taught(), room.taught("runs/a/rl/00001/teacher_logprobs", top_k=4)
    store = room.trainer.ranks.store
    for one, other in zip(
        *(read_records(store, ref, TEACHER_FILE, TeacherLogprobs) for ref in (plain, top)), strict=True
    ):
        assert np.array_equal(one.logprobs, other.logprobs)
    how = {"teacher_top_k": 4, "rewards": {}, "objective": "ppo"}
    whole = room.trained(top, **how)["train/teacher_divergence"]
    room.trainer = Trainer(world.one_rank(tmp_path, tokens_max=64))
    assert room.trained(top, **how)["train/teacher_divergence"] == pytest.approx(whole, rel=1e-6)


def test_without_a_coefficient_the_teacher_is_logged_and_changes_nothing(room: Classroom) -> None:
    logprobs = room.taught()
    plain = room.trained(None, num_steps=3, learning_rate=1e-3)
    without = {name: gradient.clone() for name, gradient in room.gradients().items()}
    logged = room.trained(logprobs, num_steps=3, learning_rate=1e-3, teacher_coef=0.0)
    assert all(torch.equal(gradient, without[name]) for name, gradient in room.gradients().items())
    assert "train/teacher_kl" not in plain and logged["train/teacher_kl"] != 0.0
    weighed = room.trained(logprobs, num_steps=3, learning_rate=1e-3)
    # by the weights that the iteration started from, so it is the same whatever the steps do
    assert weighed["train/teacher_kl"] == pytest.approx(logged["train/teacher_kl"], rel=1e-6)


def test_the_logprobs_of_another_batch_are_refused(room: Classroom) -> None:
    logprobs = room.taught()
    room.batch = world.batch(room.trainer.ranks.store, "other", world.rollout_rows(6, 4, seed=5))
    with pytest.raises(StoreError, match="not those of the batch's tokens"):
        room.trained(logprobs)


def test_a_teacher_whose_logprobs_are_not_finite_is_refused(room: Classroom) -> None:
    room.taught()
    with torch.no_grad():
        next(room.trainer._frozen["teacher-0"][1].policy.parameters()).fill_(torch.nan)
    with pytest.raises(UserError, match=r"rl\.teacher: it gives \d+ of \d+ tokens of batch no finite logprob"):
        room.taught()


def test_asking_needs_no_position_and_changes_none(room: Classroom) -> None:
    job = job_of("teacher", json.dumps(asking(room.batch, room.teacher, PLACE)).encode())
    fresh = Trainer(room.trainer.ranks)
    assert world.do(fresh, job)["metrics"] == {"num_tokens": sum(sum(row["loss_mask"]) for row in room.rows)}
    assert fresh.resident is None
    board = Board()
    board.position = "here"
    record = board.submit(job)
    assert board.submit(job) is record, "the same job is done once"
    board.finish(record, STATUS_OK, {})
    assert board.position == "here" and board.submit(job) is record


def test_logprobs_go_into_the_folder_of_their_iteration_only(room: Classroom) -> None:
    for folder, is_right in (
        (PLACE, True),
        ("runs/b/rl/00003/teacher_logprobs", False),
        ("runs/a/rl/00003/gap", False),
    ):
        job = job_of("teacher", json.dumps(asking(room.batch, room.teacher, folder)).encode())
        if is_right:
            check_place(job, "a")
        else:
            with pytest.raises(UserError, match="teacher: teacher_logprobs_folder"):
                check_place(job, "a")


def test_a_batch_of_which_nothing_is_trained_has_a_file_too(room: Classroom) -> None:
    room.batch = world.batch(room.trainer.ranks.store, "empty", [])
    logprobs = room.taught()
    assert read_records(room.trainer.ranks.store, logprobs, TEACHER_FILE, TeacherLogprobs) == []
    assert "train/teacher_kl" not in room.trained(logprobs)
