"""The two training sections of the config, which determine what SFT and RL compute."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, StringConstraints, field_validator, model_validator

from rlpipe.config.affects import ENDS_ROUND, Added, Draws, Operational, Trains
from rlpipe.config.faults import BY_CAUSE, LEFT_OUT, OUTSIDE, STOP, Rule, cause_of_fault, checked_faults
from rlpipe.config.operational import STRICT, TOKENS_MAX, Timeout
from rlpipe.config.secrecy import Secrets, named_variables

BETA1 = 0.9  # of AdamW
STEPS_MAX = 10**8
ROWS_MAX = 10**6  # rows of one batch
Variable = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
Estimator = Literal[
    "grpo", "dr_grpo", "rloo", "maxrl", "opo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "gdpo"
]  # fmt: skip


class OptimizerConfig(BaseModel, **STRICT):
    """AdamW and its schedule; the parent of the two training sections."""

    learning_rate: Trains[float] = Field(default=1e-4, gt=0, le=1, description="Peak learning rate")
    schedule: Trains[Literal["constant", "cosine", "linear"]] = Field(
        default="constant", description="Learning rate after the warm-up"
    )
    warmup_steps: Trains[int] = Field(default=0, ge=0, le=STEPS_MAX, description="Optimizer steps of linear warm-up")
    decay_steps: Trains[int] = Field(
        default=0, ge=0, le=STEPS_MAX, description="Optimizer steps from start to zero learning rate (cosine, linear)"
    )
    beta2: Trains[float] = Field(default=0.99, ge=0, lt=1, description="AdamW beta 2 (beta 1 is 0.9)")
    weight_decay: Trains[float] = Field(default=0.0, ge=0, le=1, description="AdamW weight decay")
    grad_clip: Trains[float] = Field(default=1.0, gt=0, description="Largest norm of the gradient")


class SftConfig(OptimizerConfig):
    """Supervised fine-tuning: what is computed."""

    num_steps: Annotated[int, "policy", "selection if validated"] = Field(
        default=0, ge=0, le=STEPS_MAX, description="Optimizer steps of SFT; 0 skips it"
    )
    batch_size: Trains[int] = Field(default=64, ge=1, le=ROWS_MAX, description="Conversations per step")
    segment_steps: Annotated[int, "policy", "selection if validated"] = Field(
        default=50, ge=1, le=STEPS_MAX, description="Steps per committed segment: the unit of resume"
    )
    validation_fraction: Annotated[float, "data if validated", "selection if validated"] = Field(
        default=0.0,
        ge=0,
        lt=1,
        description=(
            "Share of conversations held out to validate each segment; the segment with the lowest loss is the result"
        ),
    )
    patience: Annotated[int, "selection if validated"] = Field(
        default=0, ge=0, description="End SFT after this many segments without a better validation loss; 0: never"
    )

    @property
    def validated(self) -> bool:
        """True when there is a validation split, by which a segment can be chosen."""
        return self.num_steps > 0 and self.validation_fraction > 0

    @property
    def num_segments(self) -> int:
        """The number of planned segments; fewer are trained when `patience` ends SFT."""
        return -(-self.num_steps // self.segment_steps)


class RlConfig(OptimizerConfig):
    """Reinforcement learning: what is computed."""

    num_iterations: Operational[int] = Field(default=10, ge=0, le=100_000, description="Iterations of RL; 0 skips it")
    num_prompts: Annotated[int, "prompts", ENDS_ROUND] = Field(
        default=64,
        ge=1,
        le=ROWS_MAX,
        description="Prompts per sampling round, and groups that an iteration trains on (groups_min if that is larger)",
    )
    group_size: Annotated[int, "rollouts", "imported"] = Field(
        default=8, ge=1, le=1024, description="Rollouts per prompt"
    )
    shard_prompts: Annotated[int, "rollouts"] = Field(
        default=32, ge=1, le=ROWS_MAX, description="Prompts per shard of generate: the unit of its retry"
    )
    completion_tokens_max: Annotated[int, "rollouts", "policy", "prompts if dropping", "evaluation if shared"] = Field(
        default=256,
        ge=1,
        le=TOKENS_MAX,
        description="Longest completion, tokens; in an environment, or of an agent, the whole rollout after its prompt",
    )
    temperature: Annotated[float, "rollouts", "policy", "teacher_logprobs"] = Field(
        default=1.0, ge=0.01, le=2, description="Sampling temperature"
    )
    top_p: Annotated[float, "rollouts", "evaluation if shared"] = Field(
        default=1.0, gt=0, le=1, description="Nucleus sampling; 1 is off (and what training assumes)"
    )
    rewards: Annotated[dict[str, float], "scores", ENDS_ROUND, "evaluation if shared"] = Field(
        default_factory=lambda: {"math": 1.0}, description="Reward -> weight; by name or package.module:function"
    )
    reward_args: Annotated[dict[str, dict[str, Any]], "scores", "evaluation", ENDS_ROUND] = Field(
        default_factory=dict,
        description='Reward -> its arguments, such as `{"format": {"pattern": "<answer>.+</answer>"}}`',
    )
    reward_timeout_s: Operational[Timeout] = Field(default=10.0, description="Longest time to score one rollout, s")
    reward_workers: Operational[int] = Field(
        default=1, ge=1, le=64, description="Processes that compute rewards, and as many that run environments"
    )
    faults: Annotated[dict[str, Rule], "scores", "evaluation", ENDS_ROUND, "batch if left out"] = Field(
        default_factory=lambda: checked_faults({}),
        description=(
            "Cause of a fault (policy, outside) or its reason -> the reward of a rollout that has it. left_out: it gets"
            " none, and is in no group's mean and no loss; stop: the run stops"
        ),
    )
    filters: Annotated[dict[str, float], "batch", ENDS_ROUND] = Field(
        default_factory=lambda: {"nonzero_std": 0.0},
        description="Filter -> threshold; by name or package.module:function",
    )
    rounds_max: Annotated[int, "batch"] = Field(
        default=1,
        ge=1,
        le=100,
        description="Most sampling rounds of an iteration; another one starts while too few groups survive the filters",
    )
    groups_min: Annotated[int, "batch", ENDS_ROUND] = Field(
        default=1, ge=0, description="Groups that are enough to train on"
    )
    on_too_few: Annotated[Literal["train", "fail"], "batch"] = Field(
        default="train", description="When too few groups are left after rounds_max rounds: train on them, or fail"
    )
    oversampling: Annotated[float, "prompts", "rollouts"] = Field(
        default=1.0,
        ge=1,
        le=16,
        description=(
            "Groups started per sampling round, as a multiple of num_prompts. Above 1 a round ends when num_prompts"
            " (or groups_min) groups have survived the filters; the next iteration continues the rest. Which groups"
            " survive first depends on timing"
        ),
    )
    staleness_max: Annotated[int, "batch"] = Field(
        default=1,
        ge=0,
        description=(
            "A partial rollout continues when its oldest tokens are at most this many weight versions old; else"
            " it starts again"
        ),
    )
    train_stale_tokens: Annotated[bool, "rollouts"] = Field(
        default=True,
        description="Whether tokens sampled by older weight versions carry loss; if not, they are context only",
    )
    mask_truncated: Annotated[bool, "batch", ENDS_ROUND] = Field(
        default=False, description="Whether rollouts cut off by the token limit carry no loss"
    )
    curriculum: Annotated[Literal["none", "band", "weight"], "prompts", "batch if curriculum"] = Field(
        default="none",
        description=(
            "Choice of prompts by their pass rate. none: all alike; band: only from pass_rate_low to"
            " pass_rate_high; weight: more of those near one half"
        ),
    )
    pass_rate_low: Draws[float] = Field(default=0.1, ge=0, le=1, description="Lowest pass rate of curriculum = 'band'")
    pass_rate_high: Draws[float] = Field(
        default=0.9, ge=0, le=1, description="Highest pass rate of curriculum = 'band'"
    )
    rollouts_from: Annotated[str, "prompts", "imported", "rollouts"] = Field(
        default="",
        description=(
            "Train on stored rollouts: run:NAME, or a Parquet file (or a folder of them) with the same columns;"
            " empty: sample"
        ),
    )
    environment: Annotated[str, "prompts", "rollouts", "evaluation"] = Field(
        default="",
        description="Multi-turn environment, by name or package.module:Class; empty: one completion a rollout",
    )
    environment_args: Annotated[dict[str, Any], "prompts", "rollouts", "evaluation"] = Field(
        default_factory=dict, description="Arguments of the environment"
    )
    environment_timeout_s: Operational[Timeout] = Field(
        default=10.0, description="Longest single step of an environment, s"
    )
    environment_total_s: Operational[Timeout | None] = Field(
        default=None,
        description="Longest time of all steps of an environment in one rollout together, s; none: no such limit",
    )
    turns_max: Annotated[int, "rollouts", "evaluation"] = Field(
        default=4, ge=1, le=10_000, description="Completions per rollout in an environment, or of an agent"
    )
    agent: Annotated[str, "rollouts if agent", "evaluation if agent"] = Field(
        default="",
        description=(
            "Agent with a loop of its own, a command or package.module:function, which talks to an OpenAI-compatible"
            " endpoint"
        ),
    )
    agent_timeout_s: Operational[Timeout] = Field(default=600.0, description="Longest rollout of an agent, s")
    agents_max: Operational[int] = Field(
        default=8, ge=1, le=4096, description="Most agents that run at the same time, each in its own process"
    )
    agent_address: Operational[str] = Field(
        default="127.0.0.1", min_length=1, description="Address that the endpoint of agents listens on"
    )
    pass_environment: Annotated[list[Variable], "operational", Added([])] = Field(
        default_factory=list,
        description=(
            "Secret environment variables that agents, environments and reward functions get, and may print; other"
            " secrets are hidden from them"
        ),
    )
    branches: Annotated[Literal["last", "all"], "rollouts if branches", "batch if branches"] = Field(
        default="last",
        description=(
            "Branches to train on when an agent has rewritten the history of its conversation: the last one, or all"
        ),
    )
    overlap: Annotated[Literal["none", "iteration"], "plan"] = Field(
        default="none",
        description=(
            "What runs at the same time. none: sampling and training take turns; iteration: weight version k samples"
            " iteration k + 1 while version k + 1 is trained, so training is one step off policy"
        ),
    )
    estimator: Annotated[Estimator, "batch", "policy"] = Field(default="grpo", description="Advantages from rewards")
    gamma: Annotated[float, "batch", "policy"] = Field(
        default=1.0, gt=0, le=1, description="Discount per token (reinforce_plus_plus)"
    )
    num_steps: Trains[int] = Field(default=4, ge=1, le=10_000, description="Optimizer steps per iteration")
    objective: Trains[Literal["ppo", "gspo", "cispo", "sapo", "dppo", "reinforce"]] = Field(
        default="ppo", description="Policy loss"
    )
    proximal: Annotated[Literal["trainer", "engine"], "policy", Added("trainer")] = Field(
        default="trainer",
        description=(
            "Logprobs that the ratio compares with. trainer: computed with the weights that the iteration started"
            " from, in an extra forward pass; engine: those recorded while sampling, without that pass"
        ),
    )
    clip_low: Trains[float] = Field(default=0.2, gt=0, lt=1, description="Clip of the ratio below 1")
    clip_high: Trains[float] = Field(default=0.28, gt=0, description="Clip of the ratio above 1")
    dual_clip: Trains[float | None] = Field(
        default=None, gt=1, description="Bound of the ratio for negative advantages (ppo, gspo); none: unbounded"
    )
    aggregation: Trains[Literal["token_mean", "sequence_mean", "fixed_length"]] = Field(
        default="token_mean", description="How the losses of the tokens are reduced to one"
    )
    kl: Trains[Literal["none", "loss", "reward"]] = Field(
        default="none",
        description=(
            "Use of the KL to the reference. loss: it is added to the loss; reward: it is subtracted from rewards;"
            " none: it is not computed"
        ),
    )
    kl_coef: Trains[float] = Field(
        default=0.0,
        ge=0,
        description="Weight of the KL to the reference; 0: it is computed and logged, and changes nothing",
    )
    reference: Annotated[str, "reference"] = Field(
        default="",
        description=(
            "Reference model for the KL, with the same vocabulary: a folder, a hub name, or run:NAME (its newest"
            " policy when this run begins); empty: the policy that RL starts from"
        ),
    )
    kl_estimator: Trains[Literal["k1", "k2", "k3", "abs"]] = Field(
        default="k3", description="Estimator of the KL to the reference"
    )
    teacher: Annotated[str, "teacher", "teacher_logprobs", Added("")] = Field(
        default="",
        description=(
            "Teacher of distillation, with the same vocabulary: a folder, a hub name, or run:NAME (its newest policy"
            " when this run begins); empty: none"
        ),
    )
    teacher_engine: Annotated[str, "operational", Added("")] = Field(
        default="",
        description=(
            "Where an engine serves the teacher, for example sglang:http://10.0.0.5:30000 (or vllm:, local:); empty:"
            " the trainer holds it. Its key: RLPIPE_TEACHER_KEY"
        ),
    )
    teacher_coef: Annotated[float, "policy", Added(1.0)] = Field(
        default=1.0,
        ge=0,
        description=(
            "Weight of the teacher's logprob minus the policy's (nats) in the advantage of each token, or, with"
            " teacher_top_k, of their divergence in the loss; 0: only logged"
        ),
    )
    teacher_top_k: Annotated[int, "policy", "teacher_logprobs", Added(0)] = Field(
        default=0,
        ge=0,
        description=(
            "The divergence from the teacher over so many tokens that it finds most probable at each place, all others"
            " as one class (from the vocabulary's size on: all); 0: the token that was sampled alone, as an advantage"
        ),
    )
    teacher_beta: Annotated[float, "policy", Added(0.5)] = Field(
        default=0.5,
        ge=0,
        le=1,
        description="Which divergence, with teacher_top_k: 0 forward KL, 1 reverse KL, between them Jensen-Shannon",
    )
    entropy_coef: Trains[float] = Field(default=0.0, ge=0, description="Weight of the entropy bonus")
    importance: Trains[Literal["none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]] = Field(
        default="token_truncate", description="Correction of engine-trainer mismatch"
    )
    importance_low: Trains[float] = Field(default=0.0, ge=0, description="Lower bound of the importance weight")
    importance_high: Trains[float] = Field(default=2.0, gt=0, description="Upper bound of the importance weight")
    mismatch_max: Operational[float] = Field(
        default=0.05,
        gt=0,
        description="Largest mean |trainer's - engine's logprobs| that is expected at the start of an iteration",
    )
    on_mismatch: Operational[Literal["warn", "stop", "fail"]] = Field(
        default="warn",
        description="Above mismatch_max: warn, stop the run after the iteration, or fail and refuse its policy",
    )

    @field_validator("overlap", mode="before")
    @classmethod
    def _steps_is_none(cls, value: Any) -> Any:
        # a value of older versions, with the same bits
        return "none" if value == "steps" else value

    @field_validator("kl", "importance", "curriculum", "overlap", mode="before")
    @classmethod
    def _none_is_a_choice(cls, value: Any) -> Any:
        return "none" if value is None else value  # `--set rl.kl=none` is read as None

    @model_validator(mode="before")
    @classmethod
    def _rule_of_older_versions(cls, fields: Any) -> Any:
        """`reward_fallback` was one rule for all faults; none stopped the run."""
        if not isinstance(fields, dict) or "reward_fallback" not in fields or "faults" in fields:
            return fields
        rule = fields["reward_fallback"]
        others = {name: value for name, value in fields.items() if name != "reward_fallback"}
        return others | {"faults": dict.fromkeys(BY_CAUSE, STOP if rule is None else rule)}

    @field_validator("faults", mode="before")
    @classmethod
    def _are_rules(cls, value: Any) -> dict[str, Rule]:
        return checked_faults(value)

    @property
    def is_weighed(self) -> bool:
        """True when a reward has a weight, so that rollouts can differ in their reward."""
        return any(self.rewards.values())

    @property
    def secrets(self) -> Secrets:
        """The secret variables that agents, environments and reward functions get. Variables with
        the keys of services count as secret.
        """
        return Secrets(self.pass_environment, named_variables(self.reward_args))

    @property
    def world(self) -> str:
        """The agent or environment of rollouts with several turns, in the user's form of the
        setting. Example: rl.agent='NAME'
        """
        return f"rl.agent={self.agent!r}" if self.agent else f"rl.environment={self.environment!r}"

    def fault_rule(self, reason: str) -> Rule:
        """What becomes of a rollout with a fault of this reason."""
        return self.faults.get(reason, self.faults[cause_of_fault(reason)])

    def stops_at(self, reasons: Iterable[str]) -> bool:
        """True when a fault of one of these reasons stops the run."""
        return any(self.fault_rule(reason) == STOP for reason in reasons)

    def leaves_out(self, reason: str) -> bool:
        """True when a rollout with this `reward_fault` is left out of its group and of the loss;
        False for one without a fault.
        """
        return bool(reason) and self.fault_rule(reason) == LEFT_OUT

    def says_nothing(self, reason: str) -> bool:
        """True when a rollout with this `reward_fault` counts in no mean: it is left out, and the
        policy cannot be the cause. One that may be the policy's counts as 0 wherever it is left
        out.
        """
        return self.leaves_out(reason) and cause_of_fault(reason) == OUTSIDE

    def fault_reward(self, reason: str) -> float:
        """The reward in the record of a rollout with a fault: 0 where it is left out."""
        rule = self.fault_rule(reason)
        return rule if isinstance(rule, float) else 0.0

    @property
    def off_policy(self) -> bool:
        """True when tokens that an older policy sampled are trained."""
        return (
            bool(self.rollouts_from)
            or self.overlap == "iteration"
            or (self.oversampling > 1 and self.train_stale_tokens)
        )

    @property
    def anchored(self) -> bool:
        """True when the denominator of the ratio is the probability recorded while sampling, which
        corrects for every difference since.
        """
        return self.proximal == "engine" or self.objective == "dppo"

    @property
    def corrects_staleness(self) -> bool:
        """True when importance weights or the ratio correct for tokens that an older policy
        sampled.
        """
        return self.importance != "none" or self.anchored

    def mismatch_counts(self, num_tokens_stale: float) -> bool:
        """True when the mismatch of an iteration is only that of engine and trainer. With
        `num_tokens_stale` trained tokens of older policies it includes the change of the policy.
        """
        return not self.rollouts_from and not (num_tokens_stale and self.train_stale_tokens)

    def sampled_by(self, iteration: int) -> int:
        """The weight version that samples for an iteration."""
        return max(0, iteration - 1) if self.overlap == "iteration" else iteration

    @property
    def rollouts_min(self) -> int:
        """The smallest number of rollouts of a group that can be compared."""
        return 1 if self.estimator == "reinforce_plus_plus" else 2

    @property
    def batch_groups(self) -> int:
        """The number of groups that an iteration trains on, if so many are kept."""
        return max(self.num_prompts, self.groups_min)

    @property
    def carries_surplus(self) -> bool:
        """True when surplus groups beyond `batch_groups` can be trained in the next iteration,
        which has another policy than the one that sampled them.
        """
        return self.oversampling > 1 and self.train_stale_tokens

    @property
    def round_groups(self) -> int:
        """The number of groups that a sampling round starts."""
        # in floats 10 x 1.1 is a little more than 11
        return math.ceil(round(self.num_prompts * self.oversampling, 6))
