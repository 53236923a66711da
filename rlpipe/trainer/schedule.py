"""The learning rate as a pure function of the global optimizer step index: a resumed run needs no scheduler state."""

from __future__ import annotations

import math


def learning_rate(step: int, *, peak: float, schedule: str, warmup_steps: int, decay_steps: int) -> float:
    """The learning rate of step `step` (from 0).

    Linear warm-up over `warmup_steps`, reaching `peak` at the last of them; then constant, or down to 0 at `decay_steps`
    (counted from step 0) by cosine or line. ValueError on an unknown schedule.
    """
    assert step >= 0 and warmup_steps >= 0, f"step={step}, warmup_steps={warmup_steps}"
    if schedule not in ("constant", "cosine", "linear"):
        raise ValueError(f"schedule={schedule!r}: use constant, cosine or linear")
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    if schedule == "constant":
        return peak
    assert decay_steps > warmup_steps, f"decay_steps={decay_steps} must exceed warmup_steps={warmup_steps}"
    done = min((step - warmup_steps) / (decay_steps - warmup_steps), 1.0)
    return peak * (1 - done) if schedule == "linear" else peak * 0.5 * (1 + math.cos(math.pi * done))
