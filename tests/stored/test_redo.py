"""`fork --redo`: what may change, and what is shown."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlpipe.base.errors import UserError
from rlpipe.base.hashing import canonical_json
from rlpipe.config.source import override_config, read_config
from rlpipe.store.opening import create_or_continue
from rlpipe.store.run import Run
from rlpipe.stored.redo import changes, check_redo
from tests.paths import PRESETS
from tests.store.test_run import record_of


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return create_or_continue(read_config("tiny", ["run=a", f"store=file://{tmp_path}"], PRESETS))


REWARDS, FILTERS, CLIP, ESTIMATOR = "rl.rewards={exact = 1.0}", "rl.filters={}", "rl.clip_high=0.4", "rl.estimator=rloo"


@pytest.mark.parametrize(
    ("redo", "override"),
    [
        ("score", REWARDS),
        ("score", FILTERS),
        ("score", CLIP),
        ("filter", FILTERS),
        ("filter", ESTIMATOR),
        ("train", CLIP),
    ],
)
def test_what_comes_after_the_shared_stages_may_change(run: Run, redo: str, override: str) -> None:
    check_redo(run, 3, override_config(run.config, ["run=b", override]), redo)


@pytest.mark.parametrize(
    ("redo", "override", "message"),
    [
        ("filter", REWARDS, r"--redo filter shares scores, so rl\.rewards cannot change .*: use --redo score"),
        ("train", REWARDS, r"rl\.rewards cannot change .*: use --redo score"),
        ("train", FILTERS, r"--redo train shares batch, so rl\.filters cannot change .*: use --redo filter"),
        ("train", ESTIMATOR, r"rl\.estimator cannot change \('grpo' -> 'rloo'\): use --redo filter"),
        (
            "score",
            "rl.temperature=0.5",
            r"shares rollouts, so rl\.temperature cannot.* without --redo \(rlpipe fork a --at 2",
        ),
        ("score", "rl.num_prompts=5", r"shares prompts, so rl\.num_prompts cannot"),
        ("generate", CLIP, "--redo generate: use one of score, filter, train"),
    ],
)
def test_what_the_shared_stages_depend_on_may_not(run: Run, redo: str, override: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_redo(run, 3, override_config(run.config, ["run=b", override]), redo)


def test_a_rule_for_all_faults_and_one_by_cause_have_other_names_in_the_settings(run: Run) -> None:
    older = Run(run.store, override_config(run.config, ["rl.faults={policy = 0.5, outside = 0.5}"]))
    by_cause = override_config(older.config, ["rl.faults={policy = 0.5}"])
    check_redo(older, 3, by_cause, "score")
    with pytest.raises(UserError, match=r"shares scores, so rl\.reward_fallback cannot change \(0\.5 -> None\)"):
        check_redo(older, 3, by_cause, "filter")
    check_redo(older, 3, older.config, "filter")


def test_what_an_older_version_sampled_is_not_trained_uncorrected(run: Run) -> None:
    parent = Run(run.store, override_config(run.config, ["rl.overlap=iteration"]))
    for redo in ("score", "filter", "train"):
        check_redo(parent, 3, override_config(parent.config, ["rl.overlap=none"]), redo)
        with pytest.raises(UserError, match=rf"--redo {redo} trains what version 2 sampled \(rl\.overlap of a\)"):
            check_redo(parent, 3, override_config(parent.config, ["rl.overlap=none", "rl.importance=none"]), redo)
    check_redo(parent, 0, override_config(parent.config, ["rl.overlap=none", "rl.importance=none"]), "train")


def test_at_iteration_0_sampling_anew_is_another_run(run: Run) -> None:
    with pytest.raises(UserError, match="to sample anew, start another run"):
        check_redo(run, 0, override_config(run.config, ["rl.temperature=0.5"]), "score")


def test_what_ended_an_over_sampled_round_is_history(run: Run) -> None:
    parent = Run(run.store, override_config(run.config, ["rl.oversampling=1.5"]))
    for override in (REWARDS, FILTERS, "rl.groups_min=3"):
        check_redo(parent, 3, override_config(parent.config, [override]), "score")


@pytest.fixture
def branching(tmp_path: Path) -> Run:
    """The run of an agent all of whose branches are trained."""
    sets = ["run=c", f"store=file://{tmp_path}", "rl.agent=my_agent:act", "rl.branches=all"]
    return create_or_continue(read_config("tiny", sets, PRESETS))


def test_branches_that_were_kept_to_be_trained_may_be_left_out(branching: Run) -> None:
    for redo in ("score", "filter"):
        check_redo(branching, 3, override_config(branching.config, ["run=d", "rl.branches=last"]), redo)
    with pytest.raises(
        UserError, match=r"--redo train shares batch, so rl\.branches cannot.*'all' -> 'last'\): use --redo filter"
    ):
        check_redo(branching, 3, override_config(branching.config, ["run=d", "rl.branches=last"]), "train")


def test_branches_that_were_kept_to_be_looked_at_may_not_be_trained(branching: Run) -> None:
    """Their masks have a reply more than once, where several branches have it."""
    parent = Run(branching.store, override_config(branching.config, ["run=e", "rl.branches=last"]))
    for redo in ("score", "filter", "train"):
        with pytest.raises(
            UserError, match=r"shares rollouts, so rl\.branches cannot change \('last' -> 'all'\): to sample anew"
        ):
            check_redo(parent, 3, branching.config, redo)


def test_another_agent_or_none_is_named(branching: Run) -> None:
    none = override_config(branching.config, ["run=d", "rl.agent=", "rl.branches=last"])
    with pytest.raises(UserError, match=r"rl\.agent cannot change \('my_agent:act' -> ''\)"):
        check_redo(branching, 3, none, "filter")


def test_what_is_compared_is_the_run_that_computed_the_stage(run: Run) -> None:
    redone = Run(run.store, override_config(run.config, ["run=b", REWARDS]), run, fork_at=2, redo="score")
    check_redo(redone, 3, override_config(redone.config, ["run=c", CLIP]), "filter")
    with pytest.raises(UserError, match="use --redo score"):
        check_redo(redone, 3, override_config(run.config, ["run=c"]), "filter")


def test_the_changes_are_told_metric_by_metric(run: Run) -> None:
    redone = Run(run.store, override_config(run.config, ["run=b"]), run, fork_at=2, redo="filter")
    told = {
        "a": {"rollout/reward_mean": 0.5, "train/loss": 0.25, "time/iteration_s": 1.0},
        "b": {
            "rollout/reward_mean": 0.5,
            "train/loss": 0.5,
            "rollout/groups_dropped_low_reward": 3,
            "time/iteration_s": 2.0,
        },
    }
    for each in (run, redone):
        each.store.create(each.iteration_key(3), canonical_json(record_of(each, 3, told[each.name], {})))
    lines = changes(redone)
    assert lines[0] == "iteration 3, redone from filter on: a -> b"
    assert [line.split() for line in lines[1:]] == [
        ["*", "rollout/groups_dropped_low_reward", "-", "->", "3"],
        ["rollout/reward_mean", "0.5", "->", "0.5"],
        ["*", "train/loss", "0.25", "->", "0.5"],
    ]
