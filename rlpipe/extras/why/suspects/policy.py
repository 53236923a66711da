"""Suspects in the policy: other settings, weights of another version, an engine with other weights
than the trainer's, another reference, lengths.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from rlpipe.base.values import Metrics
from rlpipe.config.pipeline import identity
from rlpipe.extras.why.around import Around
from rlpipe.extras.why.changes import NO_SHIFT, Shift, shift
from rlpipe.extras.why.suspects.finding import Finding, Findings, WhatIf, as_toml, from_to, rows_to_show
from rlpipe.report.curves import evaluation_of
from rlpipe.store.run import AT_SFT

FLOOR = 1e-9  # of a metric
RATIO_MIN = 3.0  # a metric that grew by less is not named
MISMATCH_SHARE = 0.2  # of rl.mismatch_max: the smallest mismatch that is named
KL_MIN = 1e-3  # of a KL that is named
RATE_RATIO = 1.5
GAP_LARGE = 0.1  # nats: a token's probability differs by 10 %
MOVES_OF_PROOF = 3  # iterations that a fork samples with the old settings
# the settings that determine the learning rate of a step
SCHEDULE = ("rl.learning_rate", "rl.warmup_steps", "rl.schedule", "rl.decay_steps", "rl.num_steps")
UPDATES = (
    "train/learning_rate",
    "train/grad_norm",
    "train/clip_fraction_high",
    "train/clip_fraction_low",
    "train/proximal_kl",
)
FIRST = 2  # iterations whose policy was made by the first updates
# of an iteration's updates: more is not seen for long in healthy runs (docs/why.md)
FAR_KL, FAR_CLIPPED = 0.02, 0.1
# other suspects name these
MECHANISMS = ("rl.completion_tokens_max", "rl.rewards", "rl.reward_args", "rl.faults")

Scale = Callable[[np.ndarray], np.ndarray]


def settings(around: Around) -> Findings:
    """Settings that a fork changed at this iteration, and a learning rate that has changed."""
    lines = [line for line in around.changed if not line.startswith(MECHANISMS)]
    evidence = [*lines, *_moved_lines(around)]
    # 0: nothing was trained
    rates = [around.metrics[number].get("train/learning_rate", 0.0) for number in (around.at - 1, around.at)]
    if min(rates) > 0 and not _is_warming(around) and not 1 / RATE_RATIO < rates[1] / rates[0] < RATE_RATIO:
        line = f"learning rate of the last step: {from_to(*rates)}"
        evidence.insert(len(lines), line)
        if not any(changed.startswith(SCHEDULE) for changed in lines):  # else it only follows from a changed setting
            lines.append(line)
    if not lines:
        return
    # what the policy is trained with changes the rollouts of the next iteration
    changes = [around.reward_change_at(number) for number in (around.at, around.at + 1)]
    clearer = min(changes, key=lambda change: change.p)
    yield Finding(
        "settings",
        lines[0] if len(lines) == 1 else f"{lines[0]}, and {len(lines) - 1} more",
        replace(clearer, p=min(1.0, 2 * clearer.p)),
        None,
        evidence,
        rows_to_show(around, np.ones(len(around.rollouts), bool), around.reward_R),
        certain=True,
        proof=_with_old_settings(around),
    )


def _is_warming(around: Around) -> bool:
    """True when the rate was still rising in the updates that made the policy of this iteration."""
    return around.at * around.config.rl.num_steps <= around.config.rl.warmup_steps


def rate(around: Around) -> Findings:
    """A reward that falls, at once or step by step, while the learning rate still rises in its
    warm-up, or from the first updates on: large updates made the policy of this iteration. Where
    the learning rate has not changed, `settings` and `moved` report instead.
    """
    last, is_first = around.metrics[around.at - 1], around.at <= FIRST
    falls = [change for change in (around.reward_change, around.reward_drift) if change.size < 0]
    if around.changed or not falls or not (is_first or _is_warming(around)) or not _went_far(around):
        return
    clearer = min(falls, key=lambda change: change.p)
    change = replace(clearer, p=min(1.0, 2 * clearer.p))
    explains = max(fall.size for fall in falls) if clearer is around.reward_drift else None
    rl, steps = around.config.rl, around.at * around.config.rl.num_steps
    now = last.get("train/learning_rate", 0.0) or rl.learning_rate  # 0: nothing was trained
    if _is_warming(around):
        title = (
            f"the learning rate still rises: {now:.3g} of {rl.learning_rate:g}, step {steps} of {rl.warmup_steps} of"
            " its warm-up"
        )
    else:
        title = f"the reward falls from the first updates on: rl.learning_rate={rl.learning_rate:g} may be too high"
    known = [number for number in sorted(around.metrics) if number < around.at][-3:]
    evidence = [f"updates of iteration {number}: {_updates(around.metrics[number])}" for number in known]
    if (start := evaluation_of(around.run, 0)) is not None:
        means = [
            f"{name} {value:.3g}" for name, value in sorted(start.metrics.items()) if name.endswith("_reward_mean")
        ]
        evidence.insert(0, f"the policy that RL began with: {', '.join(means)}; {_first_reward(around)}")
    if clearer is around.reward_drift:
        evidence.insert(
            0, f"the reward falls step by step: {from_to(clearer.before, clearer.after)} by a straight line"
        )
    sets = [f"rl.learning_rate={now / 10 if is_first else now / 3:.1g}"]
    proof = WhatIf(AT_SFT if is_first else around.at - 1, sets, num_iterations=around.at + MOVES_OF_PROOF)
    yield Finding("rate", title, change, explains, evidence,
                  rows_to_show(around, np.ones(len(around.rollouts), bool), around.reward_R), proof=proof)  # fmt: skip


def _updates(metrics: Metrics) -> str:
    """Text on the updates of an iteration. Example: learning_rate 0.0021, grad_norm 14.2,
    clip_fraction_high 0.21.
    """
    return ", ".join(f"{name.partition('/')[2]} {metrics[name]:.3g}" for name in UPDATES if name in metrics)


def _first_reward(around: Around) -> str:
    """The mean reward of the oldest iteration that is compared.

    Example: reward of iteration 0: 0.67.
    """
    oldest = int(around.iteration_G.min())
    return (
        f"reward of iteration {oldest}:"
        f" {float(around.reward_R[around.iteration_G[around.group_R] == oldest].mean()):.3g}"
    )


def _went_far(around: Around) -> bool:
    """True when an update near the iteration moved the policy too far: by its KL, or by the share
    of tokens that the loss clipped.
    """
    near = [metrics for number, metrics in around.metrics.items() if -2 <= number - around.at <= 1]
    return any(
        metrics.get("train/proximal_kl", 0.0) >= FAR_KL
        or metrics.get("train/clip_fraction_high", 0.0) + metrics.get("train/clip_fraction_low", 0.0) >= FAR_CLIPPED
        for metrics in near
    )


def _with_old_settings(around: Around) -> WhatIf | None:
    """The same iterations, sampled and trained with the earlier settings."""
    old, new = identity(around.config_before), identity(around.config)
    names = [
        name
        for name in new
        if name.startswith("rl.") and old.get(name) != new[name] and not name.startswith(MECHANISMS)
    ]
    if not names:
        return None
    sets = [f"{name}={as_toml(old[name])}" for name in names]
    return WhatIf(around.at - 1, sets, num_iterations=around.at + MOVES_OF_PROOF)


def _grown(around: Around, name: str, scale: Scale) -> Shift:
    """The jump of a metric, on a scale on which its noise is even; no shift where it grows by less
    than RATIO_MIN from one iteration to the next.
    """
    pairs = [(number, metrics[name]) for number, metrics in around.metrics.items() if name in metrics]
    known = dict(pairs)
    if len(pairs) < 4 or not {around.at, around.at - 1} <= known.keys():
        return NO_SHIFT
    last = [value for number, value in pairs if number < around.at][-3:]
    if known[around.at] <= RATIO_MIN * max(*last, FLOOR):
        return NO_SHIFT
    numbers, values = zip(*pairs, strict=True)
    values_T = scale(np.maximum(np.array(values, dtype=float), FLOOR))
    return shift(values_T, np.array(numbers), around.at, trend=True, exact=True)


def _moved_lines(around: Around) -> list[str]:
    """The lines on the size of this iteration's updates, and of those of the previous one."""
    last, first = around.metrics[around.at - 1], around.metrics[around.at]
    names = ("train/grad_norm", "train/proximal_kl", "train/clip_fraction_high")
    return [f"{name}: {from_to(last[name], first[name])}" for name in names if name in last and name in first]


