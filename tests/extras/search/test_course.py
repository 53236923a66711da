"""A search in progress: killed anywhere, in any order, with a budget for all together."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlpipe.base.errors import StepRefused, UserError
from rlpipe.config.source import override_config
from rlpipe.extras.search.course import Course
from rlpipe.extras.search.halving import Decision, Search
from rlpipe.extras.search.population import Population
from rlpipe.store.limits import TOKENS as SPENT
from rlpipe.store.limits import spent_before
from rlpipe.store.opening import open_existing
from rlpipe.store.progress import Progress
from rlpipe.store.run import Run
from rlpipe.store.run_record import last_started, record_start, run_names
from tests.search_world import AT, METRIC, TOKENS, play, searched_run, train

RATES = ["1e-4", "2e-4", "4e-4", "8e-4"]
SEARCH = Search("s", "a", AT, {"rl.learning_rate": RATES}, [1, 2, 4], 0.5, METRIC)
POPULATION = Population("s", "a", AT, {"rl.learning_rate": RATES}, [1, 2, 4], 0.5, METRIC)
BOTH = pytest.mark.parametrize("search", [SEARCH, POPULATION], ids=["halving", "population"])


def tokens_of(parent: Run, search: Search) -> dict[str, float]:
    """Name of a candidate -> the tokens that it sampled itself."""
    names = {*search.tried([*search.decided(parent.store)])}.intersection(run_names(parent.store))
    runs = [open_existing(parent.store, name) for name in names]
    return {run.name: spent_before(run, Progress(run).num_iterations)[SPENT] for run in runs}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Search], list[Decision]]:
    """What a search decides that nothing happens to."""
    known = dict[str, list[Decision]]()

    def decided(search: Search) -> list[Decision]:
        if search.strategy not in known:
            course = Course.begun(search, searched_run(tmp_path_factory.mktemp("whole")))
            assert play(course)
            known[search.strategy] = course.decided
        return known[search.strategy]

    return decided


@pytest.mark.slow
@BOTH
@settings(max_examples=3, deadline=None)
@given(data=st.data())
def test_killed_anywhere_and_in_any_order_it_decides_the_same(
    data: st.DataObject,
    search: Search,
    whole: Callable[[Search], list[Decision]],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    parent = searched_run(tmp_path_factory.mktemp("killed"))
    kills = data.draw(st.lists(st.integers(0, 12), max_size=3))
    moments = random.Random(data.draw(st.integers(0, 99)))

    def shuffled(names: list[str]) -> list[str]:
        return moments.sample(names, len(names))

    for acts in kills:
        play(Course.begun(search, parent), acts, shuffled)
    course = Course.begun(search, parent)
    assert play(course, order=shuffled)
    assert course.decided == whole(search)
    assert [*search.decided(parent.store)] == whole(search)


def test_halving_trains_half_as_many_further_each_time(tmp_path: Path) -> None:
    parent = searched_run(tmp_path)
    course = Course.begun(SEARCH, parent)
    play(course)
    assert [len(decision.scores) for decision in course.decided] == [4, 2, 1]
    assert course.winner() == ("s-2", "s-2 (rl.learning_rate=4e-4), a fork of a at 1")
    assert tokens_of(parent, SEARCH) == {"s-0": TOKENS, "s-1": 2 * TOKENS, "s-2": 4 * TOKENS, "s-3": TOKENS}


@pytest.mark.slow
@BOTH
@pytest.mark.parametrize("budget", [450, 650])
def test_a_budget_ends_the_search_with_the_best_so_far_and_raised_it_goes_on(
    budget: int, search: Search, whole: Callable[[Search], list[Decision]], tmp_path: Path
) -> None:
    parent = searched_run(tmp_path, f"budget.rollout_tokens={budget}")
    course = Course.begun(search, parent)
    assert play(course)
    assert f"budget.rollout_tokens={budget} is spent" in course.over and "by all candidates together" in course.over
    assert "rlpipe resume a" in course.over and "--set budget.rollout_tokens=" in course.over
    spent = sum(tokens_of(parent, search).values())
    assert budget <= spent < budget + TOKENS, "it ends at the first iteration that reaches it"
    assert " ".join(course.report()).count("the best when the budget was spent") == 1
    stored = [*search.decided(parent.store)]
    assert stored == whole(search)[: len(stored)] and len(stored) == len(course.decided) - 1
    again = Course.begun(search, parent)
    assert play(again) and again.winner() == course.winner(), "the same command says the same"
    raised = override_config(last_started(parent.store, "a"), ["budget.rollout_tokens=0"])
    record_start(parent.store, raised)
    course = Course.begun(search, parent)
    assert play(course) and course.decided == whole(search)


def test_a_budget_that_is_spent_before_any_comparison_is_a_plain_error(tmp_path: Path) -> None:
    search = replace(SEARCH, rungs=[3, 4])
    course = Course.begun(search, searched_run(tmp_path, "budget.rollout_tokens=150"))
    with pytest.raises(UserError, match=r"no candidate came through 3 iterations: budget\.rollout_tokens=150 is spent"):
        play(course)


def test_a_candidate_that_was_refused_is_out_and_its_reason_is_in_the_table(tmp_path: Path) -> None:
    course = Course.begun(SEARCH, searched_run(tmp_path))
    for name in course.entrants():
        config = course.begin(name)
        assert config is not None
        if name == "s-2":
            course.refuse(name, StepRefused("the loss is not finite\nin all steps"))
        else:
            train(config)
            course.judge(name)
    course.decide()
    assert course.decided[0].kept == ["s-1", "s-3"] and course.decided[0].scores["s-2"] is None
    assert course.report()[-1].endswith("| - |  |  | the loss is not finite |")


def test_the_picture_has_a_curve_a_candidate(tmp_path: Path) -> None:
    course = Course.begun(POPULATION, searched_run(tmp_path))
    assert play(course)
    assert course.picture().startswith(b"\x89PNG")
