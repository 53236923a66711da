"""The config: bounds, combinations, overrides; every fault names field, value and fix."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from rlpipe.base.errors import UserError
from rlpipe.base.hashing import sha256_of
from rlpipe.config.pipeline import PipelineConfig, identity
from rlpipe.config.source import change_config, override_config, read_config
from tests.deadlines import DEADLINE_S
from tests.declared import RL_KINDS, stage_settings
from tests.paths import PRESETS


@pytest.mark.parametrize("preset", sorted(path.stem for path in PRESETS.glob("*.toml")))
def test_every_preset_is_valid(preset: str) -> None:
    read_config(preset, [], PRESETS)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("rl.group_size=1", r"^rl\.group_size=1: .*use group_size of 2 or more"),
        ("rl.no_such=3", r"rl\.no_such=3.*no such field"),
        ("seed=-1", r"seed=-1.*greater than or equal to 0"),
        ("rl.temperature=0.0", r"rl\.temperature=0\.0"),
        ("run=a/b", "run='a/b'.*no slash"),
        ("rl.schedule=cosine", "needs decay_steps"),
        ("rl.rewards={}", "name at least one"),
        ("model.context_tokens_max=16", "leaves no room"),
        ("data.nothing.weight=2", "no data set named 'nothing'"),
        ("rl", "section.field=value"),
        ("seed.x=1", "seed: .*valid integer"),
        ("data.weight=2", r"data is a list; write data\.NAME\.weight \(there are: short_words, all_words, words\)"),
        ("rl.rewards={math=1", "the value is not TOML"),
        ("evaluation.gate_against=a", r"gate_against='a': .*pattern.*\(Policy to beat: base .*, run:NAME"),
        ("rl=5", "rl=5: this is a section.*`rlpipe fields rl`"),
        ("rl.rollouts_from=run:", "use run:NAME"),
        ("rl.rollouts_from=s3://bucket/x.parquet", "local path"),
        ("rl={rollouts_from = 'run:b', oversampling = 2.0}", "samples nothing"),
        ("rl={rollouts_from = 'run:b', curriculum = 'band'}", "samples nothing"),
        ("rl={rollouts_from = 'run:b', curriculum = 'weight'}", "set curriculum = 'none'"),
        (
            "rl={curriculum = 'band', pass_rate_low = 0.8, pass_rate_high = 0.2}",
            r"low=0\.8: is above rl\.pass_rate_high=0\.2",
        ),
        ("rl.estimator=gae", r"rl\.estimator='gae'"),
        ("rl.faults=0.0", r"^rl\.faults=0\.0: use a table, such as "),
        ("rl.faults={policy = nan}", r"^rl\.faults: policy = nan: use a finite number, left_out or stop$"),
        ("rl.faults={agent_timout = 0.5}", r"^rl\.faults: 'agent_timout' is no cause and no reason: use agent_timeout"),
        ("rl.reward_fallback=zero", r"^rl\.faults: policy = 'zero': use a finite number, left_out or stop$"),
        ("rl.kl_coef=0.1", "the weight of a KL that is not computed"),
    ],
)
def test_a_bad_value_is_refused_with_field_value_and_fix(override: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_config("tiny", [override], PRESETS)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["group_size=1", "estimator=rloo"], "estimator rloo compares the rollouts of a group"),
        (["group_size=1", "estimator=reinforce_plus_plus"], "nonzero_std drops every group of one.*filters = {}"),
        (["gamma=0.9"], "estimator grpo gives all tokens of a rollout one advantage.*use gamma = 1"),
        (["gamma=0.9", "estimator=reinforce_plus_plus_baseline"], "discounts nothing"),
        (["kl=reward", "kl_coef=0.1", "estimator=maxrl"], "maxrl divides by the mean reward"),
        (["dual_clip=3.0", "objective=cispo"], "objective cispo does not use dual_clip"),
        (
            ["objective=dppo"],
            "with objective dppo the ratio already compares with the logprobs of the engine.* use importance = 'none'",
        ),
        (
            ["proximal=engine"],
            r"^rl\.importance='token_truncate': with rl\.proximal='engine' the ratio .* use importance = 'none'",
        ),
        (
            ["proximal=engine", "importance=none", "objective=reinforce"],
            r"^rl\.proximal='engine': objective reinforce has no ratio",
        ),
        (
            ["proximal=engine", "importance=none", "rollouts_from=run:b"],
            r"^rl\.proximal='engine': no engine of this run sampled the rollouts of run:b",
        ),
        (["objective=dppo", "importance=none", "clip_high=1.5"], "clip_high below 1"),
        (["importance_low=2.0"], "importance_low below importance_high"),
        (["importance_low=0.5", "importance=sequence_mask"], "sequence_mask has no lower bound"),
        (["importance_low=0.5", "importance=none"], "none has no lower bound"),
        (["on_mismatch=fail", "oversampling=1.5"], "also contains the change of the policy"),
        (["on_mismatch=fail", "overlap=iteration"], "also contains the change of the policy"),
        (["overlap=iteration", "importance=none"], r"^rl\.overlap='iteration': .* set rl\.importance"),
        (["overlap=iteration", "oversampling=1.5"], "use oversampling = 1"),
        (["overlap=iteration", "train_stale_tokens=false"], "would train on none of them; set it to true"),
        (["overlap=iteration", "rollouts_from=run:b"], "nothing can overlap"),
    ],
)
def test_algorithms_that_make_no_sense_together_are_refused_with_the_reason(overrides: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_config("tiny", [f"rl.{override}" for override in overrides], PRESETS)


def test_all_broken_rules_are_reported_together_and_each_begins_with_its_field() -> None:
    overrides = [
        "rl.group_size=1",
        "rl.kl_coef=0.1",
        "sft.patience=2",
        "engines.threads=3",
        "trainer.nodes=2",
        "stop.kl_max=1",
    ]
    with pytest.raises(UserError) as refused:
        read_config("tiny", overrides, PRESETS)
    lines = str(refused.value).splitlines()
    assert [re.split("[=:]", line)[0] for line in lines] == [
        "sft.patience", "rl.group_size", "rl.group_size", "rl.kl_coef", "trainer.nodes", "engines.threads",
        "stop.kl_max"
    ]  # fmt: skip
    assert lines[0].startswith("sft.patience=2: waits for")


@pytest.mark.parametrize(
    "overrides",
    [
        ["group_size=1", "estimator=reinforce_plus_plus", "filters={}", "gamma=0.9", "kl=reward", "kl_coef=0.1"],
        ["objective=gspo", "dual_clip=3.0", "importance=sequence_mask"],
        ["objective=dppo", "importance=none", "estimator=maxrl", "kl=loss", "kl_coef=0.1"],
        ["importance_low=0.5", "importance=token_mask"],
        ["on_mismatch=fail", "oversampling=1.5", "train_stale_tokens=false"],
        ["overlap=iteration", "objective=dppo", "importance=none"],
        ["overlap=iteration", "proximal=engine", "importance=none"],
        ["overlap=none", "curriculum=none", "kl=none", "importance=none"],  # unquoted, where TOML has no such word
    ],
)
def test_algorithms_that_go_together(overrides: list[str]) -> None:
    read_config("tiny", [f"rl.{override}" for override in overrides], PRESETS)


def test_an_unknown_preset_lists_the_known(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="tiny"):
        read_config("nope", [], PRESETS)
    (tmp_path / "x.toml").write_text("not toml [")
    with pytest.raises(UserError, match="not TOML"):
        read_config(str(tmp_path / "x.toml"), [], PRESETS)


def test_a_file_is_laid_over_what_it_extends(tmp_path: Path) -> None:
    (tmp_path / "bases").mkdir()
    (tmp_path / "bases" / "more.toml").write_text(
        'extends = "tiny"\nseed = 3\n[rl]\nclip_high = 0.4\nrewards = { math = 2.0 }\n'
    )
    (tmp_path / "mine.toml").write_text(
        'extends = "bases/more.toml"\nseed = 4\n[rl]\nnum_iterations = 5\n'
        '[[data]]\nname = "words"\nuse = "rl"\nsource = "reasoning_gym:spell_backward"\n[sft]\nnum_steps = 0\n'
    )
    tiny, config = read_config("tiny", [], PRESETS), read_config(str(tmp_path / "mine.toml"), ["rl.top_p=0.5"], PRESETS)
    assert (config.seed, config.rl.clip_high, config.rl.num_iterations, config.rl.top_p) == (4, 0.4, 5, 0.5)
    assert config.rl.rewards == {"math": 2.0, **tiny.rl.rewards}, "tables are merged key by key"
    assert [data.name for data in config.data] == ["words"], "arrays of tables are replaced whole"
    assert config.model == tiny.model and config.rl.num_prompts == tiny.rl.num_prompts
    assert "extends" not in config.model_dump()
    changed = change_config(tiny, {"preset": str(tmp_path / "mine.toml")}, PRESETS)
    assert changed.rl.clip_high == 0.4


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"a": 'extends = "b.toml"', "b": 'extends = "c.toml"', "c": 'extends = "b.toml"'},
         r"c\.toml: extends='b\.toml': makes a circle \(a\.toml -> b\.toml -> c\.toml -> b\.toml\); remove one"),
        ({"a": 'extends = "a.toml"'}, r"a\.toml: extends='a\.toml': makes a circle \(a\.toml -> a\.toml\)"),
        ({"a": 'extends = "b.toml"'}, r"a\.toml: extends='b\.toml': .*b\.toml: there is no such file"),
        ({"a": 'extends = "tny"'}, r"a\.toml: extends='tny': 'tny' is neither a preset .*; did you mean tiny\?"),
        ({"a": 'extends = ["tiny"]'}, r"a\.toml: extends=\['tiny'\]: name one preset, or one file"),
        ({"a": 'extends = "b.toml"', "b": "not toml ["}, r"b\.toml: not TOML"),
        ({"a": 'extends = "b.toml"', "b": 'extends = "tiny"\n[rl]\nclip_hihg = 1'}, r"rl\.clip_hihg=1: no such field"),
        ({"a": 'extends = "tiny"\n[rl]\nextends = "tiny"'}, r"rl\.extends='tiny': no such field"),
    ],
)  # fmt: skip
def test_what_cannot_be_extended_is_refused_in_one_line(files: dict[str, str], message: str, tmp_path: Path) -> None:
    for name, text in files.items():
        (tmp_path / f"{name}.toml").write_text(text)
    with pytest.raises(UserError, match=message) as told:
        read_config(str(tmp_path / "a.toml"), [], PRESETS)
    assert "\n" not in str(told.value)


def test_overrides_reach_fields_lists_and_named_data_sets() -> None:
    config = read_config(
        "tiny", ["seed=7", "rl.rewards={math = 0.5}", "data.words.rows_max=77", "rl.faults={outside = 'stop'}"], PRESETS
    )
    assert config.seed == 7
    assert config.rl.rewards == {"math": 0.5}
    assert config.rl.faults == {"policy": 0.0, "outside": "stop"}
    assert [data.use for data in config.data if data.rows_max == 77] == ["rl", "evaluation"]
    assert override_config(config, ["seed=8"]).seed == 8


def test_where_and_how_fast_are_not_part_of_what_is_computed() -> None:
    one = read_config("tiny", [], PRESETS)
    for same in (
        "engines.count=2",
        "trainer.ranks=2",
        "rl.num_iterations=99",
        "rl.mismatch_max=0.5",
        "rl.on_mismatch=fail",
        "store=s3://x/y",
        "tracking.uri=",
        "run=other",
    ):
        assert identity(read_config("tiny", [same], PRESETS)) == identity(one)
    for other in ("seed=1", "rl.clip_high=0.4", "sft.num_steps=230", "data.words.rows_max=9"):
        assert identity(read_config("tiny", [other], PRESETS)) != identity(one)


def test_every_field_has_a_description() -> None:
    def fields(model: type) -> list[str]:
        return [
            name
            for name, field in model.model_fields.items()
            if not field.description and name not in PipelineConfig.model_fields
        ]

    assert [name for section in PipelineConfig.model_fields.values() if hasattr(section.annotation, "model_fields")
            for name in fields(section.annotation)] == []  # fmt: skip


@pytest.mark.slow
def test_config_types_and_commands_import_nothing_heavy_and_the_flow_process_no_torch() -> None:
    program = (
        "import sys; import rlpipe.config.pipeline, rlpipe.config.source, rlpipe.base.manifests\n"
        "heavy = {'torch', 'transformers', 'prefect', 'mlflow', 'obstore', 'botocore'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "import flows.cli\n"
        "assert not {'torch', 'transformers', 'prefect'} & set(sys.modules)\n"
        "import flows.post_train, flows.evaluate\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 0, done.stderr


def test_a_form_shows_first_what_people_change() -> None:
    schema = PipelineConfig.model_json_schema()
    for section in (schema, *schema["$defs"].values()):
        fields = section["properties"]
        assert sorted(field["position"] for field in fields.values()) == list(range(len(fields)))
        assert {name for name, field in fields.items() if field.get("title", name) != name} == set()
    for section, first in {
        "PipelineConfig": ["run", "model", "data", "sft", "rl", "evaluation", "seed", "store"],
        "RlConfig": [
            "rewards",
            "num_iterations",
            "num_prompts",
            "group_size",
            "completion_tokens_max",
            "learning_rate",
        ],
        "SftConfig": ["num_steps", "batch_size", "learning_rate"],
        "ModelConfig": ["path", "context_tokens_max"],
        "DataConfig": ["name", "use", "source"],
    }.items():
        fields = schema["$defs"].get(section, schema)["properties"]
        assert sorted(fields, key=lambda name: fields[name]["position"])[: len(first)] == first
    fields = schema["$defs"]["RlConfig"]["properties"]
    assert fields["beta2"]["position"] > fields["on_mismatch"]["position"]


def test_the_order_of_fields_changes_no_hash() -> None:
    config = read_config("tiny", [], PRESETS)
    stages = [("base", "policy"), ("data", "data"), ("sft", "policy"), *(("rl", stage) for stage in RL_KINDS)]
    for settings in (identity(config), *(stage_settings(config, *stage) for stage in stages)):
        assert sha256_of(reverse_keys(settings)) == sha256_of(settings)


def reverse_keys(value: object) -> object:
    if isinstance(value, dict):
        return {key: reverse_keys(value[key]) for key in reversed(value)}
    return [reverse_keys(entry) for entry in value] if isinstance(value, list) else value


def test_a_template_is_plain_text() -> None:
    config = read_config(
        "tiny",
        ["data.short_words.completion_template=<b>{answer}</b>", "data.all_words.completion_template={answer}"],
        PRESETS,
    )
    assert [data.completion_template for data in config.sets("sft")] == ["<b>{answer}</b>", "{answer}"]


def test_the_overlap_of_steps_that_older_versions_had_is_none() -> None:
    assert read_config("tiny", ["rl.overlap=steps"], PRESETS) == read_config("tiny", [], PRESETS)
