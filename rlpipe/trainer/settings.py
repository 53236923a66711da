"""The settings of a training job: a section of the run's config, and where in the run the job begins. Checked before any work."""

from __future__ import annotations

import math

from pydantic import Field

from rlpipe.config_training import OptimizerConfig, RlConfig, SftConfig


class RlSettings(RlConfig):
    """One RL iteration."""

    first_step: int = Field(ge=0, description="Global index of the job's first optimizer step")


class SftSettings(SftConfig):
    """A segment of SFT, of `num_steps` steps."""

    first_step: int = Field(ge=0, description="Global index of the job's first optimizer step")
    seed: int = Field(description="Seed of the run")


def learning_rate(settings: OptimizerConfig, step: int) -> float:
    """The learning rate of the global optimizer step `step`, a pure function: a resumed run needs no scheduler state.

    Linear warm-up over `warmup_steps`, reaching the peak at the last of them; then constant, or down to 0 at `decay_steps`
    (counted from step 0) by cosine or line.
    """
    peak, warmup_steps = settings.learning_rate, settings.warmup_steps
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    if settings.schedule == "constant":
        return peak
    done = min((step - warmup_steps) / (settings.decay_steps - warmup_steps), 1.0)
    return peak * (1 - done) if settings.schedule == "linear" else peak * 0.5 * (1 + math.cos(math.pi * done))
