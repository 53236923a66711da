"""Evaluation against training: if the reward of held-out prompts changed as the training reward
did.
"""

from __future__ import annotations

import numpy as np
from scipy import stats

from rlpipe.extras.why.around import Around
from rlpipe.extras.why.changes import Shift
from rlpipe.extras.why.suspects.finding import Finding, Findings, from_to, rows_to_show

REWARD = "_reward_mean"


def evaluation(around: Around) -> Findings:
    """A training reward that changes while the evaluation's does not, or the reverse.

    The evaluation of iteration k is that of the policy that it made, so the last one before counts
    as before, the next one as after.
    """
    values = {
        number: reward
        for number, metrics in around.metrics.items()
        if (reward := _reward(around, number, metrics)) is not None
    }
    before = [value for number, value in values.items() if number < around.at]
    after = [value for number, value in values.items() if number >= around.at]
    if not before or not after or around.config.evaluation.rewards:
        return
    training, evaluated = around.shift_of(around.reward_R), after[0] - before[-1]
    spread = float(around.reward_R.std())
    noise = spread * np.sqrt(2 / max(around.config.evaluation.prompts_max, 1))
    error = float(np.hypot(noise, abs(training.size / training.z) if training.z else 0.0))
    gap = training.size - evaluated
    if error == 0.0 or abs(gap) < 0.1 * spread:
        return
    z = gap / error
    shift = Shift(before[-1], after[0], gap, float(2 * stats.norm.sf(abs(z))), z)
    evidence = [
        f"training reward {from_to(training.before, training.after)}, evaluation reward {from_to(before[-1], after[0])}"
    ]
    if abs(evaluated) < abs(training.size) / 3:
        evidence.append("the policy is as good as it was: look at the prompts and the scoring of training")
    yield Finding(
        "evaluation",
        f"training and evaluation part by {gap:+.3f}",
        shift,
        gap,
        evidence,
        rows_to_show(around, np.ones(len(around.rollouts), bool), around.reward_R),
        symptom=True,
    )


def _reward(around: Around, iteration: int, metrics: dict[str, float]) -> float | None:
    sets = [f"evaluation/{data.name}{REWARD}" for data in around.config.sets("evaluation")]
    values = [metrics[name] for name in sets if name in metrics]
    return float(np.mean(values)) if values else None
