"""The table of faults: every reason that the code has, its cause, and the rules of a config."""

from __future__ import annotations

import ast
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlpipe.config.faults import BY_CAUSE, CAUSES, LEFT_OUT, STOP, cause_of_fault, checked_faults, rule_for_all
from rlpipe.config.pipeline import STORED, from_stored, stored_tree
from rlpipe.config.settings import artifact_settings
from rlpipe.config.source import check, read_config
from rlpipe.config.training import RlConfig
from tests.paths import PRESETS, ROOT

TINY = read_config("tiny", ["run=a"], PRESETS)
REASON = re.compile(r"(reward|environment|agent)_[a-z_]+")
RULES = st.one_of(st.sampled_from([LEFT_OUT, STOP]), st.floats(-5, 5).map(lambda number: number + 0.0))
# words of that form that are no reasons: fields, metrics, and the names of parts
OTHERS = re.compile(r".*_(timeout_s|total_s|args|workers|max|address|mean|R|part|settings|parts|fault|faults|fallback)")


def reasons_in_code() -> set[str]:
    """The texts of that form in modules that make faults."""
    places = ["rlpipe/rewards", "rlpipe/extras/agents", "rlpipe/extras/environments"]
    files = [path for place in places for path in (ROOT / place).glob("*.py")]
    texts = {
        node.value
        for path in files
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    return {text for text in texts if REASON.fullmatch(text) and not OTHERS.fullmatch(text)} - {"reward_parts"}


def test_every_reason_is_in_the_table_and_in_the_docs_with_its_cause() -> None:
    assert reasons_in_code() - CAUSES.keys() == set()
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \| ", (ROOT / "docs" / "faults.md").read_text(), re.MULTILINE)
    assert dict(rows) == CAUSES and len(rows) == len(CAUSES)


def test_the_policy_pays_for_what_it_may_cause_and_for_nothing_else() -> None:
    rl = RlConfig()
    scored = {reason for reason in CAUSES if not rl.leaves_out(reason)}
    assert scored == {reason for reason, cause in CAUSES.items() if cause == "policy"}
    assert {rl.fault_reward(reason) for reason in CAUSES} == {0.0}
    assert rl.leaves_out("of_another_system") and cause_of_fault("of_another_system") == "outside"
    assert not rl.leaves_out("")


@given(st.dictionaries(st.sampled_from([*BY_CAUSE, *CAUSES]), RULES))
def test_a_rule_of_a_reason_comes_before_that_of_its_cause(given_rules: dict[str, Any]) -> None:
    rl = RlConfig.model_validate({"faults": given_rules})
    for reason, cause in CAUSES.items():
        rule = given_rules.get(reason, given_rules.get(cause, BY_CAUSE[cause]))
        assert rl.fault_rule(reason) == rule
        assert rl.leaves_out(reason) == (rule == LEFT_OUT)
        assert rl.fault_reward(reason) == (rule if isinstance(rule, float) else 0.0)
    assert checked_faults(rl.faults) == rl.faults


@given(st.dictionaries(st.sampled_from([*BY_CAUSE, "agent_timeout", "reward_error"]), RULES))
def test_a_stored_config_has_the_same_rules_and_one_for_all_has_the_form_of_older_runs(rules: dict[str, Any]) -> None:
    config = TINY.model_copy(update={"rl": TINY.rl.model_copy(update={"faults": checked_faults(rules)})})
    stored = stored_tree(config)
    for_all = rule_for_all(config.rl.faults)
    assert ("reward_fallback" in stored["rl"], "faults" in stored["rl"]) == (bool(for_all), not for_all)
    assert check(from_stored(stored), STORED).rl.faults == config.rl.faults
    hashed = [artifact_settings(config, "rl", kind) for kind in ("scores", "evaluation")]
    assert all(("rl.reward_fallback" in settings) != ("rl.faults" in settings) for settings in hashed)


@pytest.mark.parametrize("rule", [0.5, LEFT_OUT, None])
def test_the_field_of_older_versions_is_one_rule_for_all(rule: Any) -> None:
    older = RlConfig.model_validate({"reward_fallback": rule})
    assert older.faults == dict.fromkeys(BY_CAUSE, STOP if rule is None else rule)
    assert stored_tree(TINY.model_copy(update={"rl": older}))["rl"]["reward_fallback"] == rule
