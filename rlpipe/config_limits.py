"""The sections of the config that end a run early: budgets and stop rules. They may change between two starts."""

from __future__ import annotations

from pydantic import BaseModel, Field

from rlpipe.config_training import STRICT


class BudgetConfig(BaseModel):
    """What a run may spend. It ends at the first segment or iteration boundary at which a budget is used up."""

    model_config = STRICT

    wall_clock_h: float = Field(
        default=0.0, ge=0, allow_inf_nan=False, description="Hours of committed SFT segments and RL iterations; 0: no bound"
    )
    rollout_tokens: int = Field(default=0, ge=0, description="Tokens sampled for training; 0: no bound")
    gpu_h: float = Field(
        default=0.0,
        ge=0,
        allow_inf_nan=False,
        description="Committed hours x GPUs: the trainer's during SFT, the trainer's and the engines' during RL; 0: no bound",
    )


class StopConfig(BaseModel):
    """Rules that end RL at an iteration boundary. The rule on engine-trainer mismatch is rl.on_mismatch = "stop"."""

    model_config = STRICT

    reward_plateau: int = Field(
        default=0, ge=0, description="Iterations without a better mean reward of rollouts than the best before; 0: no rule"
    )
    kl_max: float = Field(
        default=0.0, ge=0, allow_inf_nan=False, description="Largest KL to the reference (train/kl; needs rl.kl); 0: no rule"
    )
    proximal_kl_max: float = Field(
        default=0.0,
        ge=0,
        allow_inf_nan=False,
        description="Largest KL of an iteration's steps to the policy that it started from (train/proximal_kl); 0: no rule",
    )
