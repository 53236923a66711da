"""The stages' own rules: settings cover what results depend on, commits answer from the
manifest, curves stay bounded."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, get_args

import pytest

from rlpipe.algorithms.advantages import ESTIMATORS
from rlpipe.base.errors import StepRefused, UserError
from rlpipe.base.references import ArtifactRef
from rlpipe.config.pipeline import RETIRED, PipelineConfig, identity
from rlpipe.config.source import read_config
from rlpipe.config.training import RlConfig
from rlpipe.loop import clock as clocks
from rlpipe.loop.clock import Clock
from rlpipe.loop.session import Session
from rlpipe.loop.stage import Attempt, Produced, StageKey, run_stage
from rlpipe.report.curves import reward_svg
from rlpipe.stages.base import base_reference, base_teacher
from rlpipe.stages.iteration import CURVE_NEWEST, CURVE_POINTS_MAX, _curve
from rlpipe.stages.policy import check_mismatch, first_step_faults
from rlpipe.stages.scoring import over_rounds
from rlpipe.stages.training import position, rl_job, sft_job
from rlpipe.store.artifacts import write_bytes
from rlpipe.store.opening import create_or_continue
from rlpipe.store.run import Run
from rlpipe.trainer.jobs import ANY_JOB, RlJob, SftJob, job_of
from tests.declared import RL_KINDS, stage_settings
from tests.paths import PRESETS

# fields that change no artifact: how long, how many processes, when to warn, and which policy
# samples, which is an input
NOT_IN_A_RESULT = {"num_iterations", "reward_workers", "reward_timeout_s", "mismatch_max", "on_mismatch",
                   "environment_timeout_s", "environment_total_s", "agent_timeout_s", "agents_max", "agent_address",
                   "pass_environment", "teacher_engine",
                   "overlap"}  # fmt: skip


def config(tmp_path: Path, *sets: str) -> PipelineConfig:
    return read_config("tiny", ["run=a", f"store=file://{tmp_path}", "tracking.uri=", *sets], PRESETS)


@pytest.fixture
def session(tmp_path: Path) -> Session:
    return Session(create_or_continue(config(tmp_path)), tmp_path / "work")


def test_every_rl_field_is_in_the_settings_of_the_stage_it_changes() -> None:
    config = read_config(
        "tiny", ["rl.oversampling=2", "rl.curriculum=weight", "rl.proximal=engine", "rl.importance=none"], PRESETS
    )
    acting = read_config(
        "tiny", ["rl.agent=my_agent:act", "rl.branches=all"], PRESETS
    )  # which go with no over-sampling
    kinds = [(config, kind) for kind in RL_KINDS] + [(acting, kind) for kind in RL_KINDS]
    covered = {name.removeprefix("rl.") for one, kind in kinds for name in stage_settings(one, "rl", kind)}
    # reference and teacher are stages of their own, and inputs of the policies
    taught = read_config("tiny", ["rl.teacher=run:b", "rl.teacher_coef=0.5"], PRESETS)
    by_top = read_config("tiny", ["rl.teacher=run:b", "rl.teacher_top_k=8", "rl.teacher_beta=0.1"], PRESETS)
    beside = [base_reference.settings(config), base_teacher.settings(taught), stage_settings(taught, "rl", "policy")]
    beside.append(stage_settings(by_top, "rl", "policy"))
    covered |= {name.removeprefix("rl.") for settings in beside for name in settings}
    assert set(RlConfig.model_fields) - covered == NOT_IN_A_RESULT


def test_a_stage_s_settings_change_with_its_own_fields_only(tmp_path: Path) -> None:
    one, other = config(tmp_path), config(tmp_path, "rl.clip_high=0.4")
    assert stage_settings(one, "rl", "policy") != stage_settings(other, "rl", "policy")
    for stage in ("prompts/round-0", "rollouts/round-0/shard-000", "scores/round-0", "batch/round-0", "evaluation"):
        assert stage_settings(one, "rl", stage) == stage_settings(other, "rl", stage)
    assert stage_settings(one, "sft", "policy") == stage_settings(other, "sft", "policy")
    assert identity(one) != identity(other)


def test_branches_are_in_the_settings_only_where_all_are_trained(tmp_path: Path) -> None:
    stages = ("rollouts/round-0/shard-000", "batch/round-0")
    last, every = ["rl.agent=my_agent:act"], ["rl.agent=my_agent:act", "rl.branches=all"]
    for stage in stages:
        old, new = (stage_settings(config(tmp_path, *sets), "rl", stage) for sets in (last, every))
        assert "rl.branches" not in old and new == old | {"rl.branches": "all"}
    for stage in ("prompts/round-0", "scores/round-0", "policy", "state", "evaluation"):
        assert stage_settings(config(tmp_path, *every), "rl", stage) == stage_settings(
            config(tmp_path, *last), "rl", stage
        )


def test_filters_change_what_is_sampled_only_where_they_end_a_round(tmp_path: Path) -> None:
    shard, other = "rollouts/round-0/shard-000", "rl.filters={diversity = 0.5}"
    assert stage_settings(config(tmp_path), "rl", shard) == stage_settings(config(tmp_path, other), "rl", shard)
    more = "rl.oversampling=1.5"
    assert stage_settings(config(tmp_path, more), "rl", shard) != stage_settings(
        config(tmp_path, more, other), "rl", shard
    )


async def test_a_stage_is_done_once_and_then_answers_from_its_manifest(session: Session) -> None:
    calls: list[str] = []

    async def produce(attempt: Attempt) -> Produced:
        calls.append(attempt.name)
        return Produced([write_bytes(attempt.store, attempt.folder, attempt.name, "x.bin", b"x")], {"n": len(calls)})

    key, before = StageKey("rl", 0, "scores/round-0"), {"prompts": ArtifactRef("p", "1" * 64)}
    first = await run_stage(session, key, before, {}, produce)
    again = await run_stage(session, key, before, {}, produce)
    assert not first.cached
    assert again.cached
    assert (again.ref, again.metrics, len(calls)) == (first.ref, {"n": 1}, 1)
    with pytest.raises(UserError, match="input prompts"):
        await run_stage(session, key, {"prompts": ArtifactRef("p", "2" * 64)}, {}, produce)


async def test_a_stage_that_raises_commits_nothing(session: Session) -> None:
    async def produce(attempt: Attempt) -> Produced:
        write_bytes(attempt.store, attempt.folder, attempt.name, "half.bin", b"half")
        raise OSError("the disk is full")

    with pytest.raises(OSError, match="disk is full"):
        await run_stage(session, StageKey("rl", 0, "scores/round-0"), {}, {}, produce)
    assert session.run.artifact("rl", 0, "scores/round-0") is None


def test_positions_name_the_run_that_owns_them(tmp_path: Path) -> None:
    parent = Run(create_or_continue(config(tmp_path)).store, config(tmp_path))
    child = Run(parent.store, config(tmp_path, "run=c", "rl.clip_high=0.4"), parent, fork_at=3)
    assert position(child, "rl", 3) == "runs/a/rl/00003"
    assert position(child, "rl", 4) == "runs/c/rl/00004"


def test_a_training_job_holds_what_its_result_depends_on_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = ArtifactRef("runs/a/rl/00000/batch", "0" * 64)
    run = Run(create_or_continue(config(tmp_path)).store, config(tmp_path, "sft.validation_fraction=0.1"))
    monkeypatch.setattr(Run, "policy", lambda run, version: (data, None))
    other = ["rl.num_iterations=999", "rl.mismatch_max=1", "rl.on_mismatch=fail", "rl.reward_timeout_s=99"]
    changed = Run(run.store, config(tmp_path, "sft.validation_fraction=0.1", *other))
    job = rl_job(run, 1, data)
    assert rl_job(changed, 1, data) == job  # so that a trainer that has done it answers at once
    rl = job_of("train", ANY_JOB.dump_json(job))
    assert isinstance(rl, RlJob) and rl == job and rl.first_step == run.config.rl.num_steps
    trained_by = {name.removeprefix("rl.") for name in stage_settings(run.config, "rl", "policy")}
    assert trained_by >= {"clip_high", "temperature"}
    for name in trained_by - {"seed", *RETIRED["rl"]}:
        assert getattr(rl.settings, name) == getattr(run.config.rl, name)
    sft = job_of("train", ANY_JOB.dump_json(sft_job(run, 1, data)))
    assert isinstance(sft, SftJob) and sft.seed == run.config.seed
    assert sft.first_step == run.config.sft.segment_steps and sft.settings.batch_size == run.config.sft.batch_size


def test_the_curve_of_a_long_run_stays_short_and_keeps_its_ends() -> None:
    curve: list[list[float]] = []
    for iteration in range(1000):
        curve = _curve(curve, iteration, iteration / 1000)
    assert len(curve) <= CURVE_POINTS_MAX
    assert curve[0][0] == 0
    assert [point[0] for point in curve[-CURVE_NEWEST:]] == [*range(1000 - CURVE_NEWEST, 1000)]
    assert "polyline" in reward_svg(curve)
    assert "polyline" in reward_svg([])


def test_the_metrics_of_several_rounds_tell_of_all_of_them() -> None:
    one = {"num_scored": 8, "rollout/reward_mean": 0.2, "rollout/num_tokens": 10, "rollout/length_tokens_max": 7}
    two = {
        "num_scored": 24,
        "rollout/reward_mean": 0.4,
        "rollout/num_tokens": 30,
        "rollout/length_tokens_max": 5,
        "rollout/fault_reward_error": 2,
    }
    assert over_rounds([one, two]) == {
        "rollout/reward_mean": pytest.approx(0.35), "rollout/num_tokens": 40, "rollout/length_tokens_max": 7,
        "rollout/fault_reward_error": 2, "num_scored": 32,
    }  # fmt: skip
    assert over_rounds([one]) == one


def test_the_mismatch_warns_or_stops_the_run(caplog: pytest.LogCaptureFixture) -> None:
    check_mismatch(0.01, 3, RlConfig(on_mismatch="fail"), 0)
    # a fork's, carried by its parent: the policy's own change
    check_mismatch(0.9, 3, RlConfig(on_mismatch="fail"), 7)
    check_mismatch(0.9, 3, RlConfig(rollouts_from="run:a"), 0)
    assert not caplog.records
    for mismatch, stale in ((0.06, 0), (math.nan, 0), (0.06, 7)):  # stale tokens that are not trained do not count
        rl = RlConfig(on_mismatch="fail", train_stale_tokens=not stale)
        check_mismatch(mismatch, 3, rl.model_copy(update={"on_mismatch": "warn"}), stale)
        assert "iteration 3: engine and trainer disagree by" in caplog.messages[-1]
        with pytest.raises(
            StepRefused, match=r"rl\.mismatch_max=0\.05.*not committed, the batch is kept\. Mend the cause"
        ):
            check_mismatch(mismatch, 3, rl, stale)


def test_a_first_step_that_is_not_what_it_must_be_is_told_with_its_numbers() -> None:
    fine = {"onpolicy_abs": 1e-8, "reference_abs": 0.0, "clip_fraction_low": 0.0, "clip_fraction_high": 0.0}
    assert first_step_faults(fine, 0, anchored=False) == []
    (fault,) = first_step_faults(fine | {"onpolicy_abs": 2e-3}, 4, anchored=False)
    assert "is 0.002, expected below 1e-06" in fault
    (fault,) = first_step_faults(fine | {"clip_fraction_low": 0.25}, 4, anchored=False)
    assert "clips 0.25 of the tokens" in fault
    assert first_step_faults(fine | {"clip_fraction_low": 0.25}, 4, anchored=True) == []
    assert first_step_faults(fine | {"reference_abs": 0.1}, 1, anchored=False) == []
    assert (
        "differs from the reference, itself, by 0.1"
        in first_step_faults(fine | {"reference_abs": 0.1}, 0, anchored=False)[0]
    )
    assert len(first_step_faults(fine | {"onpolicy_abs": math.nan}, 4, anchored=False)) == 1


def test_the_trainer_knows_every_estimator_of_the_config() -> None:
    # of gdpo it takes what the stage filter computed
    assert set(get_args(RlConfig.model_fields["estimator"].annotation)) == {*ESTIMATORS, "gdpo"}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """A clock whose time goes on by `clock.now`."""
    made = Clock()
    made.now = made._began  # type: ignore[attr-defined]
    monkeypatch.setattr(clocks.time, "monotonic", lambda: made.now)  # type: ignore[attr-defined]
    return made


def run_stages(clock: Any, *stages: tuple[str, float]) -> None:
    for verb, seconds in stages:
        with clock.during(verb):
            clock.now += seconds


def test_overlapping_shards_count_their_time_once(clock: Any) -> None:
    with clock.during("generate", 0), clock.during("generate", 0):
        clock.now += 2.0
    assert clock.seconds[0, "generate"] == pytest.approx(2.0)


def test_what_is_done_ahead_counts_for_the_iteration_that_it_is_of(clock: Any) -> None:
    clock.begin(3)
    with clock.during("train", 3), clock.during("generate", 4):
        clock.now += 2.0
    times = clock.at_commit(3)
    assert times["time/train_s"] == 2.0 and "time/generate_s" not in times and times["time/orchestration_s"] == 0
    clock.begin(4)
    times = clock.at_commit(4)
    assert times["time/generate_s"] == 2.0 and "time/train_s" not in times and times["time/iteration_s"] == 0


def test_an_iteration_lasts_from_commit_to_commit_and_idle_is_the_share_without_a_stage(clock: Any) -> None:
    run_stages(clock, ("evaluate", 5.0))  # before the first iteration
    clock.begin(0)
    run_stages(
        clock, ("sample_prompts", 1.0), ("generate", 6.0), ("train", 2.0), ("checkpoint", 0.5), ("reload_engines", 0.5)
    )
    times = clock.at_commit(0)
    assert times["time/iteration_s"] == 10.0 and times["time/orchestration_s"] == 0 and "time/evaluate_s" not in times
    assert (times["time/engines_idle_fraction"], times["time/trainer_idle_fraction"]) == (0.35, 0.75)
    clock.now += 1.0  # between two iterations both wait
    clock.begin(1)
    with (
        clock.during("train"),
        clock.during("generate"),
        clock.during("generate"),
    ):  # what is sampled ahead, in two shards
        clock.now += 4.0
    times = clock.at_commit(1)
    assert times["time/iteration_s"] == 5.0 and times["time/orchestration_s"] == 1.0
    assert (times["time/engines_idle_fraction"], times["time/trainer_idle_fraction"]) == (0.2, 0.2)


def test_a_stage_that_runs_on_over_a_commit_counts_on_both_sides_of_it(clock: Any) -> None:
    clock.begin(0)
    with clock.during("generate", 1):
        clock.now += 3.0
        assert clock.at_commit(0)["time/engines_idle_fraction"] == 0
        clock.begin(1)
        clock.now += 1.0
    clock.now += 1.0
    times = clock.at_commit(1)
    assert times["time/generate_s"] == 4.0 and times["time/engines_idle_fraction"] == 0.5
    clock.begin(9)  # another one than what follows
    clock.now += 1.0
    assert clock.at_commit(9) == {
        "time/iteration_s": 1.0,
        "time/orchestration_s": 1.0,
    }  # nobody used a service: no figure of one
