"""The curriculum: every place of the stream is taken or skipped once, it always ends, and
a resume draws what was drawn."""

from __future__ import annotations

import json
import random
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlpipe.base.seeds import uniform
from rlpipe.base.values import JsonDict
from rlpipe.data.cursor import PromptCursor
from rlpipe.engines.client import Completion, logprobs_of, tokens_of
from rlpipe.engines.pool import GroupRequest, OnGroup
from rlpipe.rewards.score import Score
from rlpipe.stages.sampling import FLOOR, PassRate, chance, take_accepted, updated
from rlpipe.store.artifacts import read_manifest
from rlpipe.store.audit import verify
from tests.declared import stage_settings
from tests.rows import PASS_RATES, PROMPTS, SCORES, grouped
from tests.stages.test_oversampling import PlayedPool, PlayedRewards, World

SETS = st.lists(st.tuples(st.integers(1, 9), st.floats(0.1, 10)), min_size=1, max_size=3)


def coin(seed: int, likely: float) -> Any:
    """Accepts by a hash, as the stage does: a function of the draw and its place."""
    return lambda found, place: zlib.crc32(repr((seed, found, place)).encode()) / 2**32 < likely


def make(sets: list[tuple[int, float]]) -> PromptCursor:
    return PromptCursor([size for size, _ in sets], [weight for _, weight in sets], seed=3)


@given(
    SETS, st.lists(st.integers(0, 12), min_size=1, max_size=6), st.sampled_from([0.0, 0.2, 0.7, 1.0]), st.integers(0, 9)
)
def test_every_place_of_the_stream_is_taken_or_skipped_once(
    sets: list[tuple[int, float]], rounds: list[int], likely: float, seed: int
) -> None:
    cursor, total = make(sets), sum(size for size, _ in sets)
    position = cursor.start()
    for count in rounds:
        before, accept = position, coin(seed, likely)
        taken, position, told = take_accepted(cursor, before, count, accept)
        looked = position["drawn"] - before["drawn"]
        stream, after = cursor.take(before, looked)
        # the stream's own position: nothing is skipped or repeated by what follows
        assert position == after
        assert len(taken) == count
        assert looked <= max(count, total)  # it ends
        assert not Counter(taken) - Counter(stream)  # none comes twice that the stream has once
        assert told["rollout/prompts_skipped"] == looked - count
        accepted = [found for place, found in enumerate(stream, before["drawn"]) if accept(found, place)]
        refused = [found for place, found in enumerate(stream, before["drawn"]) if not accept(found, place)]
        assert taken == accepted + refused[: count - len(accepted)]
        assert told["rollout/prompts_refilled"] == count - len(accepted)
        assert len(accepted) == count or looked == max(count, total)  # a refused one only after a pass over the data


@given(SETS, st.integers(0, 10), st.sampled_from([0.0, 0.3, 1.0]))
def test_a_resume_needs_the_json_position_alone(sets: list[tuple[int, float]], count: int, likely: float) -> None:
    accept = coin(1, likely)
    _, between, _ = take_accepted(make(sets), make(sets).start(), count, accept)
    uninterrupted = make(sets)
    _, same, _ = take_accepted(uninterrupted, uninterrupted.start(), count, accept)
    assert take_accepted(make(sets), json.loads(json.dumps(between)), 5, accept) == take_accepted(
        uninterrupted, same, 5, accept
    )


@given(SETS, st.integers(0, 30))
def test_accepting_all_is_no_curriculum(sets: list[tuple[int, float]], count: int) -> None:
    cursor = make(sets)
    taken, position, told = take_accepted(cursor, cursor.start(), count, lambda found, place: True)
    assert (taken, position) == cursor.take(cursor.start(), count)
    assert set(told.values()) == {0}


def test_the_running_rate_by_hand() -> None:
    rates = updated({}, [("a", 1.0), ("b", 0.25), ("a", 0.5)])
    assert rates == {"a": PassRate("a", 2, 0.75), "b": PassRate("b", 1, 0.25)}
    after = updated(rates, [("a", 0.25)])
    assert after["a"] == PassRate("a", 3, 0.5)
    assert rates["a"] == PassRate("a", 2, 0.75)  # the state before is not changed


@given(st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]), min_size=1, max_size=20))
def test_a_rate_stays_one_and_forgets(shares: list[float]) -> None:
    [known] = updated({}, [("a", share) for share in shares]).values()
    assert known.num_groups == len(shares)
    assert min(shares) <= known.pass_rate <= max(shares)
    [later] = updated({"a": known}, [("a", 1.0)] * 20).values()
    assert later.pass_rate == pytest.approx(1.0, abs=1e-5)


def test_band_and_weight_by_hand() -> None:
    def chances(curriculum: str) -> list[float]:
        known = [None, *(PassRate("a", 1, rate) for rate in (0.0, 0.2, 0.5, 0.8, 0.81, 1.0))]
        return [chance(each, curriculum, 0.2, 0.8) for each in known]

    assert chances("band") == [1, 0, 1, 1, 1, 0, 0]
    assert chances("weight") == pytest.approx([1, FLOOR, 0.64, 1, 0.64, 4 * 0.81 * 0.19, FLOOR])


def test_the_coin_is_fair_and_named() -> None:
    thrown = [uniform(0, "curriculum", 3, f"words/{index}", index) for index in range(4000)]
    assert 0 <= min(thrown) < 0.01
    assert 0.99 < max(thrown) < 1
    assert abs(sum(each < 0.1 for each in thrown) - 400) < 80  # four standard deviations
    assert uniform(0, "curriculum", 3, "words/1", 7) == pytest.approx(0.64637, abs=1e-5)  # the same tomorrow


