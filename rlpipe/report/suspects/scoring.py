"""Suspects in the scoring: faults, a part of the reward that says something else of the same completions, a part that is hacked."""

from __future__ import annotations

from collections import Counter

import numpy as np

from rlpipe.algorithms.changes import NO_SHIFT, Shift, fitted, within_correlation
from rlpipe.records.rollout import WORLD_FAULTS
from rlpipe.report.around import Around
from rlpipe.report.suspects.finding import Finding, Findings, WhatIf, as_toml, from_to, rows_to_show
from rlpipe.rewards.registry import is_service
from rlpipe.rewards.score import gives, label

PREDICTED = 0.25  # R2 from which a part is taken as known from what else is known of a rollout
PART_MIN = 0.05  # smallest shift of a part that is named, of its spread


def faults(around: Around) -> Findings:
    """More rollouts that could not be scored, or whose environment failed."""
    if not around.fault_R.any():
        return
    shift = around.shift_of(around.fault_R)
    if shift.size <= 0:
        return
    lost = _mean(around.reward_R[around.fault_R]) - _mean(around.reward_R[~around.fault_R])
    counts = Counter(rollout.reward_fault for rollout, after in zip(around.rollouts, around.after_R, strict=True) if after)
    reasons = ", ".join(f"{reason} {count}" for reason, count in counts.most_common() if reason)
    usual = max(counts, key=lambda reason: counts[reason] if reason else -1)
    kind = usual.partition("_")[0] if usual.startswith(WORLD_FAULTS) else "reward"
    ok_before, ok_after = around.means(np.where(around.fault_R, np.nan, around.reward_R))
    yield Finding(
        f"{kind}_faults",
        f"rollouts with a fault of the {kind}: {shift.before:.1%} -> {shift.after:.1%}",
        shift,
        shift.size * lost,
        [f"from {around.at} on: {reasons}", f"reward of the rollouts without a fault: {from_to(ok_before, ok_after)}"],
        rows_to_show(around, around.fault_R),
        proof=WhatIf(around.at, [], "score") if kind == "reward" else None,
    )


def reward_parts(around: Around) -> Findings:
    """A part of the reward that gives completions something else than the other parts and their answers let expect."""
    for name, values_R in around.parts.items():
        shift = _unexpected(around, name)
        before, after = around.means(values_R)
        raw = after - before
        spread = float(np.nanstd(values_R))
        if shift.size * raw <= 0 or abs(shift.size) < PART_MIN * spread:
            continue
        weight = around.weight(name)
        size = min(raw, shift.size, key=abs)
        constant = _constant(values_R[around.after_R])
        others = [f"part {other}: {from_to(*around.means(column))}" for other, column in around.parts.items() if other != name]
        evidence = [f"weight {weight:g}, part {name}: {from_to(before, after)}", *others, *_matched_lines(around)]
        if constant is not None:
            evidence.insert(0, f"all {int(around.after_R.sum())} rollouts from {around.at} on have {name} = {constant:g}")
        service = next((reward for reward in around.config.rl.rewards if is_service(reward) and label(reward) == name), "")
        title = f"reward part {name} {'falls' if raw < 0 else 'rises'}" + (f" (the service {service})" if service else "")
        surprising = values_R - _expected(around, name)[0]
        rows = rows_to_show(around, np.isfinite(values_R), surprising if raw < 0 else -surprising)
        yield Finding("reward_part", title, shift, weight * size, evidence, rows, proof=_without(around, name))


def _features(around: Around, name: str) -> np.ndarray:
    """What is known of each rollout beside one part: the other parts, whether its answer is the prompt's. [R, F]"""
    columns = [column for other, column in around.parts.items() if other != name]
    if np.isfinite(around.matched_R).any():
        columns.append(around.matched_R)
    filled = [np.where(np.isfinite(column), column, _mean(column)) for column in columns if np.isfinite(column).any()]
    return np.stack(filled, axis=1) if filled else np.zeros((len(around.rollouts), 0))


def _expected(around: Around, name: str) -> tuple[np.ndarray, float]:
    """What the iterations before let expect of a part, [R], and how well they do."""
    values_R = around.parts[name]
    learnt_R = np.isfinite(values_R) & ~around.after_R & ~around.fault_R
    if learnt_R.sum() < 2:
        return values_R, 0.0
    return fitted(_features(around, name), values_R, learnt_R)


def _unexpected(around: Around, name: str) -> Shift:
    """How a part shifts beyond what is expected of it. Of one of which nothing is known: only where it stops to vary at all."""
    values_R, (expected_R, known) = around.parts[name], _expected(around, name)
    if known >= PREDICTED:
        return around.shift_of(values_R - expected_R, trend=True)
    if _constant(values_R[around.after_R]) is not None and _constant(values_R[~around.after_R]) is None:
        return around.shift_of(values_R, trend=True)
    return NO_SHIFT


def _constant(values: np.ndarray) -> float | None:
    """The one value that they all have."""
    known = values[np.isfinite(values)]
    return float(known[0]) if len(known) >= 16 and np.ptp(known) == 0 else None


def _matched_lines(around: Around) -> list[str]:
    if not np.isfinite(around.matched_R).any():
        return []
    return [f"completions whose answer is the prompt's, by its text: {from_to(*around.means(around.matched_R))}"]


def _without(around: Around, part: str) -> WhatIf | None:
    """The iteration scored without the reward that a part is of; where there is no other, by what scores today. A fork that changed
    the rewards is scored by those of before."""
    rewards, args = around.config.rl.rewards, around.config.rl.reward_args
    if any(line.startswith(("rl.rewards", "rl.reward_args")) for line in around.changed):
        old = around.config_before.rl
        return WhatIf(around.at, [f"rl.rewards={as_toml(old.rewards)}", f"rl.reward_args={as_toml(old.reward_args)}"], "score")
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
    """A part of the reward that rises while another part, or the share of right answers, falls: the policy learns what pays."""
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
        yield Finding("hacked_part", f"{name} is paid, and {victim} falls", weaker, weight * shift.size, evidence, rows, proof=_without(around, name))  # fmt: skip


def _mean(values: np.ndarray) -> float:
    known = values[np.isfinite(values)]
    return float(known.mean()) if len(known) else 0.0
