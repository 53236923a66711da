"""What becomes of rollouts that were cut short: loss masks from spans,
expiry, and counts that add up."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rlpipe.base.errors import StoreError
from rlpipe.config.source import read_config
from rlpipe.engines.client import NOTHING_YET, Completion, logprobs_of, tokens_of
from rlpipe.loop.sampling_round import SamplingRound
from rlpipe.records.columns import from_table, read_table, to_parquet, to_table
from rlpipe.records.kinds import Span
from rlpipe.records.prompt import Prompt
from rlpipe.records.rollout import CarriedRollout, Rollout, is_finished
from rlpipe.stages.filtering import carried_rollouts
from rlpipe.stages.iteration import account
from rlpipe.stages.rollouts import loss_mask, prior_of
from rlpipe.store.backend import open_store
from tests.batches import read_rl_batch
from tests.paths import ROOT
from tests.rows import CARRIED, from_parquet
from tests.trainer_world import artifact

PROMPT = Prompt(
    "words/3", "words", [{"role": "user", "content": "hi"}], "x", prompt_tokens=np.array([5, 6], dtype=np.int32)
)


def rollout(index: int, finish_reason: str, *spans: tuple[int, int]) -> Rollout:
    """A rollout of group 0 whose tokens were sampled by the versions of `spans`."""
    count = sum(tokens for _, tokens in spans)
    return Rollout(
        prompt_id="words/3", group_index=0, rollout_index=index, prompt="hi", prompt_tokens=PROMPT.prompt_tokens,
        completion="",
        completion_tokens=np.arange(10, 10 + count, dtype=np.int32), loss_mask=loss_mask(list(spans), 9, True),
        rollout_logprobs=np.full(count, -0.5, dtype=np.float32), weight_version=spans[-1][0] if spans else 9,
        weight_versions=tuple(Span(*span) for span in spans), finish_reason=finish_reason, seed=index,
        engine="engine-0" if spans else "",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("spans", "train_stale_tokens", "mask"),
    [
        ([(4, 3)], False, [1, 1, 1]),
        ([(3, 2), (4, 1)], False, [0, 0, 1]),
        ([(3, 2), (4, 1)], True, [1, 1, 1]),
        ([(2, 1), (3, 1)], False, [0, 0]),
        ([], False, []),
    ],
)
def test_older_tokens_carry_loss_only_where_the_config_says_so(
    spans: list[tuple[int, int]], train_stale_tokens: bool, mask: list[int]
) -> None:
    assert loss_mask(spans, 4, train_stale_tokens).tolist() == mask
    with pytest.raises(AssertionError):
        loss_mask([(5, 1)], 4, train_stale_tokens)


def test_masked_tokens_are_context_for_the_trainer_and_nothing_else(tmp_path: Path) -> None:
    logprobs = np.array([-1.0, -2.0, -3.0, -4.0, -5.0], dtype=np.float32)
    mask = loss_mask([(3, 2), (4, 3)], 4, False)
    row = replace(
        rollout(0, "stop", (3, 2), (4, 3)), loss_mask=mask, rollout_logprobs=logprobs, reward=1.0, advantage=0.5
    )
    store = open_store(f"file://{tmp_path}/store")
    ref = artifact(store, "batch", {"batch.parquet": to_parquet(to_table([row], Rollout))})
    ((sequence,),) = read_rl_batch(store, ref, 4).steps
    assert sequence.tokens.tolist() == [5, 6, 10, 11, 12, 13, 14]
    assert sequence.scored.tolist() == [4, 5, 6]
    assert sequence.rollout_logprobs.tolist() == [-3.0, -4.0, -5.0]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"reward": None}, "its column reward has nulls"),
        ({"reward": float("nan")}, "row of group 0"),
        ({"rollout_logprobs": np.zeros(2, np.float32)}, "row of group 0"),
        ({}, "is no file of BatchRow"),
    ],
)
def test_a_batch_that_makes_no_sense_is_refused_by_its_file(
    wrong: dict[str, object], said: str, tmp_path: Path
) -> None:
    row = replace(rollout(0, "stop", (9, 3)), **({"reward": 1.0, "advantage": 0.5} | wrong))  # pyright: ignore[reportArgumentType]
    table = to_table([row], Rollout)
    store = open_store(f"file://{tmp_path}/store")
    ref = artifact(store, "batch", {"batch.parquet": to_parquet(table if wrong else table.drop_columns(["loss_mask"]))})
    with pytest.raises(StoreError, match=said):
        read_rl_batch(store, ref, 4)


def test_a_carried_group_survives_the_store_and_goes_on_where_it_was() -> None:
    group = [rollout(0, "stop", (8, 2)), rollout(1, "abort", (8, 3), (9, 2)), rollout(2, "abort")]
    data = to_parquet(to_table(carried_rollouts(group, PROMPT, 10, staleness_max=2), CarriedRollout))
    assert len(from_parquet(data, CARRIED)) == 3
    rows = from_table(read_table(data), CarriedRollout)
    assert [row.as_prompt for row in rows] == [PROMPT] * 3
    assert [row.prompt_tokens.tolist() for row in rows] == [[5, 6]] * 3
    assert [prior_of(row, 16) for row in rows] == [
        Completion(tokens_of([10, 11]), logprobs_of([-0.5] * 2), "stop", [(8, 2)], "engine-0"),
        Completion(tokens_of([10, 11, 12, 13, 14]), logprobs_of([-0.5] * 5), "abort", [(8, 3), (9, 2)], "engine-0"),
        NOTHING_YET,
    ]
    # a fork that allows fewer tokens has nothing left to sample
    assert prior_of(rows[1], 5).finished


def test_a_rollout_whose_oldest_token_is_too_old_starts_again_and_is_counted() -> None:
    group = [
        rollout(0, "stop", (8, 2)),
        rollout(1, "abort", (8, 3), (9, 2)),
        rollout(2, "abort", (9, 4)),
        rollout(3, "abort"),
    ]
    carried = carried_rollouts(group, PROMPT, 10, staleness_max=1)
    assert [row.num_tokens_expired for row in carried] == [2, 5, 0, 0]
    assert [prior_of(row, 16) for row in (carried[0], carried[1], carried[3])] == [NOTHING_YET] * 3
    told = account([group], [], [], carried, 9, 9)
    assert told == {
        "rollout/num_sampled": 3, "rollout/num_trained": 0, "rollout/num_filtered": 0,
        "rollout/num_left_out": 0, "rollout/num_carried": 1,
        "rollout/num_expired": 2, "rollout/num_unsampled": 1, "rollout/num_continued": 2,
        "rollout/num_tokens_carried": 4,
        "rollout/num_tokens_expired": 7, "rollout/num_tokens_stale": 0,
    }  # fmt: skip
    assert [row.continues_in(9) for row in group] == [True, True, False, False]
    assert [row.num_tokens_expired for row in carried_rollouts(group, PROMPT, 10, staleness_max=0)] == [2, 5, 4, 0]


def test_a_rollout_that_is_in_no_place_or_in_two_is_an_error() -> None:
    whole = [rollout(0, "stop", (9, 2)), rollout(1, "length", (8, 1), (9, 2))]
    assert is_finished(whole)
    assert account([whole], whole, [], [], 9, 9)["rollout/num_tokens_stale"] == 1
    with pytest.raises(AssertionError, match="lost or counted twice"):
        account([whole], whole[:1], [], [], 9, 9)
    with pytest.raises(AssertionError, match="lost or counted twice"):
        account([whole], whole, whole, [], 9, 9)
    cut = [rollout(0, "stop", (9, 2)), rollout(1, "abort")]
    with pytest.raises(AssertionError):
        account([cut], [], [], carried_rollouts(cut[:1], PROMPT, 10, 1), 9, 9)


async def test_survivors_count_once_and_a_shard_that_starts_again_counts_from_nothing() -> None:
    survivors = SamplingRound((0, 0), lambda prompts, rollouts, known: rollouts, lambda group: True, 3)

    async def add(group_index: int) -> None:
        await survivors.judge(PROMPT, [replace(rollout(0, "stop", (9, 1)), group_index=group_index)])

    one, other = survivors.begin(range(4)), survivors.begin(range(4, 8))
    for group_index in (0, 0, 4, 0):
        await add(group_index)
    assert not one.is_set()
    await add(5)
    assert one.is_set() and other.is_set()
    again = survivors.begin(range(4, 8))
    assert other.is_set() and not again.is_set()
    await add(4)
    assert not again.is_set()
    await add(1)
    assert again.is_set() and survivors.begin([]).is_set()


@pytest.mark.parametrize(
    ("num_prompts", "oversampling", "groups"), [(10, 1.1, 11), (64, 1, 64), (7, 1.5, 11), (1, 16, 16)]
)
def test_the_groups_of_a_round(num_prompts: int, oversampling: float, groups: int) -> None:
    presets = ROOT / "flows" / "presets"
    config = read_config("tiny", [f"rl.num_prompts={num_prompts}", f"rl.oversampling={oversampling}"], presets)
    assert config.rl.round_groups == groups
