"""A pruned policy is made again by a real trainer, to the bit, whoever is killed and
however many do it; or not at all."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from rlpipe.base.errors import StoreError
from rlpipe.base.manifests import Manifest
from rlpipe.base.references import ArtifactRef
from rlpipe.base.values import JsonDict
from rlpipe.config.pipeline import PipelineConfig
from rlpipe.config.source import override_config, read_config
from rlpipe.loop.colocation import TrainerSeat
from rlpipe.loop.session import Session
from rlpipe.stages.base import base_policy, base_tokenizer
from rlpipe.stages.iteration import commit_iteration
from rlpipe.stages.policy import checkpoint, train
from rlpipe.store import audit
from rlpipe.store.artifacts import commit, file_sha256, is_pruned, write_bytes
from rlpipe.store.backend import open_store
from rlpipe.store.local_copy import materialise
from rlpipe.store.opening import create_or_continue, fork, open_existing
from rlpipe.store.run import Run
from rlpipe.stored.remaking import export_policy, pruned_versions, restore_policy
from rlpipe.trainer.client import NotResident
from rlpipe.trainer.jobs import LoadJob, SaveJob, TrainJob, check_place, job_of
from rlpipe.trainer.trainer import Trainer
from tests import trainer_world as world
from tests.rows import BATCH, fill, to_parquet
from tests.store.test_retention import MOMENT, Killed, prune
from tests.store.test_run import PRESETS

ITERATIONS = 6
SMALL = [
    "sft.num_steps=0", "data.words.rows_max=60", "tracking.uri=", "model.hidden_size=32", "model.intermediate_size=32",
    "model.num_layers=1", "model.num_heads=2", "model.num_kv_heads=1", "rl.num_steps=2", "rl.mismatch_max=9",
    "checkpoint.state_every=2",
]  # fmt: skip
PRUNED = ["checkpoint.keep_policies_last=1", "checkpoint.keep_states=1"]


class TrainerHere:
    """A trainer of one rank in this process, asked as the flow asks one: it holds one position, and
    writes into its run only."""

    started, files_url, serves_files = True, "", False

    def __init__(self, folder: Path, run: str, dtype: str = "float32") -> None:
        self.trainer, self.run_name = Trainer(world.one_rank(folder, dtype=dtype)), run
        self.position: str | None = None
        self.trained: list[str] = []

    async def run(self, kind: str, body: JsonDict, on_progress: object = None) -> JsonDict:
        if kind == "upload":  # the save did it
            return {}
        job = job_of(kind, json.dumps(body).encode())
        check_place(job, self.run_name)
        if not isinstance(job, LoadJob) and (job.start if isinstance(job, TrainJob) else job.position) != self.position:
            raise NotResident(f"it holds {self.position}")
        await asyncio.sleep(0)
        result = world.do(self.trainer, job)
        if isinstance(job, TrainJob):
            self.trained.append(job.result)
            self.position = job.result
        elif not isinstance(job, SaveJob):
            self.position = job.position
        return result

    async def close(self) -> None: ...


def config(folder: Path, *sets: str) -> PipelineConfig:
    return read_config("tiny", ["run=a", f"store=file://{folder}/store", *SMALL, *sets], PRESETS)


def session_of(run: Run, folder: Path, dtype: str = "float32") -> Session:
    session = Session(run, folder / f"work-{run.name}")
    session.trainer.client = TrainerHere(folder, run.name, dtype)  # pyright: ignore[reportAttributeAccessIssue]
    return session


def commit_batch(run: Run, iteration: int) -> ArtifactRef:
    """A batch of random tokens, the same in each run."""
    rows = [{**row, "prompt_tokens": [token % 250 for token in row["prompt_tokens"]],
             "completion_tokens": [token % 250 for token in row["completion_tokens"]]}
            for row in world.rollout_rows(4, 2, seed=iteration)]  # fmt: skip
    folder = run.folder("rl", iteration, "batch/round-0")
    file = write_bytes(run.store, folder, "a1", "batch.parquet", to_parquet([fill(row, BATCH) for row in rows], BATCH))
    metrics = {"empty_groups": [], "rollout/num_tokens_stale": 0}
    manifest = Manifest(
        run.name, "rl", iteration, "batch/round-0", {}, "0", {}, [file], metrics, None, "x", MOMENT, MOMENT
    )
    return commit(run.store, folder, manifest)[0]


async def made(folder: Path, *sets: str, num_iterations: int = ITERATIONS) -> Run:
    """A run of so many iterations, and what it pruned meanwhile."""
    session = session_of(create_or_continue(config(folder, *sets)), folder)
    tokenizer = await base_tokenizer(session)
    previous = (await base_policy(session, tokenizer=tokenizer.ref)).ref
    manifest = Manifest("a", "base", 0, "evaluation", {}, "0", {}, [], {}, 0, "x", MOMENT, MOMENT)
    commit(
        session.run.store, session.run.folder("base", 0, "evaluation"), manifest
    )  # of what RL starts from; nothing is sampled here
    for iteration in range(num_iterations):
        batch = commit_batch(session.run, iteration)
        trained = await train(session, iteration=iteration, batch=batch)
        part = {"iteration": iteration, "batch": batch, "previous": previous, "metrics": trained.metrics}
        previous = (await checkpoint(session, **part)).ref
        metrics = {**trained.metrics, "rollout/reward_mean": -iteration, "rollout/num_tokens": 100}
        await commit_iteration(session, iteration, {"batch": batch, "policy": previous}, metrics)
    await session.close()
    return session.run


def bits(run: Run, version: int) -> dict[str, str]:
    return {file.plain_name: file.sha256 for file in run.policy(version)[1].files}


def present(run: Run) -> list[int]:
    """The versions whose policies have their files."""
    return [version for version in range(1, ITERATIONS + 1) if not is_pruned(run.store, run.policy(version)[0].folder)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sets", "num_replayed"), [(PRUNED, 3), (PRUNED[:1], 1)], ids=["from the start", "from a state"]
)
async def test_a_fork_of_a_pruned_policy_has_the_bits_of_a_run_that_kept_it(
    tmp_path: Path, sets: list[str], num_replayed: int
) -> None:
    whole, run = await made(tmp_path / "whole"), await made(tmp_path / "pruned", *sets)
    assert present(whole) == [*range(1, ITERATIONS + 1)] and present(run) == [ITERATIONS]
    for version in range(1, ITERATIONS + 1):
        assert bits(run, version) == bits(whole, version)
    child = fork(run, 2, override_config(run.config, ["run=c"]))
    assert pruned_versions(child, 3) == [3]
    session = session_of(child, tmp_path / "pruned")
    assert not (await restore_policy(session, version=3)).cached
    assert session.trainer.client.trained == [f"runs/a/rl/{at:05d}" for at in range(3 - num_replayed, 3)]  # type: ignore[attr-defined]
    assert present(run) == [3, ITERATIONS] and pruned_versions(child, 3) == []
    assert audit.verify(child)[1] == [] and audit.unreferenced(child) == audit.unreferenced(run) == []
    again = await restore_policy(session, version=3)
    assert again.cached and again.ref == run.policy(3)[0]
    await session.close()
    prune(run)
    assert present(run) == [3, ITERATIONS]


@pytest.mark.slow
async def test_killed_before_any_file_was_put_back_it_is_whole_after_the_next_try(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = await made(tmp_path, *PRUNED)
    folder = run.policy(2)[0].folder
    wanted = len(run.policy(2)[1].files)
    for nth in range(wanted + 1):
        child = fork(open_existing(open_store(run.store.url), "a"), 1, override_config(run.config, ["run=c"]))
        session, count = session_of(child, tmp_path), iter(range(100))
        put_file, delete = child.store.put_file, child.store.delete

        def put_or_die(
            key: str, source: Path, nth: int = nth, put_file: object = put_file, count: object = count
        ) -> None:
            if next(count) == nth:  # type: ignore[call-overload]
                raise Killed
            put_file(key, source)  # type: ignore[operator]

        def delete_or_die(key: str, delete: object = delete) -> None:
            if key.endswith("/pruned.json"):
                raise Killed
            delete(key)  # type: ignore[operator]

        monkeypatch.setattr(child.store, "put_file", put_or_die)
        monkeypatch.setattr(child.store, "delete", delete_or_die)
        with pytest.raises(Killed):
            await restore_policy(session, version=2)
        await session.close()
        assert is_pruned(run.store, folder) and audit.verify(child)[1] == []
        assert sum(run.store.exists(f"{folder}/{file.name}") for file in run.policy(2)[1].files) >= min(nth, wanted)
    session = session_of(open_existing(run.store, "c"), tmp_path)
    await restore_policy(session, version=2)
    await session.close()
    assert present(run) == [2, ITERATIONS] and audit.verify(session.run)[1] == []


@pytest.mark.slow
async def test_two_forks_make_it_again_at_the_same_time(tmp_path: Path) -> None:
    run = await made(tmp_path, *PRUNED)
    sessions = [session_of(fork(run, 1, override_config(run.config, [f"run={name}"])), tmp_path) for name in ("c", "d")]
    results = await asyncio.gather(*(restore_policy(session, version=2) for session in sessions))
    assert [result.cached for result in results] == [False, False]
    for session in sessions:
        await session.close()
        assert audit.verify(session.run)[1] == [] and audit.unreferenced(session.run) == []
    assert present(run) == [2, ITERATIONS]


async def test_a_trainer_that_makes_other_bits_writes_nothing_and_both_hashes_are_named(tmp_path: Path) -> None:
    run = await made(tmp_path, *PRUNED)
    child = fork(run, 1, override_config(run.config, ["run=c"]))
    session, before = session_of(child, tmp_path, dtype="bfloat16"), run.store.list(run.root)
    wanted = bits(run, 2)["config.json"]
    with pytest.raises(
        StoreError, match=rf"its config\.json has sha256 [0-9a-f]{{64}}, where its manifest has {wanted}\. Nothing"
    ):
        await restore_policy(session, version=2)
    await session.close()
    assert run.store.list(run.root) == before and present(run) == [ITERATIONS]
    assert audit.unreferenced(child) == []


@pytest.mark.slow
async def test_an_export_makes_it_again_and_leaves_the_store_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = await made(tmp_path, *PRUNED)
    monkeypatch.chdir(tmp_path)
    trainer = TrainerHere(tmp_path, "a")

    async def ready(seat: TrainerSeat) -> TrainerHere:
        seat.client = trainer  # pyright: ignore[reportAttributeAccessIssue]
        return trainer

    monkeypatch.setattr(TrainerSeat, "ready", ready)
    assert await export_policy(run.config, 4, tmp_path / "policy") == 4
    assert {path.name for path in (tmp_path / "policy").iterdir()} == set(bits(run, 4))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "policy", dtype=torch.float32)
    assert model.config.hidden_size == 32
    assert present(run) == [ITERATIONS] and audit.unreferenced(run) == [] and audit.verify(run)[1] == []
    assert await export_policy(run.config, None, tmp_path / "newest") == ITERATIONS
    assert len(trainer.trained) == 4, "what is there is copied"


@pytest.mark.slow
async def test_differences_keep_their_bases_and_come_back_with_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = await made(tmp_path / "whole")
    run = await made(tmp_path / "pruned", "checkpoint.full_every=3", "checkpoint.keep_policies_last=2")
    assert present(run) == [3, 4, 5, 6], "5 is a difference to 4, and 4 to 3, which is whole"
    assert audit.verify(run)[1] == [] and audit.unreferenced(run) == []
    monkeypatch.chdir(tmp_path)
    trainer = TrainerHere(tmp_path / "pruned", "a")

    async def ready(seat: TrainerSeat) -> TrainerHere:
        seat.client = trainer  # pyright: ignore[reportAttributeAccessIssue]
        return trainer

    with monkeypatch.context() as patched:
        patched.setattr(TrainerSeat, "ready", ready)
        assert await export_policy(run.config, 2, tmp_path / "policy") == 2
    assert {path.name: file_sha256(path) for path in (tmp_path / "policy").iterdir()} == bits(whole, 2)
    child = fork(run, 1, override_config(run.config, ["run=c"]))
    assert pruned_versions(child, 2) == [2]
    session = session_of(child, tmp_path / "pruned")
    await restore_policy(session, version=2)
    await session.close()
    assert present(run) == [1, 2, 3, 4, 5, 6] and audit.verify(child)[1] == []
    again = materialise(run.store, run.policy(2)[0], tmp_path / "again")
    assert {path.name: file_sha256(path) for path in again.iterdir()} == bits(whole, 2)
    prune(run)
    assert present(run) == [1, 2, 3, 4, 5, 6], "the fork begins from 2, which is a difference to 1"
