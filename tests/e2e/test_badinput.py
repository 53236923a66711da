"""Bad input ends in a message that names field, file or row and the fix: exit
code 2, and nothing is written."""

from __future__ import annotations

import json

import pytest

from tests.conftest import S3Server
from tests.pipeline import Folder

pytestmark = pytest.mark.e2e
# refused at the same places as the others; unit tests and fuzz/ have what is said
AT_NIGHT = pytest.mark.nightly


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, prefect_api: dict[str, str]) -> Folder:
    path = tmp_path_factory.mktemp("bad")
    (path / "no_prompt.jsonl").write_text(
        json.dumps({"prompt": "x", "answer": "y"}) + "\n" + json.dumps({"answer": "y"}) + "\n"
    )
    rows = [{"prompt": f"What is {number} + 2?", "answer": str(number + 2)} for number in range(60)]
    (path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (path / "bad_filters.py").write_text("def keeps(group, threshold):\n    return True\n")
    (path / "empty_model").mkdir()
    (path / "a_file").write_text("not a folder")
    return Folder(path, f"file://{path}/store", prefect_api)


def refused(folder: Folder, arguments: list[str], *needles: str) -> None:
    code, output = folder.rlpipe(*arguments)
    assert code == 2, output
    for needle in needles:
        assert needle in output, output
    assert "Traceback" not in output
    assert not [path for path in (folder.path / "store").rglob("*") if path.is_file()]


@pytest.mark.parametrize(
    ("override", "needles"),
    [
        ("rl.no_such=1", ["rl.no_such=1", "no such field"]),
        pytest.param("rl.temperature=-1.0", ["rl.temperature=-1.0"], marks=AT_NIGHT),
        pytest.param("rl.group_size=1", ["group_size=1", "2 or more"], marks=AT_NIGHT),
        pytest.param("data.words.source=missing.jsonl", ["missing.jsonl"], marks=AT_NIGHT),
        ("data.words.source=no_prompt.jsonl", ["no_prompt.jsonl", "2", "prompt"]),
        pytest.param("data.words.source=reasoning_gym:no_such", ["no_such"], marks=AT_NIGHT),
        ("model.path=empty_model", ["model.path", "config.json"]),
        ("rl.rewards={\"no_package:f\" = 1.0}", ["no_package"]),
        pytest.param("rl.filters={no_filter = 1.0}", ["no_filter", "nonzero_std"], marks=AT_NIGHT),
        pytest.param("rl.filters={diversity = 2.0}", ["rl.filters.diversity=2", "at most 1"], marks=AT_NIGHT),
        pytest.param("rl.filters={\"bad_filters:keeps\" = 0.0}",
                     ["bad_filters:keeps", "answered True"], marks=AT_NIGHT),
        ("data.words.source=sums.jsonl", ["data.words (rl)", "needs rows of a reasoning_gym source", "exact = 1.0"]),
        pytest.param("trainer.nodes=2", ["one node"], marks=AT_NIGHT),
    ],
)  # fmt: skip
def test_a_bad_setting(folder: Folder, override: str, needles: list[str]) -> None:
    refused(folder, folder.run_arguments("a", override), *needles)


def test_an_unknown_preset_and_a_run_name_with_a_slash(folder: Folder) -> None:
    refused(folder, ["run", "nope"], "nope", "tiny")
    refused(folder, folder.run_arguments("a/b"), "run='a/b'", "slash")


def test_a_store_that_cannot_be_written(folder: Folder, s3_server: S3Server) -> None:
    refused(
        folder, ["run", "tiny", "--run", "a", "--set", f"store=file://{folder.path}/a_file/store"], "store=", "a_file"
    )
    wrong = Folder(folder.path, "s3://rlpipe/x", {**s3_server.environment, "AWS_SECRET_ACCESS_KEY": "wrong"})
    refused(wrong, wrong.run_arguments("a"), "store=s3://rlpipe/x", "AWS_SECRET_ACCESS_KEY")


MOODY = """
import pathlib
def rows():
    return [{"prompt": "what?", "answer": "that"}] * 50
def keep(group, threshold):
    if list(pathlib.Path("rlpipe-store").rglob("rollouts.parquet")): raise RuntimeError("the list is gone")
"""


def test_what_fails_inside_a_flow_is_one_line_with_the_advice_and_its_traceback_is_in_the_log(folder: Folder) -> None:
    (folder.path / "moody.py").write_text(MOODY)
    (folder.path / "moody.toml").write_text(
        '[[data]]\nname = "w"\nuse = "rl"\nsource = "moody:rows"\n'
        '[rl]\nrewards = { exact = 1.0 }\nfilters = { "moody:keep" = 1.0 }\n'
        '[tracking]\nuri = ""\n[model]\nhidden_size = 16\nnum_layers = 1\n'
    )
    code, output = folder.rlpipe("run", "moody.toml", "--run", "moody")
    begun, warning, *steps, last = output.splitlines()
    assert code == 2 and begun.startswith("run moody: ") and warning.startswith("WARNING RL of a new model without SFT")
    assert all(step.startswith(("run moody: ", "RL: ", "WARNING all rewards are zero")) for step in steps), output
    assert last.startswith("rlpipe: rl.filters: 'moody:keep' raised RuntimeError: the list is gone"), output
    assert "start it anew under the same run name" in last
    (log,) = (folder.path / ".rlpipe").glob("moody-*/flows.log")
    assert "Traceback" in log.read_text() and "moody.py" in log.read_text()
