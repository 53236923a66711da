"""The fields in words: docs/config.md, `rlpipe fields`, and what a misspelt name may mean."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from flows.cli import fields as fields_command
from rlpipe.base.errors import UserError
from rlpipe.config.fields import config_fields, field_lines, markdown, near_names
from rlpipe.config.pipeline import PipelineConfig
from rlpipe.config.source import change_config, read_config
from rlpipe.extras.local_engine.server import app
from tests.deadlines import DEADLINE_S
from tests.paths import ROOT

PRESETS = ROOT / "flows" / "presets"


def test_docs_config_is_what_the_code_says() -> None:
    assert (ROOT / "docs" / "config.md").read_text() == markdown(), "the fields changed: run `make docs`"


def test_every_field_is_there_once_with_its_default_bounds_and_whether_it_may_change() -> None:
    names = [field.name for field in config_fields()]
    assert len(set(names)) == len(names)
    for section, info in PipelineConfig.model_fields.items():
        for field in getattr(info.annotation, "model_fields", {}):
            assert f"{section}.{field}" in names
    lines = "\n".join(field_lines())
    for line in (
        (
            "seed = 0: Seed from which all random numbers of the run are derived [whole number, from 0, "
            "at most 2147483647; fixed for a run]"
        ),
        (
            "rl.mismatch_max = 0.05: Largest mean |trainer's - engine's logprobs| that is expected at the start of an "
            "iteration [number, above 0; may change]"
        ),
        (
            "engines.hung_timeout_s = 60: An engine that fails its health checks for this time is restarted, s "
            "[number (s), above 0, at most 10000000; may change]"
        ),
        'rl.kl_estimator = "k3": Estimator of the KL to the reference ["k1" or "k2" or "k3" or "abs"; fixed for a run]',
        "none or number, above 1",
        "data.NAME.name (required)",
        "rl.rewards = {math = 1.0}",
    ):
        assert line in lines


def test_fields_prints_those_whose_names_begin_so(capsys: pytest.CaptureFixture[str]) -> None:
    fields_command("rl.clip")
    assert [line.split(" ")[0] for line in capsys.readouterr().out.splitlines()] == ["rl.clip_low", "rl.clip_high"]
    assert field_lines("data.words.we") == field_lines("data.NAME.weight")
    with pytest.raises(UserError, match=r"no field begins with 'rl\.batch'.*did you mean sft\.batch_size\?"):
        field_lines("rl.batch")


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("rl.clip_hihg", ["rl.clip_high"]),
        ("rl.batch_size", ["sft.batch_size"]),
        ("rl.lr", ["rl.learning_rate", "sft.learning_rate"]),
        ("rll", ["rl"]),
        ("sead", ["seed"]),
        ("group_size", ["rl.group_size"]),
        ("data.words.weigth", ["data.words.weight"]),
        ("rl.no_such", []),
    ],
)
def test_a_misspelt_name_has_near_ones(name: str, near: list[str]) -> None:
    assert near_names(name) == near


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        ("[rl]\nclip_hihg = 0.3", r"rl\.clip_hihg=0\.3: no such field; did you mean rl\.clip_high\?"),
        ("[rll]\nclip_high = 0.3", r"rll: no such section; did you mean rl\?"),
        ('[[data]]\nname = "sums"\nuse = "rl"\nsorce = "x"',
         r"data\.sums\.sorce='x': no such field; did you mean data\.sums\.source\?"),
        ("batch_size = 3", r"batch_size=3: no such field; did you mean sft\.batch_size\?"),
        ("[rl]\nno_such = 3", r"no such field \(`rlpipe fields rl` lists them\)"),
    ],
)  # fmt: skip
def test_a_misspelt_field_is_named_with_the_nearest(toml: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "my.toml"
    path.write_text(toml)
    with pytest.raises(UserError, match=message):
        read_config(str(path), [], PRESETS)


def test_set_changes_and_presets_have_near_names_too() -> None:
    with pytest.raises(UserError, match=r"rl\.batch_size=3: no such field; did you mean sft\.batch_size\?"):
        read_config("tiny", ["rl.batch_size=3"], PRESETS)
    with pytest.raises(UserError, match=r"stop\.kl_mx=3: no such field; did you mean stop\.kl_max"):
        change_config(read_config("tiny", [], PRESETS), {"stop.kl_mx": 3})
    with pytest.raises(UserError, match=r"did you mean tiny\?$"):
        read_config("tny", [], PRESETS)
    with pytest.raises(UserError, match=re.escape("no_such.toml: there is no such file")):
        read_config("no_such.toml", [], PRESETS)


def test_make_help_has_every_target() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = re.findall(r"^([a-z][a-z0-9-]*):", makefile, re.MULTILINE)
    assert re.findall(r"^([a-z][a-z0-9-]*):.* ## .+", makefile, re.MULTILINE) == targets
    assert re.findall(r"^\.PHONY: (.*)", makefile)[0].split() == targets


def test_a_command_that_is_passed_on_has_help_under_its_own_name() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "flows.cli", "engine", "--help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert (
        done.returncode == 0
        and "Usage: rlpipe engine [OPTIONS]" in done.stdout
        and "--context-tokens-max" in done.stdout
    ), done


def test_every_option_of_the_engine_has_a_help_text() -> None:
    command = typer.main.get_command(app)
    assert [parameter.name for parameter in command.params if not getattr(parameter, "help", None)] == []
