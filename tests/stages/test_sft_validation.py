"""SFT validation: who is kept, the loss by another program, which segment is chosen,
and that nothing else changes."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from rlpipe.base.errors import UserError
from rlpipe.base.hashing import canonical_json
from rlpipe.base.manifests import Manifest, StageResult
from rlpipe.base.references import ArtifactRef
from rlpipe.config.pipeline import PipelineConfig
from rlpipe.config.source import override_config, read_config
from rlpipe.config.training import SftConfig
from rlpipe.data.chat import ChatTokenizer
from rlpipe.data.new_tokenizer import build_tokenizer
from rlpipe.data.sources import in_part, split_point, split_validation
from rlpipe.loop.session import Session
from rlpipe.records.prompt import Talk
from rlpipe.report.curves import evaluations
from rlpipe.report.show import runs_report
from rlpipe.stages.sft import (
    best_segment,
    out_of_patience,
    prepare_sft_data,
    previous_policy,
    select_segment,
    validation_losses,
)
from rlpipe.store.artifacts import commit
from rlpipe.store.local_copy import materialise
from rlpipe.store.opening import create_or_continue, fork
from rlpipe.store.progress import Progress
from rlpipe.store.run import Run
from rlpipe.trainer.trainer import Trainer
from tests import trainer_world as world
from tests.paths import PRESETS
from tests.rows import CONVERSATIONS, read_rows, to_parquet

TEXTS = st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=40)


def conversation(text: str) -> Talk:
    return Talk("rows.jsonl:1", [{"role": "user", "content": text}, {"role": "assistant", "content": text[::-1]}], [])


@given(TEXTS, TEXTS, st.floats(0.05, 0.95), st.randoms())
def test_a_prompt_is_on_one_side_whatever_the_order(
    one: list[str], other: list[str], fraction: float, order: random.Random
) -> None:
    sets = {"one": [conversation(text) for text in one], "other": [conversation(text) for text in other]}
    sides = [{split_point(talk.messages, "validation/") < fraction for talk in rows} for rows in sets.values()]
    if True not in set().union(*sides) or any(
        False not in each for each in sides
    ):  # nothing to validate with, or to train on
        with pytest.raises(UserError, match=r"sft\.validation_fraction"):
            split_validation(sets, fraction)
        return
    training, validation = split_validation(sets, fraction)
    kept = {talk.messages[0]["content"] for talk in validation}
    assert validation and all(training)
    assert not kept & {talk.messages[0]["content"] for rows in training for talk in rows}
    shuffled = {name: order.sample(rows, len(rows)) for name, rows in sets.items()}
    again = split_validation(shuffled, fraction)
    assert {talk.messages[0]["content"] for talk in again[1]} == kept
    assert [len(rows) for rows in again[0]] == [len(rows) for rows in training]


def test_the_split_is_independent_of_the_held_out_part() -> None:
    """With the hash of `part` itself a train part would have nothing below the fraction."""
    rows = [conversation(f"row {index}") for index in range(4000)]
    train = [talk for talk in rows if in_part(talk.messages, "train", 0.3)]
    [training], validation = split_validation({"a": train}, 0.1)
    assert 0.07 < len(validation) / len(train) < 0.13
    assert len(training) + len(validation) == len(train)
    assert split_validation({"a": rows}, 0.0) == ([rows], [])


def config(tmp_path: Path, *sets: str) -> PipelineConfig:
    small = ["data.short_words.rows_max=200", "data.all_words.rows_max=60",
             "data.words.rows_max=50", "sft.num_steps=12",
             "sft.segment_steps=2", "sft.decay_steps=12", "sft.warmup_steps=2", "sft.batch_size=16"]  # fmt: skip
    return read_config("tiny", ["run=a", f"store=file://{tmp_path}/store", "tracking.uri=", *small, *sets], PRESETS)


async def prepared(tmp_path: Path, *sets: str) -> tuple[list[Any], list[Any], Manifest]:
    session = Session(create_or_continue(config(tmp_path, *sets)), tmp_path / "work")
    build_tokenizer(["Spell this word backward"], tmp_path / "tokenizer")
    session.data.tokenizer = ChatTokenizer.from_folder(tmp_path / "tokenizer")
    done = await prepare_sft_data(session, tokenizer=ArtifactRef("t", "0" * 64))
    manifest = session.run.committed("data", 0, "data")[1]
    names = [record.plain_name for record in manifest.files]
    training = read_rows(session.run.store, done.ref, "conversations.parquet", CONVERSATIONS)
    present = "validation.parquet" in names
    return (
        training,
        read_rows(session.run.store, done.ref, "validation.parquet", CONVERSATIONS) if present else [],
        manifest,
    )


async def test_the_data_holds_both_parts_and_without_a_fraction_what_it_always_held(tmp_path: Path) -> None:
    plain, none, manifest = await prepared(tmp_path / "plain")
    assert not none
    assert not [name for name in manifest.settings if name.startswith("sft.")]
    training, validation, told = await prepared(tmp_path / "split", "sft.validation_fraction=0.2")
    assert told.settings["sft.validation_fraction"] == 0.2
    assert told.metrics["data/conversations_validation"] == len(validation) > 20
    # rows are drawn by the mixture, so the training part is no longer than what 12 x 16 asks for
    assert len(plain) == 192 and 150 < len(training) <= 192
    tokens = {tuple(row["tokens"]) for row in training}
    assert not tokens & {tuple(row["tokens"]) for row in validation}


@pytest.fixture
def trainer(tmp_path: Path) -> Trainer:
    trainer = Trainer(world.one_rank(tmp_path, tokens_max=128))
    world.run(trainer, "load", world.load_new())
    return trainer


def test_the_loss_is_transformers_own_and_changes_no_weight(trainer: Trainer, tmp_path: Path) -> None:
    store = trainer.ranks.store
    plain = world.conversations(store, "plain", 24)
    rows = read_rows(store, plain, "conversations.parquet", CONVERSATIONS)
    kept = read_rows(store, world.conversations(store, "kept", 21, seed=5), "conversations.parquet", CONVERSATIONS)
    files = {
        "conversations.parquet": to_parquet(rows, CONVERSATIONS),
        "validation.parquet": to_parquet(kept, CONVERSATIONS),
    }
    both = world.artifact(store, "both", files)
    without = world.run(trainer, "train", world.train("a", "b", "sft", plain))["metrics"]
    expected = world.digests(world.run(trainer, "save", world.save("b", "plain-policy", None))["policy"])
    world.run(trainer, "load", world.load_new())
    metrics = world.run(trainer, "train", world.train("a", "b", "sft", both))["metrics"]
    saved = world.run(trainer, "save", world.save("b", "policy", None))["policy"]
    assert world.digests(saved) == expected
    assert metrics["losses"] == without["losses"]
    assert set(metrics) - set(without) == {"train/validation_loss"}
    folder = materialise(store, world.saved(store, "policy", saved), tmp_path / "local")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    total, count = 0.0, 0
    for row in kept:
        labels = torch.tensor(
            [[token if bit else -100 for token, bit in zip(row["tokens"], row["loss_mask"], strict=True)]]
        )
        with torch.no_grad():
            loss = model(input_ids=torch.tensor([row["tokens"]]), labels=labels).loss
        total, count = total + loss.item() * sum(row["loss_mask"]), count + sum(row["loss_mask"])
    assert metrics["train/validation_loss"] == pytest.approx(total / count, abs=1e-5)
    again = world.run(trainer, "train", world.train("b", "c", "sft", both, {"first_step": 3}))["metrics"]
    assert again["train/validation_loss"] != metrics["train/validation_loss"]


def commit_segments(run: Run, losses: list[float]) -> None:
    for segment, loss in enumerate(losses):
        folder = run.folder("sft", segment, "policy")
        told = Manifest(
            "a",
            "sft",
            segment,
            "policy",
            {},
            "0",
            {},
            [],
            {"train/validation_loss": loss},
            0,
            "x",
            "t",
            "2026-03-04T05:06:07.000+00:00",
        )
        commit(run.store, folder, told)


VALIDATED = ("sft.validation_fraction=0.2", "sft.patience=2")


async def selected(run: Run, tmp_path: Path) -> StageResult:
    done = Progress(run).num_done("sft")
    session = Session(run, tmp_path / "work")
    return await select_segment(session, last=previous_policy(run, done), num_segments=done)


async def test_the_best_segment_is_what_rl_starts_from_and_the_choice_is_made_once(tmp_path: Path) -> None:
    run = create_or_continue(config(tmp_path, *VALIDATED))
    commit_segments(run, [3.0, 2.0])
    assert (Progress(run).sft_complete, evaluations(run, 0)) == (False, [])
    with pytest.raises(AssertionError, match="SFT is not over"):
        await selected(run, tmp_path)
    commit_segments(run, [3.0, 2.0, 2.0, 2.5])  # out of patience, and the process dies right here
    assert out_of_patience(run.config.sft, validation_losses(run, Progress(run).num_done("sft")))
    first = await selected(run, tmp_path)
    again = await selected(run, tmp_path)
    assert (again.cached, again.ref) == (True, first.ref)
    assert first.metrics == {"segment": 1, "num_segments": 4, "losses": [3.0, 2.0, 2.0, 2.5]}
    assert first.ref.folder == "runs/a/sft/selection"
    assert Progress(run).sft_complete
    assert run.policy(0) == run.committed("sft", 1, "policy")
    assert run.policy_place(0) == ("sft", 1)
    assert "SFT segments 4/4" in runs_report(run.store).lines()[0]
    run.store.create(run.iteration_key(0), canonical_json({"artifacts": {}, "metrics": {}}))
    child = fork(run, 0, override_config(run.config, ["run=c", "rl.clip_high=0.4"]))
    assert Progress(child).sft_complete
    assert child.policy(0) == run.policy(0)


def test_without_validation_the_last_segment_is_the_result(tmp_path: Path) -> None:
    run = create_or_continue(config(tmp_path))
    commit_segments(run, [1.0] * 5)
    assert not Progress(run).sft_complete
    commit_segments(run, [1.0] * 6)
    assert Progress(run).sft_complete
    assert run.sft_result() == (5, 6)
    assert validation_losses(run, 6) == []
    assert not run.store.exists("runs/a/sft/selection/manifest.json")


@given(st.lists(st.sampled_from([1.0, 2.0, 3.0]), max_size=12), st.integers(0, 4))
def test_patience_ends_sft_at_one_place_wherever_it_is_resumed(losses: list[float], patience: int) -> None:
    sft = SftConfig(num_steps=10, validation_fraction=0.1, patience=patience)
    ended = [count for count in range(len(losses) + 1) if out_of_patience(sft, losses[:count])]
    assert bool(ended) <= bool(patience)
    if ended:
        best = best_segment(losses[: ended[0]])
        assert ended[0] == best + 1 + patience
        assert min(losses[: best + 1]) == losses[best] and all(loss > losses[best] for loss in losses[:best])
        assert all(loss >= losses[best] for loss in losses[best : ended[0]])


def test_patience_without_a_validation_loss_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"sft\.patience=2: waits for a better validation loss; set sft\.validation_fraction"
    ):
        PipelineConfig(sft=SftConfig(num_steps=10, patience=2))
