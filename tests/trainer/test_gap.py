"""The gap between engine and trainer at each token: what is stored of it, against the model's own
forward pass; and that it is stored once, and whole."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM

from rlpipe.base.errors import UserError
from rlpipe.base.values import JsonDict
from rlpipe.store.local_copy import materialise
from rlpipe.trainer.jobs import check_place, job_of
from rlpipe.trainer.trainer import Trainer
from tests import trainer_world as world
from tests.rows import GAPS, from_parquet

UNRECORDED = float("inf")
SETTINGS: dict[str, JsonDict] = {
    "an only step": {"num_steps": 1},
    "several steps": {"num_steps": 3, "learning_rate": 1e-2},
    "several steps, the engine's logprobs": {
        "num_steps": 3,
        "learning_rate": 1e-2,
        "proximal": "engine",
        "importance": "none",
    },
    "an only step, dppo, with a KL in the reward": {
        "num_steps": 1,
        "objective": "dppo",
        "importance": "none",
        "kl": "reward",
    },
}


@pytest.fixture
def trainer(tmp_path: Path) -> Trainer:
    trainer = Trainer(world.one_rank(tmp_path, tokens_max=256))
    world.run(trainer, "load", world.load_new())
    return trainer


def some_rows(recorded: bool = False) -> list[JsonDict]:
    """Six groups of four.

    One row has no scored token; two have tokens of which nobody recorded the
    logprob, unless all are `recorded`.
    """
    rows = world.rollout_rows(6, 4)
    rows[5] |= {"loss_mask": [0] * len(rows[5]["loss_mask"])}
    for row in () if recorded else (rows[2], rows[9]):
        row["loss_mask"][0], row["rollout_logprobs"][0] = 1, UNRECORDED
    return rows


def gaps_of(trainer: Trainer, folder: str = "runs/a/rl/00000/gap") -> list[JsonDict]:
    """What a save makes of the gaps, as any tool reads it."""
    saved = world.run(trainer, "save", world.save("any", None, None, folder))
    return read(trainer, folder, saved["gap"])


def read(trainer: Trainer, folder: str, records: list[JsonDict]) -> list[JsonDict]:
    (record,) = records
    return from_parquet(trainer.ranks.store.read(f"{folder}/{record['name']}"), GAPS)


def expected_of(lm: Any, row: JsonDict, temperature: float) -> np.ndarray:
    """The gap of each scored token of a row, by one forward pass
    of the model itself, in float64."""
    tokens = torch.tensor([row["prompt_tokens"] + row["completion_tokens"]])
    with torch.no_grad():
        logprobs = torch.log_softmax(lm(tokens).logits[0, :-1].double() / temperature, dim=-1)
    of_token = logprobs.gather(1, tokens[0, 1:, None])[:, 0].numpy()[len(row["prompt_tokens"]) - 1 :]
    rollout = np.where(np.isinf(row["rollout_logprobs"]), np.nan, np.float32(row["rollout_logprobs"]).astype(float))
    return (of_token - rollout)[np.flatnonzero(row["loss_mask"])]


def plain_model(trainer: Trainer, tmp_path: Path) -> Any:
    """The weights that the iteration starts from, in transformers, float64."""
    saved = world.run(trainer, "save", world.save("new", "start", None))
    tmp_path.joinpath("plain").mkdir()
    folder = materialise(
        trainer.ranks.store, world.saved(trainer.ranks.store, "start", saved["policy"]), tmp_path / "plain"
    )
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).double().eval()


@pytest.mark.parametrize("options", SETTINGS)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_gaps_are_those_of_the_models_own_forward_pass(
    trainer: Trainer, tmp_path: Path, options: str, temperature: float
) -> None:
    by_engine = SETTINGS[options].get("proximal") == "engine"
    lm, rows = plain_model(trainer, tmp_path), some_rows(recorded=by_engine)
    data = world.batch(trainer.ranks.store, "batch", rows)
    settings = SETTINGS[options] | {"temperature": temperature}
    if settings.get("kl"):
        settings |= {"kl_coef": 0.1, "reference": reference_of(trainer)}
        world.run(trainer, "load", world.load_new())
    metrics = world.run(trainer, "train", world.train("new", "one", "rl", data, settings))["metrics"]
    gaps = gaps_of(trainer)
    assert [(row["group_index"], row["rollout_index"]) for row in gaps] == [(row // 4, row % 4) for row in range(24)]
    assert gaps[5]["gap"] == []
    assert by_engine or (np.isnan(gaps[2]["gap"][0]) and np.isnan(gaps[9]["gap"][0]))
    at_start = slice(None)
    if by_engine:  # without a pass the first step alone is taken with the weights of the start
        at_start = slice(0, 2 * 4)
        assert all(np.isnan(row["gap"]).all() for row in gaps[2 * 4 :])
    for row, stored in [*zip(rows, gaps, strict=True)][at_start]:
        # float16 keeps 11 bits; the forward pass is in float32
        np.testing.assert_allclose(
            stored["gap"], expected_of(lm, row, temperature), rtol=2**-11, atol=2e-6, strict=False
        )
    known = np.abs([gap for row in gaps for gap in row["gap"] if not np.isnan(gap)])
    gaps = gaps[at_start]
    # of several the metric is the mean of the steps' means
    if settings["num_steps"] == 1 or by_engine:
        share = len(known) / sum(len(row["gap"]) for row in gaps)
        assert metrics["train/mismatch_abs_mean"] == pytest.approx(share * known.mean(), rel=1e-3)


def reference_of(trainer: Trainer) -> JsonDict:
    """Another policy than the one in training."""
    world.run(trainer, "load", world.load_new("other", seed=9))
    saved = world.run(trainer, "save", world.save("other", "reference", None))
    return world.saved(trainer.ranks.store, "reference", saved["policy"]).as_json()


@pytest.mark.parametrize("rows", [[], world.rollout_rows(2, 2)])
@pytest.mark.parametrize("num_steps", [1, 2])
def test_a_batch_of_which_nothing_is_trained_has_a_file_too(
    trainer: Trainer, rows: list[JsonDict], num_steps: int
) -> None:
    masked = [row | {"loss_mask": [0] * len(row["loss_mask"])} for row in rows]
    data = world.batch(trainer.ranks.store, "batch", masked)
    world.run(trainer, "train", world.train("new", "one", "rl", data, {"num_steps": num_steps}))
    assert [row["gap"] for row in gaps_of(trainer)] == [[] for _ in rows]


def test_an_iteration_begins_without_the_gaps_of_the_one_before(trainer: Trainer) -> None:
    for number in (3, 1, 2):
        data = world.batch(trainer.ranks.store, f"batch-{number}", world.rollout_rows(number, 2, seed=number))
        world.run(trainer, "train", world.train("any", "any", "rl", data))
        assert len(gaps_of(trainer, f"runs/a/rl/{number:05d}/gap")) == 2 * number
        assert len(gaps_of(trainer, f"runs/a/rl/{number:05d}/again")) == 2 * number, "a save changes nothing"
    state = world.saved(trainer.ranks.store, "s", world.run(trainer, "save", world.save("any", None, "s"))["state"])
    world.run(trainer, "load", world.load_ref("loaded", "state", state))
    with pytest.raises(AssertionError, match="loaded, not trained"):
        gaps_of(trainer)


def test_a_file_is_two_bytes_a_token_and_deterministic(trainer: Trainer) -> None:
    rows = world.rollout_rows(8, 8, longest=200)
    data = world.batch(trainer.ranks.store, "batch", rows)
    digests = []
    for again in range(2):
        world.run(trainer, "load", world.load_new())
        world.run(trainer, "train", world.train("new", "one", "rl", data, {"completion_tokens_max": 200}))
        saved = world.run(trainer, "save", world.save("one", None, None, f"gap-{again}"))["gap"]
        digests.append(world.digests(saved))
        assert saved[0]["bytes"] < 2 * sum(sum(row["loss_mask"]) for row in rows) + 3000
    assert digests[0] == digests[1]


def test_what_is_beside_a_policy_leaves_the_disk_when_the_store_has_it(trainer: Trainer) -> None:
    data = world.batch(trainer.ranks.store, "batch", world.rollout_rows(2, 2))
    world.run(trainer, "train", world.train("new", "one", "rl", data))
    saved = world.run(trainer, "save", world.save("one", "p", "s", "g"))
    left = {path.name for path in trainer.ranks.published.rglob("*") if path.is_file()}
    assert "model.safetensors" in left and not left & {"gap.parquet", "state.json"}
    assert pq.read_metadata(io.BytesIO(trainer.ranks.store.read(f"g/{saved['gap'][0]['name']}"))).num_rows == 4


def test_gaps_go_into_the_folder_of_their_iteration_only() -> None:
    for folder, is_right in (
        ("runs/a/rl/00003/gap", True),
        ("runs/b/rl/00003/gap", False),
        ("runs/a/rl/00003/policy", False),
    ):
        job = job_of("save", json.dumps(world.save("one", None, None, folder)).encode())
        if is_right:
            check_place(job, "a")
        else:
            with pytest.raises(UserError, match="gap_folder"):
                check_place(job, "a")
