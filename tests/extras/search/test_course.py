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
from rlpipe.extras.search.budget import SearchBudget
from rlpipe.extras.search.course import Course
from rlpipe.extras.search.halving import Decision, Search
from rlpipe.extras.search.population import Population
from rlpipe.store.limits import GPU_SECONDS, SECONDS, spent_before
from rlpipe.store.limits import TOKENS as SPENT
from rlpipe.store.opening import create_or_continue, fork, open_existing
from rlpipe.store.progress import Progress
from rlpipe.store.run import Run
from rlpipe.store.run_record import last_started, record_start, run_names
from tests.search_world import AT, METRIC, TOKENS, commit_evaluation, play, searched_run, train

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


@pytest.mark.parametrize("standing", ["a run of its own", "a fork with other settings"])
def test_a_run_that_has_the_name_of_a_candidate_is_not_taken_for_it(standing: str, tmp_path: Path) -> None:
    parent = searched_run(tmp_path)
    other = override_config(parent.config, ["run=s-1", "rl.learning_rate=3e-4", "rl.num_iterations=3"])
    if standing == "a run of its own":
        create_or_continue(other)
    else:
        fork(parent, AT, other)
    train(other)
    refused = r"search s: the run s-1 is there, and is not a fork of a at 1 with rl\.learning_rate=2e-4; choose another"
    with pytest.raises(UserError, match=refused):
        SEARCH.check(parent)
    with pytest.raises(UserError, match=refused):
        Course.begun(SEARCH, parent).begin("s-1")


def test_a_metric_that_no_evaluation_has_is_refused_before_a_candidate_is_trained(tmp_path: Path) -> None:
    parent = searched_run(tmp_path)
    commit_evaluation(parent, "base", 0, {"words_pass_at_1": 0.5})
    assert len(SEARCH.check(parent)) == len(RATES)
    with pytest.raises(UserError, match="--by evaluation/words_pass: an evaluation has words_pass_at_1"):
        replace(SEARCH, by="evaluation/words_pass").check(parent)


def test_a_candidate_may_cost_what_the_others_have_left(tmp_path: Path) -> None:
    sets = ["budget.cost=20", "budget.price_per_gpu_h=4", "trainer.gpu_ids=[0]", "model.dtype=float32"]
    parent = searched_run(tmp_path, *sets)
    spent = {name: {SECONDS: 0.0, SPENT: 0, GPU_SECONDS: hours * 3600} for name, hours in (("s-0", 1.5), ("s-1", 2.0))}
    budget = SearchBudget(parent.store, parent.config, spent)
    assert "budget.cost=14.0" in budget.left_for("s-1")[0], "6 of 20 are those of s-0"
    assert "budget.cost=6.0" in budget.left_for("s-2")[0]


def test_the_picture_has_a_curve_a_candidate(tmp_path: Path) -> None:
    course = Course.begun(POPULATION, searched_run(tmp_path))
    assert play(course)
    assert course.picture().startswith(b"\x89PNG")
