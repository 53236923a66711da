"""Suspects in the scoring: faults, other weights and arguments of rewards, a part that is
hacked.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from rlpipe.config.faults import OUTSIDE, POLICY, cause_of_fault
from rlpipe.extras.why.around import Around
from rlpipe.extras.why.changes import NO_SHIFT, within_correlation
from rlpipe.extras.why.suspects.finding import Finding, Findings, WhatIf, as_toml, from_to, rows_to_show
from rlpipe.records.rollout import WORLD_FAULTS
from rlpipe.rewards.score import gives

CAUSED = {POLICY: "which the policy may cause", OUTSIDE: "from outside"}
PART_MIN = 0.05  # smallest shift of a part that is named, of its spread


def faults(around: Around) -> Findings:
    """More rollouts that could not be scored, or whose environment or agent failed: by a cause that
    is the policy's, or from outside.
    """
    for cause, by in CAUSED.items():
        fault_R = np.array([bool(r.reward_fault) and cause_of_fault(r.reward_fault) == cause for r in around.rollouts])
        shift = around.shift_of(fault_R) if fault_R.any() else NO_SHIFT
        if shift.size <= 0:
            continue
        lost = _mean(around.reward_R[fault_R]) - _mean(around.reward_R[~around.fault_R])
        counts = Counter(around.rollouts[index].reward_fault for index in np.flatnonzero(fault_R & around.after_R))
        usual, _ = counts.most_common(1)[0]
        kind = usual.partition("_")[0] if usual.startswith(WORLD_FAULTS) else "reward"
        ok = from_to(*around.means(np.where(around.fault_R, np.nan, around.reward_R)))
        yield Finding(
            f"{kind}_faults",
            f"rollouts with a fault of the {kind}, {by}: {shift.before:.1%} -> {shift.after:.1%}",
            shift,
            shift.size * lost,
            [
                f"from {around.at} on: {', '.join(f'{reason} {count}' for reason, count in counts.most_common())}",
                f"reward of the rollouts without a fault: {ok}",
            ],
            rows_to_show(around, fault_R),
            proof=WhatIf(around.at, [], "score") if kind == "reward" else None,
        )


def reward_settings(around: Around) -> Findings:
    """Weights and arguments of rewards that a fork changed.

    The reward of completions from the iteration on by the earlier settings is known from the stored
    parts, and from today's code where arguments changed; where it is not known, these settings
    explain what the other findings leave.
    """
    lines = [line for line in around.changed if line.startswith(("rl.rewards", "rl.reward_args"))]
    if not lines:
        return
    old, difference_R = around.config_before.rl, _by_the_old(around)
    known = np.isfinite(difference_R) & around.after_R
    explains = float(difference_R[known].mean()) if known.any() else None
    evidence = [*lines, *(f"part {name}: {from_to(*around.means(column))}" for name, column in around.parts.items())]
    if explains is not None:
        evidence.append(
            f"{int(known.sum())} completions from {around.at} on have {explains:+.3f} against what the settings of"
            " before give them"
        )
    yield Finding(
        "reward_settings",
        lines[0] if len(lines) == 1 else f"{lines[0]}, and {len(lines) - 1} more",
        around.reward_change,
        explains,
        evidence,
        rows_to_show(around, known if known.any() else np.ones(len(known), bool), -np.abs(np.nan_to_num(difference_R))),
        certain=True,
        proof=WhatIf(
            around.at, [f"rl.rewards={as_toml(old.rewards)}", f"rl.reward_args={as_toml(old.reward_args)}"], "score"
        ),
    )


def _by_the_old(around: Around) -> np.ndarray:
    """The reward of each rollout by the settings of the iteration, minus its reward by the earlier
    ones, [R]; nan where that is not known.
    """
    old, new = around.config_before.rl, around.config.rl
    if old.reward_args == new.reward_args and new.rewards.keys() == old.rewards.keys():
        now = before = around.parts
    else:
        now, before = around.parts_today(around.config), around.parts_today(around.config_before)
    totals = [
        _total(parts, rewards, len(around.rollouts)) for parts, rewards in ((now, new.rewards), (before, old.rewards))
    ]
    return np.where(around.fault_R, np.nan, totals[0] - totals[1])


def _total(parts: dict[str, np.ndarray], rewards: dict[str, float], count: int) -> np.ndarray:
    """The weighted sum of the parts of rewards, [R]; nan in a rollout that lacks one of them."""
    total_R = np.zeros(count)
    for reward, weight in rewards.items():
        columns = [column for name, column in parts.items() if gives(reward, name)]
        total_R += weight * np.sum(columns, axis=0) if columns else np.nan
    return total_R


def without(around: Around, part: str) -> WhatIf | None:
    """The iteration scored without the reward that a part belongs to; where it is the only reward,
    with today's code.
    """
    rewards, args = around.config.rl.rewards, around.config.rl.reward_args
    suspect = next((name for name in rewards if gives(name, part)), None)
    if suspect is None or len(rewards) == 1:
        return WhatIf(around.at, [], "score") if suspect else None
    columns = [np.nan_to_num(column) for name, column in around.parts.items() if gives(suspect, name)]
    rest_R = around.reward_R - rewards[suspect] * np.sum(columns, axis=0)
    stored = around.means(np.where(around.fault_R, np.nan, rest_R))
    sets = [f"rl.rewards={as_toml({name: weight for name, weight in rewards.items() if name != suspect})}"]
    if suspect in args:
        sets.append(f"rl.reward_args={as_toml({name: values for name, values in args.items() if name != suspect})}")
    return WhatIf(around.at, sets, "score", stored=stored)


def hacked(around: Around) -> Findings:
    """A part of the reward that rises while another part, or the share of right answers, falls: the
    policy exploits the reward.
    """
    columns = dict(around.parts)
    if np.isfinite(around.matched_R).any():
        columns["right answers"] = around.matched_R
    shifts = {name: around.shift_of(column) for name, column in columns.items()}
    falling = [name for name, shift in shifts.items() if shift.size < -PART_MIN * float(np.nanstd(columns[name]))]
    for name, shift in shifts.items():
        weight = around.weight(name)
        if name not in around.parts or weight * shift.size <= 0 or not falling:
            continue
        victim = min(falling, key=lambda other: shifts[other].falls)
        weaker = max(shift, shifts[victim], key=lambda entry: entry.p)
        together = np.nan_to_num(
            within_correlation(columns[name], columns[victim], around.group_R, len(around.groups), around.after_R)
        )
        evidence = [
            f"weight {weight:g}, part {name}: {from_to(shift.before, shift.after)} (p = {shift.p:.1g})",
            f"{victim}: {from_to(shifts[victim].before, shifts[victim].after)} (p = {shifts[victim].p:.1g})",
            f"within groups from {around.at} on they go together with r = {together:+.2f}",
            f"tokens of a completion: {from_to(*around.means(around.tokens_R))}",
        ]
        order = columns[victim] - np.sign(weight) * columns[name]
        rows = rows_to_show(around, np.isfinite(order), order)
        yield Finding("hacked_part", f"{name} is paid, and {victim} falls", weaker, weight * shift.size, evidence, rows,
                      proof=without(around, name))  # fmt: skip


def _mean(values: np.ndarray) -> float:
    known = values[np.isfinite(values)]
    return float(known.mean()) if len(known) else 0.0
