"""The two training sections of the config: what SFT and RL compute."""

from __future__ import annotations

import math
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator


def _positions(schema: dict[str, Any], section: type[Any]) -> None:
    """Says in what order a form shows the fields: a section's own first. Postgres keeps no order of keys, Prefect's UI reads `position`."""
    own = [name for name in schema["properties"] if name in section.__annotations__]
    inherited = [name for name in schema["properties"] if name not in own]
    for position, name in enumerate(own + inherited):
        schema["properties"][name]["position"] = position


def _title(name: str, _field: object) -> str:
    """A form names a field as errors, docs and `changes` do."""
    return name


STRICT = ConfigDict(
    extra="forbid", frozen=True, validate_default=True, json_schema_extra=_positions, field_title_generator=_title
)


class OptimizerConfig(BaseModel):
    """AdamW and its schedule; the parent of the two training sections."""

    model_config = STRICT

    learning_rate: float = Field(default=1e-4, gt=0, le=1, description="Peak learning rate")
    schedule: Literal["constant", "cosine", "linear"] = Field(default="constant", description="Learning rate after the warm-up")
    warmup_steps: int = Field(default=0, ge=0, description="Optimizer steps of linear warm-up")
    decay_steps: int = Field(default=0, ge=0, description="Optimizer steps from start to zero learning rate (cosine, linear)")
    beta1: float = Field(default=0.9, ge=0, lt=1, description="AdamW beta 1")
    beta2: float = Field(default=0.99, ge=0, lt=1, description="AdamW beta 2")
    weight_decay: float = Field(default=0.0, ge=0, le=1, description="AdamW weight decay")
    grad_clip: float = Field(default=1.0, gt=0, description="Largest norm of the gradient")

    @model_validator(mode="after")
    def _schedule_has_an_end(self) -> OptimizerConfig:
        if self.schedule != "constant" and self.decay_steps <= self.warmup_steps:
            raise ValueError(
                f"schedule={self.schedule} needs decay_steps ({self.decay_steps}) above warmup_steps ({self.warmup_steps})"
            )
        return self


class SftConfig(OptimizerConfig):
    """Supervised fine-tuning: what is computed."""

    num_steps: int = Field(default=0, ge=0, description="Optimizer steps of SFT; 0 skips it")
    batch_size: int = Field(default=64, ge=1, description="Conversations per step")
    segment_steps: int = Field(default=50, ge=1, description="Steps per committed segment: the unit of resume")
    validation_fraction: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="Share of conversations kept for validation after every segment; the best segment's weights are then the result",
    )
    patience: int = Field(default=0, ge=0, description="Segments without a better validation loss that end SFT early; 0: never")

    @property
    def validated(self) -> bool:
        """Whether there is a validation split, and so a choice among the segments."""
        return self.num_steps > 0 and self.validation_fraction > 0

    @model_validator(mode="after")
    def _patience_has_a_loss(self) -> SftConfig:
        if self.patience and not self.validation_fraction:
            raise ValueError(
                f"patience={self.patience} waits for a better validation loss, and validation_fraction=0 gives none: set it above 0"
            )
        return self


