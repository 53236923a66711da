"""A config as the store keeps it: runs that were started with older code go on, and the settings of
their stages are the same bytes.

`run_b8afe6a.json` is the run.json of the preset tiny as commit b8afe6a wrote it, and SETTINGS is
what its stages/settings.py gave. There `rl.reward_fallback`, one rule for all faults, was 0.0 where
it was not given. Today `rl.faults` goes by the cause (and `evaluation.pass_threshold` none, which
was 1.0), which changes the settings
of scores, batches and evaluations as it changes what they hold; so does `model.control_tokens`,
which was not there and is "text". So where settings of then are compared with settings of now, what
was then is given (AS_THEN). That a run of then goes on with it though its preset does not give it,
a test of its own says.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flows.cli import app
from rlpipe.base.errors import UserError
from rlpipe.base.hashing import sha256_of
from rlpipe.base.values import JsonDict
from rlpipe.config.faults import checked_faults
from rlpipe.config.passing import passing_reward
from rlpipe.config.pipeline import RETIRED, STORED, PipelineConfig, from_stored, stored_tree
from rlpipe.config.source import change_config, check, override_config, read_config
from rlpipe.store.backend import Store, open_store
from rlpipe.store.forks import differences
from rlpipe.store.opening import create_or_continue, find_run, open_existing
from tests.declared import RL_KINDS, stage_settings
from tests.paths import ROOT

PRESETS = ROOT / "flows" / "presets"
RECORD = json.loads((ROOT / "tests" / "run_b8afe6a.json").read_text())
AS_THEN = ["rl.reward_fallback=0.0", "evaluation.pass_threshold=1.0", "model.control_tokens=as_written"]
STAGES = [
    ("base", "tokenizer"), ("base", "policy"), ("base", "probe"), ("base", "evaluation"),
    ("data", "data"), ("data", "selection"),
    ("sft", "policy"), ("sft", "state"), ("sft", "evaluation"), *(("rl", stage) for stage in RL_KINDS),
]  # fmt: skip
SETTINGS = {  # preset and overrides: sha256 of the settings of all stages, at b8afe6a
    "agent": "8c86ec34c0ef2a69e75bfd45ef8ad10e59597d7c7c726ee73dc859776b9c447e",
    "calculator": "3c19fd5ded881538cf7f294de4f14dfb77f9608b7a6dff30aa999eaa4f59152f",
    "gsm8k-0.5b": "0dd493de90c2d54983db9113b5e81ff04e418e6475e683a29aff3671561941ab",
    "multi-node": "e6a9ed2eb2536223a5fc8b27b78501807756418de0e3e2d52b3668c8fec0240f",
    "one-gpu": "95f4585d2f3379a2d9360121645f7fde70ebb8c5228786ddfb480ec1e3d8ff8d",
    "palindromes": "ec24784fab8a7e0618d4aea0391ebf16e6fe2553bb4d3dc351c992809ad8f9f7",
    "smollm2": "2636ee8e7a6daa78882de437a240996b28ec9aa13c6f3a8fb9497aada9207e7e",
    "sums": "6efc627ca6ce21d058e70a746b57492d1d38544657585c094f80e3fd2ae7408b",
    "tiny": "ce2028ea3b7185e4892b24d8d56f7d036cbfd4939c104ea9dc678f59e5231fc8",
    "two-node": "1273d5806d659e0f2210cf86d93d60275a1b38994459ed2fb70c7ae920c071dd",
    "tiny rl.oversampling=2 rl.curriculum=band": "69416b27d1d5962f9dd59fa92d4d17ccf23b121171d517322c757907b8f8aa79",
    "tiny sft.validation_fraction=0.1 sft.patience=2 seed=7": (
        "870bd746b061d27b14123a895d890c9adbb17db5fd1d805194d834317654bc5d"
    ),
    "sums rl.rollouts_from=run:a rl.kl=loss rl.kl_coef=0.1": (
        "d74ce3813eec2049e14fb2b2b79c8e1342f20fe02f6efb5dd34e04a0afa86817"
    ),
}


def settings_of(config: PipelineConfig) -> JsonDict:
    return {
        f"{phase}/{stage}": stage_settings(config, phase, stage) for phase, stage in STAGES if stage != "gap"
    }  # which came later


def stored_run(folder: Path, **changes: JsonDict) -> Store:
    """A store that holds the old run."""
    store = open_store(f"file://{folder}/store")
    config = {
        section: {**value, **changes.get(section, {})} if section in changes else value
        for section, value in RECORD["config"].items()
    }
    store.create("runs/old/run.json", json.dumps({**RECORD, "config": config}).encode())
    return store


@pytest.mark.parametrize("preset", SETTINGS)
def test_the_settings_of_all_stages_are_those_of_older_code(preset: str) -> None:
    name, *overrides = preset.split()
    assert sha256_of(settings_of(read_config(name, AS_THEN + overrides, PRESETS))) == SETTINGS[preset]


def test_every_preset_is_in_the_table() -> None:
    assert {preset.split()[0] for preset in SETTINGS} == {path.stem for path in PRESETS.glob("*.toml")}


def test_a_run_of_older_code_goes_on(tmp_path: Path) -> None:
    store = stored_run(tmp_path)
    config = read_config("tiny", ["run=old", f"store={store.url}", *AS_THEN], PRESETS)
    old = open_existing(store, "old").config
    assert differences(config, old) == []
    assert settings_of(old) == settings_of(config)
    assert find_run(store, config) is not None and create_or_continue(config).config == config


def test_a_run_goes_on_with_the_defaults_it_was_begun_with(tmp_path: Path) -> None:
    store = stored_run(tmp_path)
    config = read_config("tiny", ["run=old", f"store={store.url}"], PRESETS)
    assert (config.rl.faults, config.model.control_tokens) == (checked_faults({}), "text")
    run = create_or_continue(config)
    assert run.config.model.control_tokens == open_existing(store, "old").config.model.control_tokens == "as_written"
    assert run.config.rl.faults == {"policy": 0.0, "outside": 0.0} and settings_of(run.config) == settings_of(
        open_existing(store, "old").config
    )
    with pytest.raises(
        UserError, match=r"rl\.faults: .*'outside': 0\.0.* -> .*'outside': 'left_out'"
    ):  # one that is given is meant
        create_or_continue(
            read_config("tiny", ["run=old", f"store={store.url}", "rl.faults={outside = 'left_out'}"], PRESETS)
        )
    assert run.config.evaluation.pass_threshold == 1.0 and passing_reward(run.config, "rl") == 1.0
    with pytest.raises(UserError, match=r"evaluation\.pass_threshold: 1\.0 -> 0\.5"):
        create_or_continue(
            read_config("tiny", ["run=old", f"store={store.url}", "evaluation.pass_threshold=0.5"], PRESETS)
        )
    with pytest.raises(UserError, match=r"model\.control_tokens: 'as_written' -> 'text'"):
        create_or_continue(read_config("tiny", ["run=old", f"store={store.url}", "model.control_tokens=text"], PRESETS))
    newer = create_or_continue(read_config("tiny", ["run=new", f"store={store.url}"], PRESETS))
    assert (
        newer.config.evaluation.pass_threshold is open_existing(store, "new").config.evaluation.pass_threshold is None
    )
    assert newer.config.rl.faults == open_existing(store, "new").config.rl.faults == checked_faults({})
    assert newer.config.model.control_tokens == open_existing(store, "new").config.model.control_tokens == "text"


def test_what_is_stored_is_what_older_code_stored_and_reads_again() -> None:
    sets = ["run=old", *AS_THEN, "trainer.tokens_max=4096", "engines.count=1"]  # the preset has others by now
    config = read_config("tiny", sets, PRESETS)
    stored = stored_tree(config)
    waits = {"queue_timeout_s": 86_400.0, "lost_timeout_s": 600.0}
    newer: dict[str, JsonDict] = {  # what came since
        "tracking": {"project": "rlpipe", "view_url": ""},
        "trainer": {"deployment": "", "split_over": "gang", "context_ranks": 1, "offload": "none", "nccl_algo": "Ring"}
        | waits,
        "engines": {"deployment": "", "progress_timeout_s": 600.0, "colocate": False, "transport": "disk"} | waits,
        "rl": {
            "reference": "",
            "overlap": "none",
            "environment_total_s": None,
            "agent": "",
            "agent_timeout_s": 600.0,
            "agents_max": 8,
            "agent_address": "127.0.0.1",
            "branches": "last",
        },
        "checkpoint": {"full_every": 1, "keep_states": 0, "keep_policies_last": 0, "keep_policies_every": 0},
        "evaluation": {"completion_tokens_max": None, "temperature": 1.0, "top_p": None, "rewards": {}},
    }
    sections = {section: RECORD["config"][section] | fields for section, fields in newer.items()}
    assert stored == RECORD["config"] | sections | {"scratch": ".rlpipe"}
    assert check(from_stored(stored), STORED) == check(stored, STORED) == config


def test_an_old_run_may_have_used_a_retired_field_and_a_new_one_may_not(tmp_path: Path) -> None:
    store = stored_run(
        tmp_path, trainer={"port": 4040, "job_timeout_s": 60.0}, engines={"port": 5050, "restarts_max": 9}
    )
    assert open_existing(store, "old").config == check(RECORD["config"], STORED)
    for override in (
        "trainer.port=4040",
        "engines.port=5050",
        "engines.restarts_max=9",
        "sft.beta1=0.8",
        "trainer.job_timeout_s=60",
    ):
        name, value = override.split("=")
        with pytest.raises(
            UserError, match=rf"^{name}={value}.*: this field no longer exists, its value is always .*; remove it$"
        ):
            read_config("tiny", [override], PRESETS)
    same = [f"{section}.{name}={value}" for section, fields in RETIRED.items() for name, value in fields.items()]
    assert read_config("tiny", same, PRESETS) == read_config("tiny", [], PRESETS)


def test_a_run_whose_config_would_be_refused_for_a_secret_by_now_is_read(tmp_path: Path) -> None:
    engines = RECORD["config"]["engines"] | {"environment": {"MY_TOKEN": "in the store already"}}
    config = open_existing(stored_run(tmp_path, engines=engines), "old").config
    assert config.engines.environment.keys() == {"MY_TOKEN"}
    resumed = override_config(config, ["budget.rollout_tokens=900"])
    assert resumed.engines == config.engines, "it goes on"
    assert change_config(config, {"budget.rollout_tokens": 900}) == resumed
    for change in ("engines.environment={MY_TOKEN = 'planted'}", "engines.environment.OTHER_TOKEN=planted"):
        with pytest.raises(UserError, match="looks like a secret"):
            override_config(config, [change])


def test_an_old_run_that_computed_something_else_with_a_retired_field_is_refused_with_its_name(tmp_path: Path) -> None:
    with pytest.raises(
        UserError,
        match=r"this version refuses rl\.top_k=20: this field no longer exists, its value is always -1; remove it",
    ):
        open_existing(stored_run(tmp_path, rl={"top_k": 20}), "old")


def test_an_old_run_with_a_field_that_nobody_knows_is_refused_with_its_name(tmp_path: Path) -> None:
    store = stored_run(tmp_path, rl={"of_another_version": 1})
    with pytest.raises(
        UserError, match=r"written by rlpipe b8afe6ac5fcd; this version refuses rl\.of_another_version=1: no such"
    ):
        open_existing(store, "old")
    ended = CliRunner().invoke(
        app, ["verify", "old", "--store", store.url]
    )  # the fault is the record's, and of nothing that was given
    assert ended.exit_code == 1 and ended.output.startswith("FAULT ") and "1 faults" in ended.output, ended.output
    assert (
        "runs/old/run.json was written by rlpipe b8afe6ac5fcd; this version refuses rl.of_another_version=1"
        in ended.output
    )