def _metric_finding(
    around: Around, suspect: str, metric: str, title: str, least: float, scale: Scale, symptom: bool = False
) -> Findings:
    jump, after = _grown(around, metric, scale), around.metrics[around.at].get(metric, 0.0)
    if jump.p == 1.0 or after <= least:
        return
    known = {number: metrics[metric] for number, metrics in around.metrics.items() if metric in metrics}
    sides = ([value for number, value in known.items() if (number >= around.at) == late] for late in (False, True))
    surprising = np.array(
        [
            float(np.mean(rollout.rollout_logprobs)) if len(rollout.rollout_logprobs) else 0.0
            for rollout in around.rollouts
        ]
    )
    rows = rows_to_show(around, np.ones(len(around.rollouts), bool), surprising)
    medians = from_to(*(float(np.median(side)) for side in sides))
    evidence = [f"{metric} by iteration: {', '.join(f'{number}: {value:.3g}' for number, value in known.items())}"]
    yield Finding(suspect, f"{title}: {metric} {medians}", jump, None, evidence, rows, symptom)


def mismatch(around: Around) -> Findings:
    """An engine whose probabilities of tokens differ from the trainer's: its weights are not those
    that are trained.
    """
    least = MISMATCH_SHARE * around.config.rl.mismatch_max
    title = "engine and trainer disagree"
    for finding in _metric_finding(around, "mismatch", "train/mismatch_abs_mean", title, least, np.log):
        gap_R = np.array([np.abs(gap).mean() if len(gap) else np.nan for gap in around.gaps])
        rows = rows_to_show(around, np.isfinite(gap_R), -gap_R)
        yield replace(finding, evidence=[*finding.evidence, *_gap_lines(around)], rows=rows) if rows else finding


