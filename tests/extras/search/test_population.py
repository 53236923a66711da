"""Population-based training: who is forked, from whom, with which settings."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from rlpipe.base.errors import UserError
from rlpipe.extras.search.course import Course
from rlpipe.extras.search.halving import Search
from rlpipe.extras.search.population import Population, disturbed
from rlpipe.store.forks import forked_from
from rlpipe.store.opening import open_existing
from tests.search_world import AT, METRIC, play, searched_run

RATES = ["1e-4", "2e-4", "4e-4", "8e-4"]
POPULATION = Population("s", "a", AT, {"rl.learning_rate": RATES}, [1, 2, 4], 0.5, METRIC)


def test_those_that_lost_become_forks_of_a_winner_with_disturbed_settings(tmp_path: Path) -> None:
    parent = searched_run(tmp_path)
    course = Course.begun(POPULATION, parent)
    play(course)
    first, second, last = course.decided
    assert first.kept == ["s-2", "s-1"] and set(first.forks) == {"s-0-r1", "s-3-r1"}
    assert set(second.scores) == {"s-2", "s-1", "s-0-r1", "s-3-r1"} and len(second.forks) == 2
    assert set(last.scores) == {*second.kept, *second.forks} and last.forks == {} and len(last.kept) == 1
    tried = POPULATION.tried(course.decided)
    for number, decision in enumerate([first, second]):
        for name, made in decision.forks.items():
            run = open_existing(parent.store, name)
            assert made.run in decision.kept and forked_from(run) == f"{made.run} at {AT + POPULATION.rungs[number]}"
            before = float(tried[made.run].settings[0].partition("=")[2])
            assert run.config.rl.learning_rate in (pytest.approx(0.8 * before), pytest.approx(1.25 * before))
            assert name.endswith(f"-r{number + 1}") and not name.endswith(f"-r{number}-r{number + 1}")
    winner, lineage = course.winner()
    steps = lineage.split("; ")
    assert steps[0].startswith(f"{winner} (rl.learning_rate=") and steps[-1].endswith("a fork of a at 1")
    assert course.report()[-1] == f"The winner: {lineage}"


def test_who_copies_whom_follows_from_the_seed_of_the_run(tmp_path: Path) -> None:
    kept, lost = ["s-2", "s-1"], ["s-0", "s-3"]
    many = [POPULATION.forks(searched_run(tmp_path / str(seed), f"seed={seed}"), [], kept, lost) for seed in range(6)]
    again = POPULATION.forks(searched_run(tmp_path / "again", "seed=5"), [], kept, lost)
    assert again == many[5]
    assert len({str(forks) for forks in many}) > 1
    assert {made.run for forks in many for made in forks.values()} == set(kept)


def test_settings_stay_within_their_bounds_and_only_what_a_fork_may_change_is_changed(tmp_path: Path) -> None:
    vary = {
        "rl.num_steps": ["1", "2"],
        "rl.clip_high": ["0.9", "0.99"],
        "rl.estimator": ["grpo", "rloo"],
        "rl.temperature": ["1", "1.2"],
    }
    search = Population("s", "a", AT, vary, [1, 2], 0.5, METRIC)
    parent = searched_run(tmp_path)
    search.check(parent)
    forks = search.forks(
        parent, [], ["s-00", "s-13"], [name for name in search.candidates if name not in ("s-00", "s-13")]
    )
    assert len(forks) == 14
    chosen = [dict(setting.split("=") for setting in made.settings) for made in forks.values()]
    assert {one["rl.num_steps"] for one in chosen} <= {"1", "2", "3"} and len(
        {one["rl.num_steps"] for one in chosen}
    ) > 1
    assert {one["rl.estimator"] for one in chosen} == {"grpo", "rloo"}
    assert {one["rl.temperature"] for one in chosen} <= {"0.8", "1.25", "0.96", "1.5"}
    for name, made in forks.items():
        search.config(parent, name, made, 2)  # each is valid


@pytest.mark.parametrize(
    ("value", "low", "high"),
    [
        ("2e-4", ["0.00016", "0.00025"], ["0.00025", "0.00016"]),
        ("4", ["3.2", "3", "5", "5"], ["5", "5", "3.2", "3"]),
        ("1", ["0.8", "0", "1.25", "2"], ["1.25", "2", "0.8", "0"]),
        ("0", ["0", "0"], ["0", "0"]),
        ("true", ["true"], ["false"]),
        ("nan", ["true"], ["false"]),
    ],
)
def test_numbers_are_scaled_and_other_values_drawn(value: str, low: list[str], high: list[str]) -> None:
    assert [*disturbed(value, ["true", "false"], 0.0)] == low
    assert [*disturbed(value, ["true", "false"], 0.99)] == high


def test_a_search_is_not_continued_by_the_other_strategy(tmp_path: Path) -> None:
    parent = searched_run(tmp_path)
    POPULATION.begin(parent.store)
    halving = Search("s", "a", AT, {"rl.learning_rate": RATES}, [1, 2, 4], 0.5, METRIC)
    with pytest.raises(UserError, match="was begun otherwise"):
        halving.begin(parent.store)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rungs": [5]}, r"--rungs \[5\]: --explore forks winners after all but the last"),
        ({"name": "x" * 78}, "at most 80"),
    ],
)
def test_what_could_not_be_forked_is_refused_before_anything_starts(
    change: dict[str, object], message: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=message):
        replace(POPULATION, **change).check(searched_run(tmp_path))  # type: ignore[arg-type]
