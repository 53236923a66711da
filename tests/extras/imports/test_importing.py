"""The import stages: what is stored elsewhere becomes the run's own, once,
and only while it is what it was."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from rlpipe.base.errors import UserError
from rlpipe.base.hashing import canonical_json
from rlpipe.base.manifests import Manifest, StageResult
from rlpipe.base.values import JsonDict
from rlpipe.checks.preflight import preflight
from rlpipe.config.pipeline import PipelineConfig
from rlpipe.config.source import read_config
from rlpipe.data.new_tokenizer import build_tokenizer
from rlpipe.extras.imports import importing
from rlpipe.extras.imports.checking import load_sets
from rlpipe.extras.imports.importing import import_prompts, import_rollouts
from rlpipe.loop.session import Session
from rlpipe.records.prompt import Prompt
from rlpipe.stages.filtering import filter_groups
from rlpipe.stages.scoring import score
from rlpipe.store.artifacts import commit, read_manifest, write_bytes
from rlpipe.store.audit import verify
from rlpipe.store.backend import open_store
from rlpipe.store.opening import create_or_continue, fork, planned_fork
from rlpipe.store.run import Run
from rlpipe.store.run_record import run_names
from tests.extras.imports.test_rollout_files import row, write
from tests.paths import PRESETS
from tests.rows import KEPT_REWARDS, PROMPTS, ROLLOUTS, SCORES, read_rows
from tests.store.test_run import record_of


def spelled(prompt: JsonDict, completion: str) -> float:
    return float(completion == prompt["answer"])


class PlayedTokenizer:
    vocab_size = 8

    def decode(self, tokens: list[int]) -> str:
        return " ".join(map(str, tokens))

    decode_plain = decode


def commit_base(run: Run, texts: list[str]) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        build_tokenizer(texts, Path(scratch))
        tokenizer = {path.name: path.read_bytes() for path in Path(scratch).iterdir()}
    for stage, files in (("tokenizer", tokenizer), ("policy", {"config.json": b'{"vocab_size": 10}'})):
        folder = run.folder("base", 0, stage)
        records = [write_bytes(run.store, folder, "a", name, data) for name, data in files.items()]
        commit(run.store, folder, Manifest(run.name, "base", 0, stage, {}, "", {}, records, {}, None, "x", "t", "t"))


def asked(tmp_path: Path, source: Path | str, *sets: str) -> PipelineConfig:
    small = [f"data.{name}.rows_max=20" for name in ("short_words", "all_words", "words")]
    told = ["run=b", f"store=file://{tmp_path}/store", f"rl.rollouts_from={source}",
            "rl.num_prompts=2", "rl.group_size=2",
            "rl.num_iterations=2", "rl.filters={}", *small, *sets]  # fmt: skip
    return read_config("tiny", told, PRESETS)


def opened(tmp_path: Path, source: Path | str, *sets: str) -> Session:
    """A session as a new process has it."""
    run = create_or_continue(asked(tmp_path, source, *sets))
    commit_base(run, ["say 4 5"])
    return held(tmp_path, run)


def held(tmp_path: Path, run: Run) -> Session:
    session = Session(run, tmp_path / "work")
    session.data.tokenizer = PlayedTokenizer()  # type: ignore[assignment]
    session.data.prompts = lambda _: [[Prompt("words/0", "words", [{"role": "user", "content": "say 4 5"}], "4 5")]]
    return session


def rollouts(*groups: int) -> list[JsonDict]:
    return [row(group, reward=float(index)) for group in groups for index in range(2)]


async def imported(session: Session, iteration: int) -> tuple[StageResult, StageResult]:
    prompts = await import_prompts(session, iteration=iteration)
    return prompts, await import_rollouts(session, iteration=iteration, prompts=prompts.ref)


@pytest.mark.slow
async def test_an_iteration_is_scored_and_filtered_from_what_was_imported(tmp_path: Path) -> None:
    known = [row(1, prompt="say 4 5", completion_tokens=tokens, weight_version=-2) for tokens in ([4, 5], [4, 6])]
    path = write(tmp_path / "x.parquet", rollouts(0) + known + rollouts(2, 3))
    session = opened(tmp_path, path, 'rl.rewards={"tests.extras.imports.test_importing:spelled" = 2.0}')
    try:
        prompts, shard = await imported(session, 0)
        assert (shard.metrics["num_rollouts"], shard.metrics["num_rewards_kept"]) == (4, 2)
        assert [told["answer"] for told in read_rows(session.run.store, prompts.ref, "prompts.parquet", PROMPTS)] == [
            None,
            "4 5",
        ]
        assert len(read_rows(session.run.store, shard.ref, "rewards.parquet", KEPT_REWARDS)) == 2
        scores = await score(session, iteration=0, round_index=0, prompts=prompts.ref, rollouts=[shard.ref])
        rows = read_rows(session.run.store, scores.ref, "scores.parquet", SCORES)
        assert [told["completion"] for told in rows] == ["4 5", "4 5", "4 5", "4 6"]
        assert [told["reward"] for told in rows] == [0.0, 1.0, 2.0, 0.0]  # the first two were kept, the others computed
        batch = await filter_groups(session, iteration=0, round_index=0, prompts=[prompts.ref], scores=[scores.ref])
        assert (batch.metrics["rollout/staleness_mean"], batch.metrics["rollout/staleness_max"]) == (1.0, 2)
        assert verify(session.run)[1] == []
    finally:
        await session.close()


async def test_a_plain_data_set_is_trained_on_as_it_is_and_that_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sizes = (3, 2, 4, 1)
    plain = [
        row(group, reward=float(index), rollout_logprobs=None)
        for group, size in enumerate(sizes)
        for index in range(size)
    ]
    path = write(tmp_path / "x.parquet", plain)
    session = opened(tmp_path, path)
    preflight(session.config)
    told: list[JsonDict] = []
    for iteration in range(2):
        prompts, shard = await imported(session, iteration)
        at = {"iteration": iteration, "round_index": 0}
        scores = await score(session, prompts=prompts.ref, rollouts=[shard.ref], **at)
        batch = await filter_groups(session, prompts=[prompts.ref], scores=[scores.ref], **at)
        told.append(batch.metrics)
    assert [metrics["rollout/num_trained"] for metrics in told] == [5, 4]
    assert told[1]["rollout/groups_dropped_too_few_rollouts"] == 1
    said = [record.getMessage() for record in caplog.records if "rollout_logprobs" in record.getMessage()]
    assert len(said) == 1 and "10 of 10 rollouts have no rollout_logprobs: they are trained as if the policy" in said[0]
    await session.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sets", "said"),
    [
        (
            [],
            (
                r"rl\.estimator='grpo' compares the rollouts of a group, and each group of .* has one; "
                "use reinforce_plus_plus"
            ),
        ),
        (["rl.estimator=reinforce_plus_plus"], ""),
        (
            ["rl.estimator=reinforce_plus_plus", "rl.filters={nonzero_std = 0.0}"],
            "nonzero_std drops every group of one",
        ),
    ],
)
def test_groups_of_one_are_refused_where_nothing_would_be_trained(tmp_path: Path, sets: list[str], said: str) -> None:
    config = asked(tmp_path, write(tmp_path / "x.parquet", [row(group) for group in range(4)]), *sets)
    if not said:
        preflight(config)
        return
    with pytest.raises(UserError, match=said):
        preflight(config)


async def test_too_few_groups_end_the_rounds_when_nothing_more_can_be_had(tmp_path: Path) -> None:
    wants_more = ["rl.rounds_max=3", "rl.groups_min=9"]
    path = write(tmp_path / "x.parquet", rollouts(0, 1, 2, 3))
    session = opened(tmp_path, path, *wants_more)
    prompts, shard = await imported(session, 0)
    scores = await score(session, iteration=0, round_index=0, prompts=prompts.ref, rollouts=[shard.ref])
    batch = await filter_groups(session, iteration=0, round_index=0, prompts=[prompts.ref], scores=[scores.ref])
    assert not batch.metrics["needs_more"]
    await session.close()
    failing = opened(tmp_path, path, *wants_more, "rl.on_too_few=fail", "run=c")
    prompts, shard = await imported(failing, 0)
    scores = await score(failing, iteration=0, round_index=0, prompts=prompts.ref, rollouts=[shard.ref])
    with pytest.raises(UserError, match=r"rl\.groups_min=9: only 2 groups"):
        await filter_groups(failing, iteration=0, round_index=0, prompts=[prompts.ref], scores=[scores.ref])
    await failing.close()


@pytest.mark.slow
async def test_files_are_imported_once_and_needed_no_more(tmp_path: Path) -> None:
    folder = tmp_path / "files"
    write(folder / "0.parquet", rollouts(0, 1))
    write(folder / "1.parquet", rollouts(2, 3))
    session = opened(tmp_path, folder)
    preflight(session.config)
    before = await imported(session, 0)
    for path in folder.iterdir():
        path.unlink()
    session = opened(tmp_path, folder)
    preflight(session.config)
    again = await imported(session, 0)
    assert [part.ref for part in again] == [part.ref for part in before]
    prompts, shard = await imported(session, 1)
    rows = read_rows(session.run.store, shard.ref, "rollouts.parquet", ROLLOUTS)
    assert [row["group_index"] for row in rows] == [0, 0, 1, 1]
    ids = [row["prompt_id"] for row in read_rows(session.run.store, prompts.ref, "prompts.parquet", PROMPTS)]
    assert ids == ["p/2", "p/3"]
    assert verify(session.run)[1] == []
    with pytest.raises(UserError, match=r"has 4 whole groups; 3 iterations need 6"):
        await imported(opened(tmp_path, folder, "rl.num_iterations=3"), 2)


async def test_files_of_many_groups_are_read_back_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importing, "CHUNK_GROUPS", 3)
    session = opened(tmp_path, write(tmp_path / "x.parquet", rollouts(*range(8))), "rl.num_iterations=4")
    for iteration in range(4):
        prompts, _ = await imported(session, iteration)
        rows = read_rows(session.run.store, prompts.ref, "prompts.parquet", PROMPTS)
        assert [row["prompt_id"] for row in rows] == [f"p/{2 * iteration}", f"p/{2 * iteration + 1}"]


@pytest.mark.slow
async def test_preflight_needs_the_files_until_they_are_imported(tmp_path: Path) -> None:
    path = write(tmp_path / "x.parquet", rollouts(0, 1, 2, 3))
    session = opened(tmp_path, path)
    preflight(session.config)
    path.rename(tmp_path / "gone")
    with pytest.raises(UserError, match="no Parquet file there"):
        preflight(session.config)
    (tmp_path / "gone").rename(path)
    await import_prompts(session, iteration=0)
    path.unlink()
    preflight(asked(tmp_path, path))
    with pytest.raises(UserError, match=r"has 4 whole groups; 3 iterations need 6"):
        preflight(asked(tmp_path, path, "rl.num_iterations=3"))


async def test_a_fork_with_other_num_prompts_uses_no_group_twice_and_leaves_none_out(tmp_path: Path) -> None:
    path = write(tmp_path / "x.parquet", rollouts(0, 1, 2, 3, 4, 5))
    parent = opened(tmp_path, path)
    await imported(parent, 0)
    parent.run.store.create(parent.run.iteration_key(0), canonical_json(record_of(parent.run, 0, {}, {})))
    for num_prompts in (1, 3):
        child = fork(parent.run, 0, asked(tmp_path, path, f"run=c{num_prompts}", f"rl.num_prompts={num_prompts}"))
        prompts, _ = await imported(held(tmp_path, child), 1)
        ids = [told["prompt_id"] for told in read_rows(child.store, prompts.ref, "prompts.parquet", PROMPTS)]
        assert ids == [f"p/{group}" for group in range(2, 2 + num_prompts)]
    longer = planned_fork(parent.run, 0, asked(tmp_path, path, "run=d", "rl.num_prompts=3", "rl.num_iterations=3"))
    with pytest.raises(UserError, match=r"has 6 whole groups; 3 iterations need 8"):
        preflight(longer.config, longer)


@pytest.mark.slow
def test_what_cannot_be_trained_on_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    config, fed = asked(tmp_path, "run:same"), Path(tmp_path / "x.parquet")
    for name, sets in (("same", []), ("other", []), ("longer", ["model.context_tokens_max=256"])):
        run = create_or_continue(asked(tmp_path, "", f"run={name}", *sets))
        texts = [
            str(prompt.messages[-1]["content"]) for use in ("rl", "evaluation") for prompt in load_sets(config, use)[0]
        ]
        commit_base(run, ["say 4 5"] if name == "other" else texts)
        for iteration in range(2):
            run.store.create(run.iteration_key(iteration), b"{}")
    preflight(config)
    write(fed, [row(0, completion_tokens=[3, 9000])] * 2 + rollouts(1, 2, 3))
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/linked.parquet").symlink_to(fed)
    for source, said in (
        (
            tmp_path / "folder",
            r"rl.rollouts_from=.*: linked\.parquet is a link to .*x\.parquet, outside of that folder",
        ),
        ("run:other", "rl.rollouts_from=run:other: that run has another tokenizer"),
        ("run:longer", r"model.context_tokens_max=128: the rollouts of run longer may have 256 tokens; set it to that"),
        (fed, r"x\.parquet row 1: token 9000 is outside the vocabulary of \d+"),
    ):
        with pytest.raises(UserError, match=said):
            preflight(asked(tmp_path, source))
    assert run_names(open_store(config.store)) == ["longer", "other", "same"]


async def test_tokens_of_another_tokenizer_and_too_few_groups_are_refused(tmp_path: Path) -> None:
    beyond = write(tmp_path / "x.parquet", [row(0, completion_tokens=[3, 10])] * 2 + rollouts(1, 2, 3))
    with pytest.raises(UserError, match=r"row 1: token 10 is outside the vocabulary of 10"):
        await import_prompts(opened(tmp_path, beyond), iteration=0)
    other = write(tmp_path / "y.parquet", [row(0, completion="four five")] * 2 + rollouts(1, 2, 3))
    with pytest.raises(UserError, match="another tokenizer made them"):
        await imported(opened(tmp_path, other, "run=c"), 0)
    with pytest.raises(UserError, match=r"has 4 whole groups; 3 iterations need 6"):
        await imported(opened(tmp_path, other, "run=d", "rl.num_iterations=3"), 0)


async def test_a_fork_that_samples_again_starts_the_prompts_of_its_own_data(tmp_path: Path) -> None:
    prompts = await import_prompts(
        session := opened(tmp_path, write(tmp_path / "x.parquet", rollouts(0, 1, 2, 3))), iteration=0
    )
    told = read_manifest(session.run.store, prompts.ref.folder, prompts.ref.sha256).metrics
    assert told["cursor"] == {"drawn": 0, "sets": [{"epoch": 0, "offset": 0}]}
    assert told["data_sha256"] == session.data.sha256


async def test_two_prompts_of_one_name_are_refused(tmp_path: Path) -> None:
    rows = [row(0, "same")] * 2 + [row(1, "same")] * 2
    with pytest.raises(UserError, match="two different prompts are called same"):
        await import_prompts(opened(tmp_path, write(tmp_path / "x.parquet", rows), "rl.num_iterations=1"), iteration=0)
