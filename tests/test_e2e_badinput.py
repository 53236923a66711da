"""Bad input ends in a message that names field, file or row and the fix: exit code 2, and nothing is written."""

from __future__ import annotations

import json
import socket

import pytest

from tests.conftest import S3Server
from tests.pipeline import Folder

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    path = tmp_path_factory.mktemp("bad")
    (path / "no_prompt.jsonl").write_text(
        json.dumps({"prompt": "x", "answer": "y"}) + "\n" + json.dumps({"answer": "y"}) + "\n"
    )
    (path / "empty_model").mkdir()
    (path / "a_file").write_text("not a folder")
    return Folder(path, f"file://{path}/store")


def refused(folder: Folder, arguments: list[str], *needles: str) -> None:
    code, output = folder.rlpipe(*arguments, timeout_s=120)
    assert code == 2, output
    for needle in needles:
        assert needle in output, output
    assert "Traceback" not in output
    assert not (folder.path / "store").exists()


@pytest.mark.parametrize(
    ("override", "needles"),
    [
        ("rl.no_such=1", ["rl.no_such=1", "no such field"]),
        ("rl.temperature=-1.0", ["rl.temperature=-1.0"]),
        ("rl.group_size=1", ["group_size=1", "2 or more"]),
        ("data.words.source=missing.jsonl", ["missing.jsonl"]),
        ("data.words.source=no_prompt.jsonl", ["no_prompt.jsonl", "2", "prompt"]),
        ("data.words.source=reasoning_gym:no_such", ["no_such"]),
        ("model.path=empty_model", ["model.path", "config.json"]),
        ("rl.rewards={\"no_package:f\" = 1.0}", ["no_package"]),
        ("rl.filters={no_filter = 1.0}", ["no_filter", "nonzero_std"]),
        ("trainer.nodes=2", ["one node"]),
    ],
)  # fmt: skip
def test_a_bad_setting(folder: Folder, override: str, needles: list[str]) -> None:
    refused(folder, folder.run_arguments("a", override), *needles)


def test_an_unknown_preset_and_a_run_name_with_a_slash(folder: Folder) -> None:
    refused(folder, ["run", "nope"], "nope", "tiny")
    refused(folder, folder.run_arguments("a/b"), "run='a/b'", "slash")


def test_a_store_that_cannot_be_written(folder: Folder, s3_server: S3Server) -> None:
    refused(folder, ["run", "tiny", "--run", "a", "--set", f"store=file://{folder.path}/a_file/store"], "store=", "a_file")
    wrong = Folder(folder.path, "s3://rlpipe/x", {**s3_server.environment, "AWS_SECRET_ACCESS_KEY": "wrong"})
    refused(wrong, wrong.run_arguments("a"), "store=s3://rlpipe/x", "AWS_SECRET_ACCESS_KEY")


def test_a_taken_port(folder: Folder) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        refused(folder, folder.run_arguments("a", f"engines.port={port}"), f"engines.port={port}", "taken")
        refused(folder, folder.run_arguments("a", f"trainer.port={port}"), f"trainer.port={port}", "taken")
