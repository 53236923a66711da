"""The reference of the KL as a model of its own: copied once, the same
vocabulary, each run's own in a fork."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlpipe.base.errors import UserError
from rlpipe.base.hashing import sha256_of
from rlpipe.base.manifests import Manifest, StageResult
from rlpipe.base.references import ArtifactRef
from rlpipe.checks import preflight
from rlpipe.checks.content import Content
from rlpipe.checks.preflight import look_at
from rlpipe.config.pipeline import PipelineConfig
from rlpipe.config.source import override_config, read_config
from rlpipe.loop.session import Session
from rlpipe.stages import model_source
from rlpipe.stages.base import base_reference, check_vocabulary
from rlpipe.stages.training import other_reference, rl_job
from rlpipe.store.artifacts import commit, write_bytes
from rlpipe.store.opening import create_or_continue, fork
from rlpipe.store.progress import Progress
from rlpipe.store.run import Run
from tests.paths import PRESETS
from tests.store.test_run import commit_iterations

VOCABULARY = {"a": 0, "b": 1}
MOMENT = "2026-03-04T05:06:07.000+00:00"


def tokenizer(vocabulary: dict[str, int], *added: tuple[str, int]) -> bytes:
    entries = [{"content": content, "id": number} for content, number in added]
    return json.dumps({"model": {"vocab": vocabulary}, "added_tokens": entries}).encode()


def config(tmp_path: Path, *sets: str) -> PipelineConfig:
    where = ["run=a", f"store=file://{tmp_path}/store", "tracking.uri=", "sft.num_steps=0", "data.words.rows_max=60"]
    return read_config("tiny", [*where, *sets], PRESETS)


def with_kl(tmp_path: Path, reference: str | Path, *sets: str) -> PipelineConfig:
    return config(tmp_path, "rl.kl=loss", "rl.kl_coef=0", f"rl.reference={reference}", *sets)


def committed(run: Run, phase: str, stage: str, files: dict[str, bytes]) -> ArtifactRef:
    folder = run.folder(phase, 0, stage)
    records = [write_bytes(run.store, folder, "a1", name, data) for name, data in files.items()]
    manifest = Manifest(run.name, phase, 0, stage, {}, sha256_of({}), {}, records, {}, 0, "x", MOMENT, MOMENT)
    return commit(run.store, folder, manifest)[0]


def made(config: PipelineConfig, vocabulary: dict[str, int] = VOCABULARY) -> Run:
    """A run with a base model, which is no more than its files."""
    run = create_or_continue(config)
    committed(run, "base", "tokenizer", {"tokenizer.json": tokenizer(vocabulary)})
    committed(
        run,
        "base",
        "policy",
        {"config.json": b"{}", "model.safetensors": run.name.encode(), "tokenizer.json": tokenizer(vocabulary)},
    )
    return run


def folder_of(tmp_path: Path, weights: bytes = b"first") -> Path:
    folder = tmp_path / "model"
    folder.mkdir(exist_ok=True)
    for name, data in (
        ("config.json", b"{}"),
        ("tokenizer.json", tokenizer(VOCABULARY)),
        ("model.safetensors", weights),
    ):
        (folder / name).write_bytes(data)
    return folder


async def prepared(run: Run, tmp_path: Path) -> StageResult:
    (tmp_path / "work").mkdir(exist_ok=True)
    session = Session(run, tmp_path / "work")
    return await base_reference(session, tokenizer=run.committed("base", 0, "tokenizer")[0])


async def test_a_reference_is_copied_once_whatever_becomes_of_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_source, "tensor_shapes", lambda folder: {})
    run = made(with_kl(tmp_path, folder_of(tmp_path)))
    assert not Progress(run).starts_rl
    first = await prepared(run, tmp_path)
    folder_of(tmp_path, b"another")
    again = await prepared(run, tmp_path)
    assert (again.ref, again.cached) == (first.ref, True) and Progress(run).starts_rl
    assert run.committed("base", 0, "reference")[1].file("model.safetensors").bytes == len(b"first")
    assert rl_job(run, 0, first.ref).reference == other_reference(run, 0) == first.ref


async def test_the_newest_policy_of_a_run_is_a_reference_and_stays_it(tmp_path: Path) -> None:
    source = made(config(tmp_path, "run=source"))
    run = made(with_kl(tmp_path, "run:source"))
    first = await prepared(run, tmp_path)
    assert first.metrics["source"] == source.policy(0)[0].as_json() | {"run": "source", "version": 0}
    commit_iterations(source, 1)
    assert (await prepared(run, tmp_path)).ref == first.ref
    assert run.committed("base", 0, "reference")[1].file("model.safetensors").bytes == len(b"source")
    with pytest.raises(UserError, match=r"rl\.reference='run:nobody': no run 'nobody'"):
        await prepared(made(with_kl(tmp_path, "run:nobody", "run=b")), tmp_path)


def test_the_reference_is_what_rl_starts_from_where_none_is_named(tmp_path: Path) -> None:
    run = made(config(tmp_path, "rl.kl=loss", "rl.kl_coef=0.1"))
    assert other_reference(run, 0) is None and rl_job(run, 0, run.policy(0)[0]).reference == run.policy(0)[0]
    plain = made(config(tmp_path, "run=b"))
    assert rl_job(plain, 0, plain.policy(0)[0]).reference is None


async def test_a_fork_has_its_parent_s_reference_or_its_own_and_replays_with_the_parent_s(tmp_path: Path) -> None:
    made(config(tmp_path, "run=source"))
    parent = made(with_kl(tmp_path, "run:source"))
    own = (await prepared(parent, tmp_path)).ref
    commit_iterations(parent, 2)
    same = fork(parent, 0, override_config(parent.config, ["run=b"]))
    assert other_reference(same, 0) == other_reference(same, 1) == own
    made(config(tmp_path, "run=newer"))
    other = fork(parent, 0, override_config(parent.config, ["run=c", "rl.reference=run:newer"]))
    assert not Progress(other).has_frozen("reference")
    newer = (await prepared(other, tmp_path)).ref
    assert newer.folder == "runs/c/base/reference" and (other_reference(other, 0), other_reference(other, 1)) == (
        own,
        newer,
    )


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (tokenizer({"a": 1, "b": 0}), "2 tokens, for example 'a'"),
        (tokenizer({"a": 0}), "1 tokens, for example 'b'"),
        (tokenizer(VOCABULARY, ("<end>", 2)), "1 tokens, for example '<end>'"),
        (b"[]", "cannot be compared"),
    ],
)
def test_another_vocabulary_is_refused_by_name(other: bytes, said: str) -> None:
    check_vocabulary("rl.reference='x'", tokenizer(VOCABULARY), tokenizer({"b": 1}, ("a", 0)))
    with pytest.raises(UserError, match=rf"rl\.reference='x': .*{said}"):
        check_vocabulary("rl.reference='x'", tokenizer(VOCABULARY), other)


@pytest.mark.slow
def test_preflight_refuses_a_reference_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_source, "tensor_shapes", lambda folder: {})
    monkeypatch.setattr(Content, "tried", lambda content, field, folder: "tried")
    (fault,) = look_at(Content(with_kl(tmp_path, folder_of(tmp_path)))).faults
    assert "rl.reference=" in fault and "its vocabulary differs in" in fault
    run = made(with_kl(tmp_path, "run:gone"))
    with pytest.raises(UserError, match=r"rl\.reference='run:gone': no run 'gone'"):
        preflight.preflight(run.config)
    with pytest.raises(UserError, match=r"rl\.reference='/nowhere': there is no such folder"):
        model_source.source_of(with_kl(tmp_path, "/nowhere"), "rl.reference", "/nowhere")


@pytest.mark.parametrize(
    ("sets", "error"),
    [
        (["rl.reference=run:b"], r"rl\.reference='run:b': no KL to a reference is computed; set rl\.kl"),
        (["rl.kl_coef=0.1"], r"rl\.kl_coef=0\.1: it is the weight of a KL that is not computed"),
        (["rl.kl=loss", "rl.reference=run:a"], r"rl\.reference='run:a': name another run"),
        (["stop.kl_max=0.1"], r"set rl\.kl \(with rl\.kl_coef = 0 it changes nothing\)"),
    ],
)
def test_what_does_not_go_together(tmp_path: Path, sets: list[str], error: str) -> None:
    with pytest.raises(UserError, match=error):
        config(tmp_path, *sets)
    config(tmp_path, "rl.kl=loss", "rl.kl_estimator=k1", "stop.kl_max=0.1")