def _gap_lines(around: Around) -> list[str]:
    """The line with the share of tokens whose `|gap|` is above GAP_LARGE, on each side; none where
    a side has no stored gaps."""
    sides = [
        [gap for gap, after in zip(around.gaps, around.after_R, strict=True) if after == side] for side in (False, True)
    ]
    gaps = [np.abs(np.concatenate(side)) if side else np.zeros(0) for side in sides]
    if not all(map(len, gaps)):
        return []
    shares = [float((side > GAP_LARGE).mean()) for side in gaps]
    return [
        f"tokens that engine and trainer give logprobs more than {GAP_LARGE:g} apart: {shares[0]:.2%} ->"
        f" {shares[1]:.2%}"
    ]


def reference(around: Around) -> Findings:
    """A KL to the reference that jumps without an update of that size: the reference has
    changed.
    """
    if around.config.rl.kl != "none" and not _has_moved_as_far(around):
        yield from _metric_finding(around, "reference", "train/kl", "the KL to the reference jumps", KL_MIN, np.sqrt)


def _has_moved_as_far(around: Around) -> bool:
    """True when the iteration's own updates were as large as the growth of the KL to the reference:
    `sqrt(kl) - sqrt(kl before) <= 2 sqrt(proximal_kl)`. The root of a KL grows as a distance does;
    the factor 2 allows for the different tokens on which both are measured.
    """
    last, now = around.metrics[around.at - 1], around.metrics[around.at]
    way = math.sqrt(max(now.get("train/kl", 0.0), 0.0)) - math.sqrt(max(last.get("train/kl", 0.0), 0.0))
    return way <= 2 * math.sqrt(max(now.get("train/proximal_kl", 0.0), 0.0))


def moved(around: Around) -> Findings:
    """A policy that moved further than before in one iteration."""
    title = "the policy moves further"
    yield from _metric_finding(around, "moved", "train/proximal_kl", title, KL_MIN, np.sqrt, symptom=True)


def staleness(around: Around) -> Findings:
    """Rollouts that an older weight version sampled."""
    jump = around.shift_of(around.staleness_R)
    if jump.size < 0.1:
        return
    stale_R = around.staleness_R > 0
    fresh, stale = (around.reward_R[around.after_R & side] for side in (~stale_R, stale_R))
    evidence = [
        f"weight versions behind: {from_to(jump.before, jump.after)}, at most"
        f" {int(around.staleness_R[around.after_R].max())}"
    ]
    if len(fresh) and len(stale):
        evidence.append(
            f"reward from {around.at} on: {fresh.mean():.3g} of the fresh ones, {stale.mean():.3g} of the stale ones"
        )
    yield Finding("staleness", f"stale rollouts: {from_to(jump.before, jump.after)} versions behind", jump, None,
                  evidence, rows_to_show(around, stale_R, -around.staleness_R))  # fmt: skip


def truncation(around: Around) -> Findings:
    """More completions that reach the token limit."""
    jump = around.shift_of(around.truncated_R, trend=True)
    if jump.size <= 0.01:
        return
    cut, whole = around.reward_R[around.truncated_R], around.reward_R[~around.truncated_R]
    limit = [line for line in around.changed if line.startswith("rl.completion_tokens_max")]
    lost = (float(cut.mean()) if len(cut) else 0.0) - (float(whole.mean()) if len(whole) else 0.0)
    evidence = [
        *limit,
        (
            f"reward of the truncated ones {float(cut.mean()):.3g}, of the others"
            f" {float(whole.mean()) if len(whole) else float('nan'):.3g}"
        ),
        (
            f"tokens of a completion: {from_to(*around.means(around.tokens_R))}, at most"
            f" {around.config.rl.completion_tokens_max}"
        ),
    ]
    before, after = around.means(around.truncated_R.astype(float))
    yield Finding("truncation", f"truncated completions: {before:.1%} -> {after:.1%}", jump, jump.size * lost, evidence,
                  rows_to_show(around, around.truncated_R), symptom=not limit)  # fmt: skip


def length(around: Around) -> Findings:
    """Completions that are suddenly longer or shorter."""
    jump = around.shift_of(around.tokens_R, trend=True)
    if abs(jump.size) < 0.15 * max(jump.before, 1.0):
        return
    tokens = around.tokens_R - around.per_group(around.tokens_R)[around.group_R]
    rewards = around.reward_R - around.per_group(around.reward_R)[around.group_R]
    squares = float((tokens**2).sum())
    slope = float((tokens * rewards).sum()) / squares if squares > 0 else 0.0
    evidence = [
        f"tokens of a completion: {from_to(jump.before, jump.after)}; within a group one token more is {slope:+.3g} of"
        " the reward"
    ]
    yield Finding("length", f"length of completions: {from_to(jump.before, jump.after)} tokens", jump,
                  slope * jump.size, evidence,
                  rows_to_show(around, np.ones(len(tokens), bool), -np.sign(jump.size) * around.tokens_R),
                  symptom=True)  # fmt: skip
