"""What preflight says of a damaged model folder, and what of a folder is copied.

The damages one by one are in tests/fuzz.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from huggingface_hub.utils import filter_repo_objects
from safetensors.torch import load_file, save_file

from rlpipe.base.errors import StoreError, UserError
from rlpipe.checks.preflight import preflight
from rlpipe.config.model import ModelConfig
from rlpipe.config.pipeline import PipelineConfig
from rlpipe.config.source import read_config
from rlpipe.loop.session import Session
from rlpipe.models.folder import tensor_shapes, weight_files
from rlpipe.rewards.pool import check_rewards
from rlpipe.stages.base import base_policy, base_tokenizer
from rlpipe.stages.model_source import HUB_COPIES, HUB_FILES, model_folder
from rlpipe.store.artifacts import file_sha256
from rlpipe.store.opening import create_or_continue
from tests.fuzz.models import change, make_folder
from tests.paths import PRESETS


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("model") / "m")


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "m"))


def with_model(folder: Path, *sets: str) -> PipelineConfig:
    rows = folder.parent / "rows.jsonl"
    rows.write_text(
        "".join(json.dumps({"prompt": "What is it? " * (1 + 30 * (n == 7)), "answer": "it"}) + "\n" for n in range(20))
    )
    words = [f"data.words.source={rows}", "data.words.part=all", "rl.rewards={exact = 1.0}"]
    base = ["run=a", f"store=file://{folder.parent}/store", f"model.path={folder}", *words, "sft.num_steps=0"]
    return read_config("tiny", [*base, "model.context_tokens_max=200", "rl.completion_tokens_max=20", *sets], PRESETS)


@pytest.mark.slow
def test_faults_of_the_model_its_tokenizer_and_the_prompts_are_said_at_once(folder: Path) -> None:
    preflight(with_model(folder, "model.context_tokens_max=512"))
    with pytest.raises(UserError, match=r"data set words: prompt words/7 has \d+ tokens; .*a larger context"):
        preflight(with_model(folder))
    change(folder, "config.json", num_attention_heads=3)
    with pytest.raises(UserError) as refused:
        preflight(with_model(folder, "model.chat_template='{{ 1 / 0 }}'"))
    first, second = str(refused.value).splitlines()
    assert (
        f"model.path={folder}: " in first
        and "the chat template raises an error for a conversation (ZeroDivisionError" in second
    )
    assert not (folder.parent / "store").exists()


async def test_only_the_files_of_a_model_and_a_tokenizer_are_copied(folder: Path, tmp_path: Path) -> None:
    for name in (
        ".env",
        ".netrc",
        "pytorch_model.bin",
        "code.py",
        "README.md",
        "adapter_model.safetensors",
        "secrets.json",
    ):
        (folder / name).write_text("planted")
    session = Session(create_or_continue(with_model(folder)), tmp_path / "work")
    tokenizer = await base_tokenizer(session)
    policy = await base_policy(session, tokenizer=tokenizer.ref)
    of_tokenizer = {"tokenizer.json", "tokenizer_config.json"}
    assert {record.plain_name for record in session.run.manifest(tokenizer.ref).files} == of_tokenizer
    assert {record.plain_name for record in session.run.manifest(policy.ref).files} == {
        *of_tokenizer,
        "config.json",
        "generation_config.json",
        "model.safetensors",
    }
    assert not [path for path in (tmp_path / "store").rglob("*") if path.is_file() and b"planted" in path.read_bytes()]


def test_weights_are_those_of_the_index(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    halves = [dict(list(tensors.items())[::2]), dict(list(tensors.items())[1::2])]
    for number, half in enumerate(halves):
        save_file(half, folder / f"model-{number}.safetensors", {"format": "pt"})
    save_file({"other": torch.zeros(1)}, folder / "consolidated.safetensors")
    weight_map = {name: f"model-{number}.safetensors" for number, half in enumerate(halves) for name in half}
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    assert tensor_shapes(folder).keys() == tensors.keys()
    for odd in (
        {},
        {"weight_map": []},
        {"weight_map": {"x": "../secret.safetensors"}},
        {"weight_map": {"x": "gone.safetensors"}},
        [],
    ):
        index.write_text(json.dumps(odd))
        with pytest.raises(StoreError, match=r"is no index of weights|has no "):
            weight_files(folder)


def in_the_hubs_cache(folder: Path, cache: Path) -> Path:
    """A folder as huggingface_hub keeps it: links to files that are named after their content."""
    snapshot, blobs = cache / "models--a--b/snapshots/1234", cache / "models--a--b/blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for path in folder.iterdir():
        (blobs / file_sha256(path)).write_bytes(path.read_bytes())
        (snapshot / path.name).symlink_to(f"../../blobs/{file_sha256(path)}")
    return snapshot


def test_links_lead_into_the_folder_or_the_hubs_cache_and_nowhere_else(folder: Path, tmp_path: Path) -> None:
    snapshot = in_the_hubs_cache(folder, tmp_path / "elsewhere")
    (tmp_path / "by_hand").mkdir()  # of files in the cache
    for path in snapshot.iterdir():
        (tmp_path / "by_hand" / path.name).symlink_to(path)
    (tmp_path / "home").symlink_to(tmp_path / "elsewhere")  # HF_HOME
    (folder / "vocab.json").symlink_to("config.json")
    (tmp_path / "linked").symlink_to(folder)
    fine = (snapshot, tmp_path / "by_hand", tmp_path / "home/models--a--b/snapshots/1234", folder, tmp_path / "linked")
    for each in fine:
        assert model_folder(ModelConfig(path=str(each))) == each
    (tmp_path / "credentials").write_text("planted")
    blobs = tmp_path / "elsewhere/models--a--b/blobs"
    (blobs / "0123").symlink_to(tmp_path / "credentials")
    (snapshot / "vocab.json").symlink_to("../../blobs/0123")
    for each in fine[:3]:
        if each == tmp_path / "by_hand":
            (each / "vocab.json").symlink_to(snapshot / "vocab.json")
        with pytest.raises(
            UserError, match=r"model\.path=.*: vocab\.json is a link to .*/credentials, outside of that folder"
        ):
            model_folder(ModelConfig(path=str(each)))


async def test_a_link_that_came_since_is_not_copied(folder: Path, tmp_path: Path) -> None:
    session = Session(create_or_continue(with_model(folder)), tmp_path / "work")
    (tmp_path / "credentials").write_text("planted")
    (folder / "vocab.json").symlink_to(tmp_path / "credentials")
    with pytest.raises(UserError, match=r"vocab\.json is a link to "):
        await base_tokenizer(session)
    assert not [path for path in (tmp_path / "store").rglob("*") if path.is_file() and b"planted" in path.read_bytes()]


def test_a_reward_model_with_a_link_out_is_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "credentials").write_text("planted")
    (folder / "vocab.json").symlink_to(tmp_path / "credentials")
    with pytest.raises(UserError, match=r"vocab\.json is a link to .*/credentials"):
        check_rewards({f"hf:{folder}": 1.0}, {}, 10.0)


def test_of_the_hub_only_what_is_read_is_downloaded() -> None:
    """Not the same weights once more, for other programs: they are as large."""
    read = [
        "config.json",
        "chat_template.jinja",
        "model-00001-of-00002.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
    ]
    copies = ["consolidated.safetensors", "onnx/config.json", "original/params.json", "pytorch_model.bin", "README.md"]
    assert list(filter_repo_objects([*read, *copies], allow_patterns=HUB_FILES, ignore_patterns=HUB_COPIES)) == read