class RlConfig(OptimizerConfig):
    """Reinforcement learning: what is computed."""

    num_iterations: int = Field(default=10, ge=0, description="Iterations of RL; 0 skips it")
    num_prompts: int = Field(default=64, ge=1, description="Prompts per sampling round")
    group_size: int = Field(default=8, ge=1, le=1024, description="Rollouts per prompt")
    shard_prompts: int = Field(default=32, ge=1, description="Prompts per shard of generate: the unit of its retry")
    completion_tokens_max: int = Field(
        default=256, ge=1, description="Longest completion, tokens; in an environment the whole rollout after its prompt"
    )
    temperature: float = Field(default=1.0, gt=0, le=2, description="Sampling temperature")
    top_p: float = Field(default=1.0, gt=0, le=1, description="Nucleus sampling; 1 is off (and what training assumes)")
    top_k: int = Field(default=-1, ge=-1, description="Top-k sampling; -1 is off")
    rewards: dict[str, float] = Field(
        default_factory=lambda: {"math": 1.0}, description="Reward -> weight; by name or package.module:function"
    )
    reward_args: dict[str, dict[str, Any]] = Field(
        default_factory=dict,
        description='Reward -> its arguments, for example `{"format": {"pattern": "<answer>.+</answer>"}}`',
    )
    reward_timeout_s: float = Field(default=10.0, gt=0, description="Longest time to score one rollout, s")
    reward_workers: int = Field(
        default=1, ge=1, le=64, description="Processes that score, and as many that environments live in"
    )
    reward_fallback: float | None = Field(
        default=0.0,
        allow_inf_nan=False,
        description="Reward of a rollout that could not be scored, or whose environment failed; none: the run stops",
    )
    filters: dict[str, float] = Field(
        default_factory=lambda: {"nonzero_std": 0.0},
        description="Filter -> threshold; by name or package.module:function",
    )
    rounds_max: int = Field(default=1, ge=1, le=100, description="Sampling rounds until enough groups survive the filters")
    groups_min: int = Field(default=1, ge=0, description="Groups that are enough to train")
    on_too_few: Literal["train", "fail"] = Field(
        default="train", description="What to do when rounds_max rounds left too few groups"
    )
    oversampling: float = Field(
        default=1.0,
        ge=1,
        le=16,
        description="Groups started per sampling round, as a multiple of num_prompts. Above 1 a round ends when num_prompts (or "
        "groups_min) groups have survived the filters; the next iteration continues the rest. Which those are depends on timing",
    )
    staleness_max: int = Field(
        default=1,
        ge=0,
        description="Oldest tokens, in weight versions back, that a rollout may have when it is continued; else it starts again",
    )
    train_stale_tokens: bool = Field(
        default=True, description="Whether tokens sampled by older weight versions carry loss; if not, they are context only"
    )
    mask_truncated: bool = Field(default=False, description="Whether rollouts cut off by the token limit carry no loss")
    curriculum: Literal["none", "band", "weight"] = Field(
        default="none",
        description="Prompts by their running pass rate: skip those outside pass_rate_low..high, or prefer those near one half",
    )
    pass_rate_low: float = Field(default=0.1, ge=0, le=1, description="Lower edge of curriculum band")
    pass_rate_high: float = Field(default=0.9, ge=0, le=1, description="Upper edge of curriculum band")
    rollouts_from: str = Field(
        default="",
        description="Train on stored rollouts: run:NAME, or a Parquet file or folder of that schema; empty: sample them",
    )
    environment: str = Field(
        default="", description="Multi-turn environment, by name or package.module:Class; empty: one completion a rollout"
    )
    environment_args: dict[str, Any] = Field(default_factory=dict, description="Arguments of the environment")
    environment_timeout_s: float = Field(default=10.0, gt=0, description="Longest single step of an environment, s")
    turns_max: int = Field(default=4, ge=1, description="Completions per rollout in an environment")
    estimator: Literal["grpo", "dr_grpo", "rloo", "maxrl", "opo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"] = (
        Field(default="grpo", description="Advantages from rewards")
    )
    gamma: float = Field(default=1.0, gt=0, le=1, description="Discount per token (reinforce_plus_plus)")
    num_steps: int = Field(default=4, ge=1, description="Optimizer steps per iteration")
    objective: Literal["ppo", "gspo", "cispo", "sapo", "dppo", "reinforce"] = Field(default="ppo", description="Policy loss")
    clip_low: float = Field(default=0.2, gt=0, lt=1, description="Clip of the ratio below 1")
    clip_high: float = Field(default=0.28, gt=0, description="Clip of the ratio above 1")
    dual_clip: float | None = Field(
        default=None, gt=1, description="Bound of the ratio for negative advantages (ppo, gspo); none: unbounded"
    )
    aggregation: Literal["token_mean", "sequence_mean", "fixed_length"] = Field(
        default="token_mean", description="How token losses become one"
    )
    kl: Literal["none", "loss", "reward"] = Field(
        default="none",
        description="Where the KL to the reference (the policy RL starts from) enters: added to the loss, or subtracted from rewards",
    )
    kl_coef: float = Field(default=0.0, ge=0, description="Weight of that KL")
    kl_estimator: Literal["k1", "k2", "k3", "abs"] = Field(default="k3", description="Estimator of that KL")
    entropy_coef: float = Field(default=0.0, ge=0, description="Weight of the entropy bonus")
    importance: Literal["none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"] = Field(
        default="token_truncate", description="Correction of engine-trainer mismatch"
    )
    importance_low: float = Field(default=0.0, ge=0, description="Lower bound of the importance weight")
    importance_high: float = Field(default=2.0, gt=0, description="Upper bound of the importance weight")
    mismatch_max: float = Field(default=0.05, gt=0, description="Largest expected mean |proximal - rollout logprobs|")
    on_mismatch: Literal["warn", "stop", "fail"] = Field(
        default="warn",
        description="What to do when mismatch_max is exceeded: warn, end the run after the iteration, or refuse the iteration's policy",
    )

    @field_validator("kl", "importance", "curriculum", mode="before")
    @classmethod
    def _none_is_a_choice(cls, value: Any) -> Any:
        return "none" if value is None else value  # what `--set rl.kl=none` reads as

    @model_validator(mode="after")
    def _combinations(self) -> RlConfig:
        if self.environment and self.oversampling > 1:
            raise ValueError(
                f"environment={self.environment!r} and oversampling={self.oversampling:g}: a rollout that is cut short would go on in "
                "the next iteration, and the state of its environment is not carried there; use oversampling = 1"
            )
        if self.environment_args and not self.environment:
            raise ValueError("environment_args without an environment: name one, or leave them out")
        if "environment" in self.rewards and not (self.environment or self.rollouts_from):
            raise ValueError(
                "rewards names 'environment', which is the sum of an environment's step rewards: name one as environment"
            )
        if not self.rewards:
            raise ValueError("rewards is empty: name at least one, for example rewards = {math = 1.0}")
        if self.pass_rate_low > self.pass_rate_high:
            raise ValueError(
                f"pass_rate_low={self.pass_rate_low:g} is above pass_rate_high={self.pass_rate_high:g}: no prompt lies between them"
            )
        if (self.kl == "none") != (self.kl_coef == 0):
            raise ValueError(
                f"kl={self.kl!r} and kl_coef={self.kl_coef:g}: a KL needs both a place (loss, reward) and a weight above 0"
            )
        return self

    @model_validator(mode="after")
    def _advantages_make_sense(self) -> RlConfig:
        if self.group_size == 1 and self.estimator != "reinforce_plus_plus":
            raise ValueError(
                f"group_size=1: estimator {self.estimator} compares the rollouts of a group; use group_size of 2 or more, "
                "or estimator reinforce_plus_plus, which compares those of the whole batch"
            )
        if self.group_size == 1 and "nonzero_std" in self.filters:
            raise ValueError(
                "group_size=1: the filter nonzero_std drops every group of one, whose rewards cannot differ; use filters = {}"
            )
        if self.gamma < 1 and self.estimator != "reinforce_plus_plus":
            raise ValueError(
                f"gamma={self.gamma:g}: estimator {self.estimator} gives all tokens of a rollout one advantage and discounts "
                "nothing; use gamma = 1, or estimator reinforce_plus_plus"
            )
        if self.kl == "reward" and self.estimator == "maxrl":
            raise ValueError(
                "kl='reward': estimator maxrl divides by the mean reward of a group, which a KL can make negative; "
                "use kl = 'loss', or another estimator"
            )
        return self

    @model_validator(mode="after")
    def _losses_make_sense(self) -> RlConfig:
        if self.kl == "loss" and self.kl_estimator == "k1":
            raise ValueError(
                "kl_estimator='k1' with kl='loss': the expected gradient of k1 is zero on-policy, so it would hold nothing back; "
                "use k2 or k3, or kl = 'reward'"
            )
        if self.dual_clip is not None and self.objective not in ("ppo", "gspo"):
            raise ValueError(
                f"dual_clip={self.dual_clip:g}: objective {self.objective} has no such clip; use dual_clip = none, or ppo or gspo"
            )
        if self.objective == "dppo" and self.importance != "none":
            raise ValueError(
                f"importance={self.importance!r}: objective dppo divides by the rollout's probability already, "
                "and would be corrected twice; use importance = 'none'"
            )
        if self.objective == "dppo" and self.clip_high >= 1:
            raise ValueError(
                f"clip_high={self.clip_high:g}: objective dppo bounds a difference of probabilities, which is below 1; "
                "use clip_high below 1"
            )
        if self.importance_low >= self.importance_high:
            raise ValueError(
                f"importance_low={self.importance_low:g} and importance_high={self.importance_high:g} leave no weight between "
                "them; use importance_low below importance_high"
            )
        if self.importance_low > 0 and not self.importance.startswith("token"):
            raise ValueError(
                f"importance_low={self.importance_low:g}: importance {self.importance} has no lower bound; "
                "use importance_low = 0, or token_truncate or token_mask"
            )
        if self.on_mismatch != "warn" and self.off_policy:
            raise ValueError(
                f"on_mismatch={self.on_mismatch!r}: of tokens that older policies sampled (oversampling above 1 with train_stale_tokens, or "
                "rollouts_from) the mismatch holds the policy's own change and is not checked; use on_mismatch = 'warn'"
            )
        return self

    @model_validator(mode="after")
    def _stored_rollouts(self) -> RlConfig:
        source = self.rollouts_from
        if source == "run:" or "://" in source:
            raise ValueError(f"rollouts_from={source!r}: use run:NAME, or a local path of a Parquet file or folder")
        for name, value, neutral in (("oversampling", self.oversampling, 1), ("curriculum", self.curriculum, "none")):
            if source and value != neutral:
                raise ValueError(
                    f"{name}={value!r} chooses what is sampled, and rollouts_from={source!r} samples nothing: "
                    f"set {name} = {neutral!r}, or rollouts_from = ''"
                )
        return self

    @property
    def off_policy(self) -> bool:
        """Whether tokens are trained that an older policy sampled."""
        return bool(self.rollouts_from) or (self.oversampling > 1 and self.train_stale_tokens)

    @property
    def round_groups(self) -> int:
        """Groups started in a sampling round."""
        return math.ceil(round(self.num_prompts * self.oversampling, 6))  # 10 x 1.1 is a little more than 11
