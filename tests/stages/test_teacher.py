"""The teacher of distillation: what a config, a preflight and a redo refuse, and whose teacher a
fork has."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from rlpipe.base.errors import UserError
from rlpipe.checks import preflight
from rlpipe.checks.content import Content
from rlpipe.checks.preflight import look_at
from rlpipe.config.pipeline import SET_TEACHER, PipelineConfig, stored_tree
from rlpipe.config.settings import artifact_settings
from rlpipe.config.source import override_config, read_config
from rlpipe.extras.plan.memory import training_bytes
from rlpipe.extras.plan.sizes import ModelSizes
from rlpipe.loop.session import Session
from rlpipe.rewards.pool import RewardPool
from rlpipe.stages import model_source
from rlpipe.stages.base import base_set_teacher, base_teacher
from rlpipe.stages.teacher import ask_teacher
from rlpipe.stages.training import rl_job
from rlpipe.store.opening import create_or_continue, fork
from rlpipe.store.progress import Progress
from rlpipe.store.run import Run
from rlpipe.stored.redo import check_redo
from tests.deadlines import DEADLINE_S
from tests.paths import PRESETS
from tests.stages.test_reference import VOCABULARY, committed, config, folder_of, made, tokenizer
from tests.store.test_run import commit_iterations

ALONE = ["rl.rewards={}", "rl.filters={}", 'evaluation.rewards={"exact"=1.0}']


def taught(tmp_path: Path, teacher: str | Path, *sets: str) -> PipelineConfig:
    return config(tmp_path, f"rl.teacher={teacher}", *sets)


@pytest.mark.parametrize(
    ("sets", "error"),
    [
        (["rl.teacher=run:a"], r"rl\.teacher='run:a': name another run"),
        (["rl.teacher_coef=0.5"], r"rl\.teacher_coef=0\.5: there is no teacher to weigh"),
        (["rl.teacher_top_k=8"], r"rl\.teacher_top_k=8: there is no teacher to ask"),
        (["rl.teacher_engine=local:http://a"], r"rl\.teacher_engine='local:http://a': there is no teacher to ask"),
        (["rl.teacher=x", "rl.teacher_engine=http://a"], r"rl\.teacher_engine='http://a': write it as KIND:URL"),
        (["rl.teacher=x", "rl.teacher_engine=vllm:http://a", "rl.temperature=0.5"], "engines score at temperature 1"),
        (
            ["rl.teacher=run:b", *ALONE, "rl.teacher_top_k=8", "trainer.num_ranks=2", "trainer.context_ranks=2"],
            r"rl\.teacher_top_k=8: a rank of a context-parallel group",
        ),
        (["rl.rewards={}"], r"rl\.rewards is empty"),
        (["rl.teacher=run:b", *ALONE, "rl.teacher_coef=0"], r"rl\.rewards is empty"),
        (["rl.teacher=run:b", *ALONE, 'rl.filters={"nonzero_std"=0.0}'], r"rl\.filters=.*drops every group"),
        (["rl.teacher=run:b", *ALONE[:2]], r"evaluation\.rewards is empty"),
        (["rl.teacher=run:b", 'rl.rewards={"exact"=0.0}', "rl.filters={}"], r"evaluation\.rewards is empty"),
    ],
)
def test_what_does_not_go_together(tmp_path: Path, sets: list[str], error: str) -> None:
    with pytest.raises(UserError, match=error):
        config(tmp_path, *sets)
    taught(tmp_path, "run:b", *ALONE)
    taught(tmp_path, "run:b", "rl.teacher_coef=0")


TWO_SETS = """
extends = "tiny"
data = [
    { name = "words", use = "rl", source = "a.jsonl" }, { name = "sums", use = "rl", source = "b.jsonl" },
    { name = "words", use = "evaluation", source = "c.jsonl" },
]
"""


def by_set(tmp_path: Path, *sets: str) -> PipelineConfig:
    """A config with two data sets of use rl."""
    (tmp_path / "two.toml").write_text(TWO_SETS)
    where = ["run=a", f"store=file://{tmp_path}/store", "tracking.uri=", "sft.num_steps=0"]
    return read_config(str(tmp_path / "two.toml"), [*where, *sets], PRESETS)


@pytest.mark.parametrize(
    ("sets", "error"),
    [
        (["data.words.teacher=run:b"], r"rl\.teacher is empty: it is the teacher of sums, which have none"),
        (["data.sums.teacher=run:a", "rl.teacher=run:b"], r"data\.sums\.teacher='run:a': name another run"),
        (
            ["data.sums.teacher=x", "rl.teacher=x", "rl.teacher_engine=vllm:http://a"],
            r"sums\.teacher: one engine",
        ),
        (["data.sums.teacher=x", "rl.teacher=x", "rl.rollouts_from=run:b"], r"data\.sums\.teacher: stored rollouts"),
        (["rl.rewards={}"], r"rl\.rewards is empty"),
    ],
)
def test_what_does_not_go_with_teachers_of_sets(tmp_path: Path, sets: list[str], error: str) -> None:
    with pytest.raises(UserError, match=error):
        by_set(tmp_path, *sets)
    with pytest.raises(UserError, match=r"data\.short_words\.teacher='x': a teacher is of a set of use rl"):
        config(tmp_path, "data.short_words.teacher=x", "rl.teacher=x")
    both = by_set(tmp_path, *ALONE, "data.words.teacher=x", "data.sums.teacher=y")
    assert [both.frozen_models[stage].name for stage in both.teachers] == ["x", "y"]


def test_sets_that_name_one_teacher_share_it_and_prompts_do_not_depend_on_it(tmp_path: Path) -> None:
    plain, same = (by_set(tmp_path, "rl.teacher=x", *sets) for sets in ([], ["data.words.teacher=x"]))
    assert plain.teachers == same.teachers == ["teacher"]
    other = by_set(tmp_path, "rl.teacher=x", "data.words.teacher=y")
    both = by_set(tmp_path, "data.words.teacher=y", "data.sums.teacher=y")
    (shared,) = both.teachers
    assert other.teachers == ["teacher", shared] and other.frozen_models[shared].field == "data.words.teacher"
    for kind in ("prompts", "imported", "rollouts", "evaluation", "policy"):
        assert artifact_settings(other, "rl", kind) == artifact_settings(plain, "rl", kind)
    assert ask_teacher.settings(other) == ask_teacher.settings(plain) | {"data.words.teacher": "y"}
    sizes = ModelSizes(parameters=1000, layer=10, rest=10, kv_token=1, microbatch=None)
    assert training_bytes(other, sizes)[0] - training_bytes(plain, sizes)[0] == 4 * 1000
    assert training_bytes(both, sizes)[0] == training_bytes(plain, sizes)[0]


async def test_a_fork_may_name_another_teacher_for_a_set_and_copies_it(tmp_path: Path) -> None:
    for name in ("first", "second", "third"):
        made(config(tmp_path, f"run={name}"))
    parent = made(by_set(tmp_path, "rl.teacher=run:first", "data.words.teacher=run:second"))
    base, stage = parent.committed("base", 0, "tokenizer")[0], parent.config.teachers[1]

    async def copied(run: Run) -> str:
        (tmp_path / "work").mkdir(exist_ok=True)
        tag = run.config.teachers[1].removeprefix(SET_TEACHER)
        return (await base_set_teacher(Session(run, tmp_path / "work"), tag=tag, tokenizer=base)).ref.folder

    await with_teacher(parent, tmp_path)
    assert not Progress(parent).starts_rl
    assert await copied(parent) == f"runs/a/base/{stage}" and Progress(parent).starts_rl
    assert parent.committed("base", 0, stage)[1].metrics["source"]["run"] == "second"
    commit_iterations(parent, 2)
    same = fork(parent, 0, override_config(parent.config, ["run=b", "rl.clip_high=0.4"]))
    assert await copied(same) == f"runs/a/base/{stage}"
    change = "data.words.teacher=run:third"
    other = fork(parent, 0, override_config(parent.config, ["run=c", change]))
    assert not Progress(other).has_frozen(other.config.teachers[1])
    assert await copied(other) == f"runs/c/base/{other.config.teachers[1]}"
    assert other.folder("base", 0, "teacher") == "runs/a/base/teacher"
    with pytest.raises(UserError, match=r"shares teacher_logprobs, so data\.words\.teacher cannot change"):
        check_redo(parent, 0, override_config(parent.config, [change]), "train")
    check_redo(parent, 0, override_config(parent.config, [change]), "filter")


def test_a_config_without_a_teacher_is_stored_as_before(tmp_path: Path) -> None:
    assert not {name for name in stored_tree(config(tmp_path))["rl"] if name.startswith("teacher")}
    assert not any("teacher" in data for data in stored_tree(taught(tmp_path, "run:b"))["data"])
    assert not {"teacher_top_k", "teacher_beta"} & stored_tree(taught(tmp_path, "run:b"))["rl"].keys()
    assert stored_tree(taught(tmp_path, "run:b", "rl.teacher_coef=0.5"))["rl"]["teacher_coef"] == 0.5


@pytest.mark.slow
def test_preflight_refuses_a_teacher_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_source, "tensor_shapes", lambda folder: {})
    monkeypatch.setattr(Content, "tried", lambda content, field, folder: "tried")
    (fault,) = look_at(Content(taught(tmp_path, folder_of(tmp_path), *ALONE))).faults
    assert "rl.teacher=" in fault and "its vocabulary differs in" in fault
    with pytest.raises(UserError, match=r"rl\.teacher='run:gone': no run 'gone'"):
        preflight.preflight(made(taught(tmp_path, "run:gone", *ALONE)).config)


async def with_teacher(run: Run, tmp_path: Path) -> str:
    """The folder of the teacher that a run has, once it is prepared."""
    (tmp_path / "work").mkdir(exist_ok=True)
    session = Session(run, tmp_path / "work")
    return (await base_teacher(session, tokenizer=run.committed("base", 0, "tokenizer")[0])).ref.folder


async def test_a_fork_has_its_parent_s_teacher_or_its_own_and_replays_with_the_parent_s(tmp_path: Path) -> None:
    made(config(tmp_path, "run=source"))
    parent = made(taught(tmp_path, "run:source"))
    assert not Progress(parent).starts_rl
    assert await with_teacher(parent, tmp_path) == "runs/a/base/teacher" and Progress(parent).starts_rl
    commit_iterations(parent, 2)
    logprobs = committed(parent, "rl", "teacher_logprobs", {"x": b"of iteration 0"})
    batch = parent.policy(1)[0]  # any artifact
    assert rl_job(parent, 0, batch).teacher_logprobs == logprobs
    same = fork(parent, 0, override_config(parent.config, ["run=b"]))
    assert await with_teacher(same, tmp_path) == "runs/a/base/teacher"
    made(config(tmp_path, "run=newer"))
    other = fork(parent, 0, override_config(parent.config, ["run=c", "rl.teacher=run:newer"]))
    assert not Progress(other).has_frozen("teacher")
    assert await with_teacher(other, tmp_path) == "runs/c/base/teacher"
    assert rl_job(other, 0, batch).teacher_logprobs == logprobs, "the parent trained it"
    assert other.folder("rl", 1, "teacher_logprobs") == "runs/c/rl/00001/teacher_logprobs"


def test_a_redo_of_train_shares_the_logprobs_so_the_teacher_cannot_change(tmp_path: Path) -> None:
    parent = create_or_continue(taught(tmp_path, "run:b"))
    check_redo(parent, 0, override_config(parent.config, ["rl.teacher_coef=0.25"]), "train")
    for change in ("rl.teacher=run:c", "rl.teacher="):
        changed = override_config(parent.config, [change])
        with pytest.raises(UserError, match=r"shares teacher_logprobs, so rl\.teacher cannot change .*--redo filter"):
            check_redo(parent, 0, changed, "train")
        check_redo(parent, 0, changed, "filter")
    plain = create_or_continue(config(tmp_path, "run=plain"))
    with pytest.raises(UserError, match=r"rl\.teacher cannot change"):
        check_redo(plain, 0, override_config(plain.config, ["rl.teacher=run:b"]), "train")
    redone = fork_of_redo(parent, tmp_path)
    assert redone.folder("rl", 0, "teacher_logprobs") == "runs/a/rl/00000/teacher_logprobs"


def fork_of_redo(parent: Run, tmp_path: Path) -> Run:
    return Run(parent.store, taught(tmp_path, "run:b", "run=again"), parent, fork_at=-1, redo="train")


def test_the_settings_of_the_logprobs_are_what_the_teacher_is_asked(tmp_path: Path) -> None:
    settings = ask_teacher.settings(taught(tmp_path, "run:b", "rl.temperature=0.7", "rl.teacher_coef=0.5"))
    assert settings == {"seed": 0, "rl.teacher": "run:b", "rl.temperature": 0.7}
    top = ask_teacher.settings(taught(tmp_path, "run:b", "rl.teacher_top_k=8", "rl.teacher_beta=0.1"))
    assert top == {"seed": 0, "rl.teacher": "run:b", "rl.temperature": 1.0, "rl.teacher_top_k": 8}


def test_without_rewards_each_score_is_0() -> None:
    pool = RewardPool({}, workers=1, timeout_s=DEADLINE_S)
    try:
        scores = pool.score([{"prompt": {}, "completion": text, "rollout": {}} for text in "ab"])  # pyright: ignore
    finally:
        pool.close()
    assert [(score.reward, score.parts, score.reason) for score in scores] == [(0.0, {}, None)] * 2


def test_a_plan_counts_the_memory_of_the_teacher(tmp_path: Path) -> None:
    sizes = ModelSizes(parameters=1000, layer=10, rest=10, kv_token=1, microbatch=None)
    plain, with_one = (training_bytes(one, sizes)[0] for one in (config(tmp_path), taught(tmp_path, "run:b")))
    assert with_one - plain == 4 * 1000


async def test_of_a_teacher_on_an_engine_the_tokenizer_alone_is_kept(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "tokenizer.json").write_bytes(tokenizer(VOCABULARY))
    run = made(taught(tmp_path, tmp_path / "elsewhere", "rl.teacher_engine=local:http://127.0.0.1:1"))
    await with_teacher(run, tmp_path)
    held = run.committed("base", 0, "teacher")[1]
    assert [file.name.rpartition("/")[2] for file in held.files] == ["tokenizer.json"]
    without = Session(replace(run, config=taught(tmp_path, tmp_path / "elsewhere")), tmp_path / "work")
    batch = committed(run, "rl", "batch", {"x": b""})
    teacher, _ = run.committed("base", 0, "teacher")
    with pytest.raises(UserError, match=r"rl\.teacher_engine is empty: this run began with a teacher on an engine"):
        await ask_teacher(without, iteration=0, batch=batch, teacher=teacher, set_teachers=[])


async def test_a_teacher_on_an_engine_with_another_vocabulary_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(tokenizer({**VOCABULARY, "c": 2}))
    run = made(taught(tmp_path, tmp_path, "rl.teacher_engine=local:http://127.0.0.1:1"))
    with pytest.raises(UserError, match=r"rl\.teacher=.*its vocabulary differs in 1 tokens"):
        await with_teacher(run, tmp_path)
