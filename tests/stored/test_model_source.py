"""Models of S3 and of other runs: fetched once and whole, verified, recorded, refused with the
reason before anything large moves."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save

from rlpipe.base.errors import UserError
from rlpipe.config.pipeline import PipelineConfig
from rlpipe.config.source import override_config
from rlpipe.extras.plan.report import PlannedContent
from rlpipe.loop.session import Session, work_dir_of
from rlpipe.models.whole import whole_policy
from rlpipe.stages.base import base_policy, base_tokenizer
from rlpipe.stages.model_source import place_of_model, source_of, with_trained_template
from rlpipe.store import outside
from rlpipe.store.backend import Store, open_store
from rlpipe.store.local_copy import materialise
from rlpipe.store.opening import create_or_continue, fork
from rlpipe.store.run import Run
from rlpipe.store.transfer import PART_BYTES
from rlpipe.stored.remaking import export_policy, restore_policy
from tests.deltas_world import read_folder
from tests.s3_world import S3Proxy, S3Server
from tests.stages.test_reference import VOCABULARY, config, made, tokenizer
from tests.store.test_run import commit_iterations
from tests.stored import test_remaking

WEIGHTS = save({"w": np.zeros((3, PART_BYTES // 4), dtype=np.float32)})  # three parts, and a header
FILES = {"config.json": b'{"a": 1}', "tokenizer.json": tokenizer(VOCABULARY), "model.safetensors": WEIGHTS}
STRAY = {"README.md": b"x", "consolidated.safetensors": b"y", "onnx/model.onnx": b"z", "pytorch_model.bin": b"b"}


@pytest.fixture(autouse=True)
def of_another_process() -> Iterator[None]:
    """What a process remembers to have verified is forgotten between two tests."""
    outside._verified.clear()
    yield
    outside._verified.clear()


def on_s3(server: S3Server, files: dict[str, bytes]) -> Store:
    """A folder of a bucket with these files."""
    store = open_store(server.url())
    for name, data in files.items():
        store.put(name, data)
    return store


def from_s3(tmp_path: Path, url: str, *sets: str) -> PipelineConfig:
    scratch = ["model.context_tokens_max=128", f"scratch={tmp_path}/scratch"]
    return config(tmp_path, f'model.path="{url}"', *scratch, *sets)


def fetches(proxy: S3Proxy) -> list[str]:
    return [
        request.path.rsplit("/", 1)[-1] for request in proxy.requests if request.method == "GET" and not request.query
    ]


def test_a_model_on_s3_is_fetched_whole_once_for_all_runs(
    s3_server: S3Server, s3_proxy: S3Proxy, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = on_s3(s3_server, FILES | STRAY)
    folder = source_of(from_s3(tmp_path, f"{store.url}/")).folder
    assert {path.name: path.read_bytes() for path in folder.iterdir() if not path.name.startswith(".")} == FILES
    assert "3 files, 25.2 MB" in caplog.text and set(fetches(s3_proxy)) == set(FILES)
    outside._verified.clear()
    s3_proxy.requests.clear()
    assert source_of(from_s3(tmp_path, store.url, "run=b", "seed=3")).folder == folder and fetches(s3_proxy) == []
    assert source_of(override_config(from_s3(tmp_path, store.url), []), "rl.reference", store.url).folder == folder


def test_what_was_cut_short_damaged_or_changed_is_fetched_and_no_more(
    s3_server: S3Server, s3_proxy: S3Proxy, tmp_path: Path
) -> None:
    store = on_s3(s3_server, FILES)
    folder = source_of(from_s3(tmp_path, store.url)).folder

    def again() -> tuple[Path, int]:
        outside._verified.clear()
        s3_proxy.requests.clear()
        found = source_of(from_s3(tmp_path, store.url)).folder
        return found, sum(
            request.answered_bytes for request in s3_proxy.requests if request.path.endswith(".safetensors")
        )

    weights, partial = folder / "model.safetensors", folder / ".model.safetensors.partial"
    weights.rename(partial)
    with partial.open("r+b") as file:  # killed after two parts and a half
        file.truncate(PART_BYTES * 5 // 2)
    assert (
        again() == (folder, len(WEIGHTS) - PART_BYTES * 5 // 2)
        and weights.read_bytes() == WEIGHTS
        and not partial.exists()
    )
    weights.write_bytes(WEIGHTS[:-1] + b"x")
    assert again() == (folder, len(WEIGHTS)) and weights.read_bytes() == WEIGHTS
    (folder / outside.FETCHED).write_text("{")
    assert again() == (folder, len(WEIGHTS))
    store.put("config.json", b'{"a": 2}')  # as large as the one before
    changed_folder, _ = again()
    assert changed_folder != folder and (changed_folder / "config.json").read_bytes() == b'{"a": 2}'


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({}, "there is no such folder in the bucket"),
        ({"config.json": b"{}", "model.safetensors": WEIGHTS}, "no model in HF format: tokenizer.json is missing"),
        ({"config.json": b"{}", "tokenizer.json": b"{}"}, r"\*\.safetensors is missing"),
        (FILES | {"delta.json": b"{}"}, "stored as a difference to another policy: `rlpipe export`"),
        (FILES | {"model.safetensors": WEIGHTS[:-100]}, "is torn"),
    ],
    ids=["nothing", "no-tokenizer", "no-weights", "a-difference", "torn"],
)
def test_what_is_no_model_on_s3_is_refused(
    s3_server: S3Server, tmp_path: Path, files: dict[str, bytes], said: str
) -> None:
    url = on_s3(s3_server, files).url
    with pytest.raises(UserError, match=rf"model\.path='{url}'.*{said}"):
        source_of(from_s3(tmp_path, url))


def test_what_cannot_be_fetched_is_refused_with_the_fix(
    s3_server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = on_s3(s3_server, FILES).url
    with pytest.raises(UserError, match=r"is a GGUF file: download it"):
        source_of(from_s3(tmp_path, f"{url}/x.gguf"))
    with pytest.raises(UserError, match=r"write it as s3://bucket/path"):
        source_of(from_s3(tmp_path, "s3://"))
    with monkeypatch.context() as full:
        full.setattr(outside.shutil, "disk_usage", lambda folder: type("", (), {"free": 1000}))
        with pytest.raises(UserError, match=r": 25\.2 MB are to be fetched, and .* has 0\.0 MB left; set scratch"):
            source_of(from_s3(tmp_path, url))
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "another")
    with pytest.raises(UserError, match=rf"model\.path='{url}': cannot be read .*AWS_SECRET_ACCESS_KEY"):
        source_of(from_s3(tmp_path, url))


def test_a_plan_reads_the_config_alone(s3_server: S3Server, s3_proxy: S3Proxy, tmp_path: Path) -> None:
    store = on_s3(s3_server, FILES)
    planned = from_s3(tmp_path, store.url)
    place, found = place_of_model(planned)
    assert place.startswith(f"{store.url}, 3 files, 25.2 MB; the run fetches it to {tmp_path}/scratch/models/")
    assert found == {"a": 1} and fetches(s3_proxy) == ["config.json"] and not (tmp_path / "scratch").exists()
    assert PlannedContent(planned).model() == f"model: {place}"
    made(config(tmp_path, "run=source"))
    place, found = place_of_model(config(tmp_path, "model.path=run:source", "model.context_tokens_max=128"))
    assert place.startswith("version 0 of run source, ") and found == {}


def opened(run: Run, tmp_path: Path) -> Session:
    (tmp_path / "work").mkdir(exist_ok=True)
    return Session(run, tmp_path / "work")


async def test_a_run_starts_from_the_newest_policy_of_another_and_stays_with_it(tmp_path: Path) -> None:
    source = made(config(tmp_path, "run=source"))
    wanted = config(tmp_path, "model.path=run:source", "model.context_tokens_max=128", f"scratch={tmp_path}/scratch")
    session = opened(run := create_or_continue(wanted), tmp_path)
    tokens = await base_tokenizer(session)
    first = await base_policy(session, tokenizer=tokens.ref)
    assert run.policy(0)[1].metrics["source"] == source.policy(0)[0].as_json() | {"run": "source", "version": 0}
    assert run.policy(0)[1].file("model.safetensors").bytes == len(b"source")
    assert not (work_dir_of(wanted) / "source").exists()
    commit_iterations(source, 1)  # it moved on
    again = await base_policy(opened(create_or_continue(wanted), tmp_path), tokenizer=tokens.ref)
    assert (again.ref, again.cached) == (first.ref, True)


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("run:nobody", r"model\.path='run:nobody': no run 'nobody' in .*\(runs: early\)"),
        ("run:early", r"model\.path='run:early': the SFT of that run is not complete, so it has no policy yet"),
        ("run:a/b", r"model\.path='run:a/b': run 'a/b': a run name is a folder name"),
        ("run:", r"model\.path='run:': name another run, as run:NAME"),
        ("run:a", r"model\.path='run:a': name another run, as run:NAME"),
    ],
)
def test_a_run_that_has_no_policy_is_refused(tmp_path: Path, path: str, said: str) -> None:
    create_or_continue(config(tmp_path, "run=early"))
    with pytest.raises(UserError, match=said):
        source_of(config(tmp_path, f"model.path={path}", "model.context_tokens_max=128"))


LORA, DELTAS = ["model.adapter=lora", "model.adapter_rank=4"], ["checkpoint.full_every=4"]


def from_run(tmp_path: Path, name: str, *sets: str) -> PipelineConfig:
    return test_remaking.config(tmp_path, "run=b", f"model.path=run:{name}", f"scratch={tmp_path}/scratch", *sets)


@pytest.mark.parametrize("sets", [LORA, DELTAS], ids=["an adapter", "a difference"])
async def test_a_policy_that_is_not_stored_whole_is_that_of_an_export(tmp_path: Path, sets: list[str]) -> None:
    source = await test_remaking.made(tmp_path, *sets, num_iterations=2)
    policy, manifest = source.policy(2)
    assert "model.safetensors" not in {file.plain_name for file in manifest.files}
    session = opened(create_or_continue(wanted := from_run(tmp_path, "a")), tmp_path)
    tokens = await base_tokenizer(session)
    await base_policy(session, tokenizer=tokens.ref)
    own, own_manifest = session.run.policy(0)
    assert own_manifest.metrics["source"] == policy.as_json() | {"run": "a", "version": 2}
    await export_policy(source.config, None, tmp_path / "exported")
    files = read_folder(materialise(session.run.store, own, tmp_path / "own"))
    base = read_folder(materialise(source.store, source.policy(0)[0], tmp_path / "base"))
    assert files == read_folder(tmp_path / "exported") and files["model.safetensors"] != base["model.safetensors"]
    assert not (work_dir_of(wanted) / "source").exists()
    assert place_of_model(wanted)[0] == "version 2 of run a, 0.1 MB"


async def test_a_copy_with_the_template_that_trained_is_made_once_beside_the_policys(tmp_path: Path) -> None:
    source = await test_remaking.made(tmp_path, num_iterations=1)
    model = source.config.model.model_copy(update={"chat_template_args": {"style": "short"}})
    plain = whole_policy(source.store, source.policy(1)[0], tmp_path / "copies")
    before = read_folder(plain)
    with ThreadPoolExecutor(4) as starts:
        folders = set(starts.map(lambda _: with_trained_template(plain, model), range(4)))
    assert len(folders) == 1 and folders.isdisjoint({plain}) and read_folder(plain) == before
    first = read_folder(folders.pop())
    assert b"style" in first["chat_template.jinja"] and first["model.safetensors"] == before["model.safetensors"]
    assert read_folder(with_trained_template(plain, model)) == first
    assert with_trained_template(plain, source.config.model) == plain
    assert sorted(path.name for path in (tmp_path / "copies").iterdir()) == sorted(
        [plain.name, f"{plain.name}-trained"]
    )


async def test_a_run_whose_newest_policy_was_pruned_is_refused_until_it_is_made_again(tmp_path: Path) -> None:
    parent = await test_remaking.made(tmp_path, *test_remaking.PRUNED, num_iterations=2)
    child = fork(parent, 0, override_config(parent.config, ["run=c"]))  # it did not begin to work yet
    said = (
        "='run:c': its newest policy, version 1, was pruned; `rlpipe export a --version 1 --to DIR` makes it "
        "again in a folder, .*"
    )
    for read in (source_of, place_of_model):
        with pytest.raises(UserError, match=f"^model\\.path{said}$"):
            read(from_run(tmp_path, "c"))
    with pytest.raises(UserError, match=rf"^rl\.reference{said}"):
        source_of(from_run(tmp_path, "c"), "rl.reference", "run:c")
    assert not (tmp_path / "scratch").exists()
    await restore_policy(session := test_remaking.session_of(child, tmp_path), version=1)
    await session.close()
    assert source_of(from_run(tmp_path, "c")).policy == parent.policy(1)[0].as_json() | {"run": "c", "version": 1}
