"""The marks of config fields say which artifacts each affects, and the settings of every stage
follow from them.

`golden/conditions.json` was made by commit 05a6e2f, where each stage had a list of fields: presets
and changes (at least one for each condition, the others by chance), and the hash of the settings of
all stages.
"""

from __future__ import annotations

import json

import pytest

from rlpipe.base.hashing import sha256_of
from rlpipe.base.values import JsonDict
from rlpipe.config.fields import config_fields
from rlpipe.config.pipeline import OPERATIONAL, RETIRED, RETIRED_MARKS, PipelineConfig, marks
from rlpipe.config.settings import CONDITIONS, USES, artifact_settings, effects
from rlpipe.config.source import read_config
from rlpipe.extras.imports.importing import import_files
from rlpipe.stages.base import base_reference
from tests.config.test_golden import ROOT, THEN
from tests.declared import STAGES, stage_settings

PRESETS = ROOT / "flows" / "presets"
ALONE = {"operational", "plan"}  # a field with such a mark affects no artifact
KINDS = {kind for _, kind in STAGES} | {"reference", "teacher", "teacher_logprobs", "imported"}
ROWS: dict[str, str] = json.loads((ROOT / "tests" / "golden" / "conditions.json").read_text())


def field_marks() -> dict[str, set[str]]:
    """The marks of every field, with those of its section."""
    by_name: dict[str, set[str]] = {}
    for section, name, mark in marks(str):
        by_name.setdefault(f"{section}.{name}", set()).add(mark)
    names = [field.name.replace("data.NAME", "data") for field in config_fields()]
    return {name: by_name.get(name, set()) | by_name.get(f"{name.split('.')[0]}.", set()) for name in names}


def test_every_field_is_operational_or_plans_or_affects_an_artifact() -> None:
    for name, found in field_marks().items():
        if name.split(".")[0] in OPERATIONAL or name == "seed":  # the seed is in all settings
            assert not found, name
        else:
            assert found, f"{name}: mark what it affects (rlpipe/config/affects.py)"
            assert not found & ALONE or len(found) == 1, f"{name}: {found}"


def test_every_mark_names_a_kind_of_artifact_and_a_condition() -> None:
    used = {mark.partition(" if ")[::2] for found in field_marks().values() for mark in found - ALONE}
    assert {kind for kind, _ in used} == KINDS
    assert {condition for _, condition in used} - {""} == CONDITIONS.keys()
    assert {kind for kind, _ in used if any(section == "data" for section, *_ in effects("", kind))} == USES.keys()


def test_every_retired_field_that_affects_an_artifact_is_in_its_settings() -> None:
    assert {name for name, _ in RETIRED_MARKS} == {*RETIRED["sft"], *RETIRED["rl"]}
    config = read_config("tiny", [], PRESETS)
    assert artifact_settings(config, "rl", "rollouts")["rl.top_k"] == -1
    assert artifact_settings(config, "sft", "policy")["sft.beta1"] == RETIRED["sft"]["beta1"]


def all_settings(config: PipelineConfig) -> dict[str, JsonDict]:
    stages = [*STAGES, ("sft", "state"), ("rl", "state"), ("rl", "gap")]
    return {
        **{f"{phase}/{kind}": stage_settings(config, phase, kind) for phase, kind in stages},
        "base/reference": base_reference.settings(config),
        "rl/imported": import_files.settings(config),
        **{f"imported {kind}": artifact_settings(config, "rl", kind, judged_by=()) for kind in ("prompts", "rollouts")},
    }


@pytest.mark.parametrize("row", ROWS)
def test_the_settings_under_every_condition_are_those_of_older_code(row: str) -> None:
    preset, *changes = row.split()
    assert sha256_of(all_settings(read_config(preset, [*THEN, *changes], PRESETS)))[:16] == ROWS[row]


def test_the_rows_meet_every_condition_and_miss_it() -> None:
    configs = [read_config(row.split()[0], [*THEN, *row.split()[1:]], PRESETS) for row in ROWS]
    effects_of = [effect for phase, kind in [*STAGES, ("rl", "imported")] for effect in effects(phase, kind)]
    for effect in {effect for effect in effects_of if effect.condition}:
        assert {CONDITIONS[effect.condition](config, effect) for config in configs} == {True, False}, effect


def test_a_field_with_a_condition_counts_where_one_of_the_judges_meets_it() -> None:
    plain, over = (read_config("tiny", sets, PRESETS) for sets in ([], ["rl.oversampling=2"]))
    assert "rl.filters" not in artifact_settings(plain, "rl", "rollouts")
    judged = artifact_settings(plain, "rl", "rollouts", judged_by=(plain, over))
    assert judged.keys() == artifact_settings(over, "rl", "rollouts").keys()
    assert judged["rl.filters"] == plain.rl.filters
    assert "rl.filters" not in artifact_settings(over, "rl", "rollouts", judged_by=())
