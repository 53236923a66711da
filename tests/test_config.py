"""The config: bounds, combinations, overrides; every fault names field, value and fix."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from rlpipe.config import PipelineConfig, identity
from rlpipe.config_source import override_config, read_config
from rlpipe.plan import num_parameters, plan_lines
from rlpipe.types import UserError

PRESETS = Path(__file__).parent.parent / "flows" / "presets"


@pytest.mark.parametrize("preset", sorted(path.stem for path in PRESETS.glob("*.toml")))
def test_every_preset_is_valid_and_can_be_planned(preset: str) -> None:
    lines = "\n".join(plan_lines(read_config(preset, [], PRESETS)))
    assert "rollouts" in lines
    assert "GiB" in lines


def test_the_plan_of_a_real_model_has_its_size() -> None:
    config = read_config("smollm2", [], PRESETS)
    assert num_parameters(config.model) == pytest.approx(134_515_008, rel=1e-4)
    assert "weights 0.50 + keys and values 0.35" in "\n".join(plan_lines(config))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("rl.group_size=1", "group_size=1.*use group_size of 2 or more"),
        ("rl.no_such=3", r"rl\.no_such=3.*no such field"),
        ("seed=-1", r"seed=-1.*greater than or equal to 0"),
        ("rl.temperature=0.0", r"rl\.temperature=0\.0"),
        ("run=a/b", "run='a/b'.*no slash"),
        ("rl.schedule=cosine", "needs decay_steps"),
        ("rl.rewards={}", "name at least one"),
        ("model.context_tokens_max=16", "leaves no room"),
        ("data.nothing.weight=2", "no data set named 'nothing'"),
        ("rl", "section.field=value"),
        ("seed.x=1", "seed=.*valid integer"),
        ("rl.rollouts_from=run:", "use run:NAME"),
        ("rl.rollouts_from=s3://bucket/x.parquet", "local path"),
        ("rl={rollouts_from = 'run:b', oversampling = 2.0}", "samples nothing"),
        ("rl={rollouts_from = 'run:b', curriculum = 'band'}", "samples nothing"),
        ("rl.estimator=gae", r"rl\.estimator='gae'"),
        ("rl.kl=loss", "needs both a place"),
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
        (["dual_clip=3.0", "objective=cispo"], "objective cispo has no such clip"),
        (["objective=dppo"], "corrected twice; use importance = 'none'"),
        (["objective=dppo", "importance=none", "clip_high=1.5"], "clip_high below 1"),
        (["importance_low=2.0"], "importance_low below importance_high"),
        (["importance_low=0.5", "importance=sequence_mask"], "sequence_mask has no lower bound"),
        (["importance_low=0.5", "importance=none"], "none has no lower bound"),
        (["on_mismatch=fail", "oversampling=1.5"], "the policy's own change"),
    ],
)
def test_algorithms_that_make_no_sense_together_are_refused_with_the_reason(overrides: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_config("tiny", [f"rl.{override}" for override in overrides], PRESETS)


@pytest.mark.parametrize(
    "overrides",
    [
        ["group_size=1", "estimator=reinforce_plus_plus", "filters={}", "gamma=0.9", "kl=reward", "kl_coef=0.1"],
        ["objective=gspo", "dual_clip=3.0", "importance=sequence_mask"],
        ["objective=dppo", "importance=none", "estimator=maxrl", "kl=loss", "kl_coef=0.1"],
        ["importance_low=0.5", "importance=token_mask"],
        ["on_mismatch=fail", "oversampling=1.5", "train_stale_tokens=false"],
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


def test_overrides_reach_fields_lists_and_named_data_sets() -> None:
    config = read_config(
        "tiny", ["seed=7", "rl.rewards={math = 0.5}", "data.words.rows_max=77", "rl.reward_fallback=none"], PRESETS
    )
    assert config.seed == 7
    assert config.rl.rewards == {"math": 0.5}
    assert config.rl.reward_fallback is None
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


def test_the_plan_counts_parameters_as_the_model_does() -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    model = read_config("tiny", ["model.vocab_size=320"], PRESETS).model
    built = Qwen3ForCausalLM(
        Qwen3Config(vocab_size=320, hidden_size=128, intermediate_size=384, num_hidden_layers=4, num_attention_heads=4,
                    num_key_value_heads=2, head_dim=32, tie_word_embeddings=True)
    )  # fmt: skip
    actual = sum(parameter.numel() for parameter in built.parameters())
    assert abs(num_parameters(model) - actual) / actual < 0.001


def test_config_and_types_import_nothing_heavy_and_the_flow_process_no_torch() -> None:
    program = (
        "import sys; import rlpipe.config, rlpipe.config_source, rlpipe.types\n"
        "heavy = {'torch', 'transformers', 'prefect', 'mlflow', 'fsspec', 's3fs'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "import flows.cli, flows.post_train, flows.evaluate\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_a_form_shows_the_fields_by_their_names_a_sections_own_first() -> None:
    schema = PipelineConfig.model_json_schema()
    for section in (schema, *schema["$defs"].values()):
        fields = section["properties"]
        assert sorted(told["position"] for told in fields.values()) == list(range(len(fields)))
        assert {name for name, told in fields.items() if told.get("title", name) != name} == set()
    fields = schema["$defs"]["RlConfig"]["properties"]
    assert fields["num_iterations"]["position"] == 0
    assert fields["learning_rate"]["position"] > fields["on_mismatch"]["position"]
