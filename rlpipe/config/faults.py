"""The faults of rollouts by their cause, and what becomes of a rollout with one (`rl.faults`).

What runs on a policy's text can be ended by it: the policy learns to take that exit unless it is
scored. What fails by itself says nothing about the policy, and would be trained as its failure
unless it is left out.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from typing import Any, Literal, get_args

POLICY, OUTSIDE = "policy", "outside"
Word = Literal["left_out", "stop"]
Rule = float | Word  # the reward of such a rollout, or what happens in place of one
LEFT_OUT, STOP = get_args(Word)
CAUSES = {
    "reward_error": POLICY,
    "reward_timeout": POLICY,
    "reward_crash": POLICY,
    "reward_invalid": POLICY,
    "reward_prompt": OUTSIDE,
    "reward_unavailable": OUTSIDE,
    "environment_error": POLICY,
    "environment_timeout": POLICY,
    "environment_total_timeout": POLICY,
    "environment_crash": POLICY,
    "environment_invalid": POLICY,
    "environment_unavailable": OUTSIDE,
    "agent_error": POLICY,
    "agent_timeout": POLICY,
    "agent_crash": POLICY,
    "agent_invalid": POLICY,
    "agent_silent": OUTSIDE,
    "agent_unavailable": OUTSIDE,
}
BY_CAUSE: dict[str, Rule] = {POLICY: 0.0, OUTSIDE: LEFT_OUT}


def cause_of_fault(reason: str) -> str:
    """POLICY or OUTSIDE; OUTSIDE for a reason that is not known."""
    return CAUSES.get(reason, OUTSIDE)


def checked_faults(given: Any) -> dict[str, Rule]:
    """The rules of `rl.faults`: one for each cause, and those of reasons that differ from it.

    ValueError for what is neither a reason nor a cause, and for a rule that is none.
    """
    if not isinstance(given, Mapping):
        raise ValueError("use a table, such as { policy = 0.0, outside = 'left_out' }")
    for name in given:
        if name not in CAUSES and name not in BY_CAUSE:
            near = difflib.get_close_matches(str(name), [*BY_CAUSE, *CAUSES], 3)
            raise ValueError(f"{name!r} is no cause and no reason: use {', '.join(near or [*BY_CAUSE, *CAUSES])}")
    rules: dict[str, Rule] = {name: _checked_rule(name, rule) for name, rule in {**BY_CAUSE, **given}.items()}
    return {name: rule for name, rule in rules.items() if name in BY_CAUSE or rule != rules[CAUSES[name]]}


def _checked_rule(name: str, rule: Any) -> Rule:
    if isinstance(rule, int | float) and not isinstance(rule, bool) and math.isfinite(rule):
        return float(rule)
    if rule in (LEFT_OUT, STOP):
        return rule
    raise ValueError(f"{name} = {rule!r}: use a finite number, {LEFT_OUT} or {STOP}")


def rule_for_all(rules: Mapping[str, Rule]) -> tuple[Rule, ...]:
    """The one rule of runs that do not ask for the cause, in a tuple; empty for others."""
    return (rules[POLICY],) if len(rules) == len(BY_CAUSE) and rules[POLICY] == rules[OUTSIDE] else ()