class EvenPool(PlayedPool):
    """Completions that are a function of prompt and seed, so that a crash changes nothing."""

    async def generate(
        self, groups: list[GroupRequest], on_group: OnGroup | None = None, enough: Any = None
    ) -> list[list[Completion]]:
        return [
            [
                Completion(
                    tokens_of([2 + each.seed % 50_000]), logprobs_of([-1.0]), "stop", [(self.version, 1)], "engine-0"
                )
                for each in group.params
            ]
            for group in groups
        ]


class UnevenRewards(PlayedRewards):
    """Prompt i of 11 passes in about i of 10 rollouts."""

    def score(self, items: list[JsonDict]) -> list[Score]:
        def passes(item: JsonDict) -> bool:
            hard = int(item["prompt"]["prompt_id"].split("/")[1])
            return zlib.crc32(item["completion"].encode()) % 10 < hard

        return [Score(float(passes(item))) for item in items]


async def run(folder: Path, crashes: float, iterations: int, sets: list[str]) -> tuple[World, list[JsonDict]]:
    world = World(folder, EvenPool(random.Random(5)), sets, crashes, rewards=UnevenRewards())
    return world, [await world.iterate(iteration) for iteration in range(iterations)]


def drawn_of(world: World, told: list[JsonDict]) -> list[tuple[list[str], JsonDict]]:
    """(prompt ids, metrics) of every round of every iteration."""
    found = []
    for iteration, each in enumerate(told):
        for index, folder in enumerate(each["rounds"]):
            ids = [
                row["prompt_id"] for row in world.rows(iteration, f"prompts/round-{index}", "prompts.parquet", PROMPTS)
            ]
            found.append((ids, read_manifest(world.session.run.store, folder).metrics))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("curriculum", "seed"), [("band", 0), ("weight", 1)])
async def test_a_run_that_crashes_draws_and_learns_what_an_undisturbed_one_does(
    tmp_path: Path, curriculum: str, seed: int
) -> None:
    sets = [
        f"rl.curriculum={curriculum}",
        f"seed={seed}",
        "rl.rounds_max=3",
        "rl.groups_min=4",
        "rl.filters={nonzero_std = 0.0}",
    ]
    calm, told = await run(tmp_path / "calm", 0.0, 4, sets)
    hurt, again = await run(tmp_path / "hurt", 0.3, 4, sets)
    assert drawn_of(calm, told) == drawn_of(hurt, again)
    oracle: dict[
        str, list[float]
    ] = {}  # every finished group, also those that a filter dropped, by another way than the code
    before: dict[str, float] = {}
    for iteration, each in enumerate(told):
        last = len(each["rounds"]) - 1
        for index in range(last + 1):
            ids = [
                row["prompt_id"] for row in calm.rows(iteration, f"prompts/round-{index}", "prompts.parquet", PROMPTS)
            ]
            metrics = read_manifest(calm.session.run.store, each["rounds"][index]).metrics
            if curriculum == "band" and not metrics["rollout/prompts_refilled"]:
                assert all(0.1 <= before.get(name, 0.5) <= 0.9 for name in ids)
            for group in grouped(calm.rows(iteration, f"scores/round-{index}", "scores.parquet", SCORES)):
                share = sum(row["reward"] >= 1 for row in group) / len(group)
                oracle.setdefault(group[0]["prompt_id"], []).append(share)
        rates = calm.rows(iteration, f"batch/round-{last}", "pass_rates.parquet", PASS_RATES)
        assert rates == hurt.rows(iteration, f"batch/round-{last}", "pass_rates.parquet", PASS_RATES)
        assert {row["prompt_id"]: row["num_groups"] for row in rates} == {
            name: len(shares) for name, shares in oracle.items()
        }
        before = {row["prompt_id"]: row["pass_rate"] for row in rates}
        assert each["rollout/prompts_known"] == len(before)
        assert before == pytest.approx({name: _moving(shares) for name, shares in oracle.items()})
    assert [
        fault
        for fault in verify(calm.session.run)[1]
        if not fault.endswith("names no policy") and "input policy" not in fault
    ] == []  # the policy is played
    manifest = calm.session.run.committed("rl", 2, "prompts/round-0")[1]
    assert set(manifest.inputs) == {"before", "carried", "pass_rates"}


def _moving(shares: list[float]) -> float:
    """Weights 1/2, 1/4, ... from the newest back; the oldest has what is left."""
    weights = [0.5 ** (len(shares) - place) for place in range(len(shares))]
    weights[0] = 1 - sum(weights[1:])
    return sum(weight * share for weight, share in zip(weights, shares, strict=True))


async def test_the_threshold_is_a_setting_of_the_rates_and_nothing_changes_without_a_curriculum(tmp_path: Path) -> None:
    world, told = await run(tmp_path, 0.0, 2, ["rl.filters={}"])
    run_ = world.session.run
    assert set(run_.committed("rl", 1, "prompts/round-0")[1].inputs) == {"before", "carried"}
    assert [record.plain_name for record in run_.committed("rl", 1, "batch/round-0")[1].files] == ["batch.parquet"]
    assert "rollout/prompts_skipped" not in told[1]
    high = "evaluation.pass_threshold=0.5"
    for stage, differs in (("batch/round-0", True), ("prompts/round-0", False), ("scores/round-0", False)):
        with_one = [stage_settings(world.config("rl.curriculum=band", *more), "rl", stage) for more in ([], [high])]
        assert (with_one[0] != with_one[1]) == differs
        assert stage_settings(world.config(), "rl", stage) == stage_settings(world.config(high), "rl", stage)
