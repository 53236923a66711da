"""The sections of the config without a module of their own, and the interface that the rules
read.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, NamedTuple, Protocol

from pydantic import BaseModel, Field

from rlpipe.config.affects import Added
from rlpipe.config.model import ModelConfig
from rlpipe.config.operational import STRICT, TOKENS_MAX, BudgetConfig, EnginesConfig, StopConfig, TrainerConfig
from rlpipe.config.training import RlConfig, SftConfig


class DataConfig(BaseModel, **STRICT):
    """One data set and what it is used for."""

    name: str = Field(description="Name in metrics and prompt ids", pattern=r"^[a-z0-9_]+$")
    use: Literal["sft", "rl", "evaluation"] = Field(description="Phase that reads the data set")
    source: str = Field(
        description=(
            "reasoning_gym:NAME, datasets:PATH, package.module:function that gives rows, or a .jsonl or .parquet file"
            " or a folder of such, also on s3://; for sft also run:NAME, stored rollouts (docs/distillation.md)"
        ),
        min_length=1,
    )
    weight: float = Field(
        default=1.0, gt=0, description="Share in the mixture, relative to the other sets of the same use"
    )
    rows_max: int = Field(
        default=0, ge=0, le=10**9, description="Rows read (0: all); for a generator the number of items made"
    )
    part: Literal["all", "train", "heldout"] = Field(
        default="all", description="Part of the rows to use; a row is in train or in heldout by the hash of its prompt"
    )
    heldout_fraction: float = Field(default=0.1, gt=0, lt=1, description="Share of prompts that are in heldout")
    args: dict[str, Any] = Field(default_factory=dict, description="Arguments of a generator, a function or `datasets`")
    prompt_field: str = Field(default="prompt", description="Column of the prompt: text or messages")
    answer_field: str = Field(default="answer", description="Column of the reference answer")
    on_too_long: Annotated[Literal["drop", "fail"] | None, Added()] = Field(
        default=None,
        description=(
            "What to do with rows that are longer than the context has room for: drop them, or fail; none: prompts"
            " fail, conversations of sft are truncated"
        ),
    )
    completion_template: str = Field(default="{answer}", description="SFT completion made from the answer")
    system_prompt: str = Field(default="", description="System message put before every prompt; empty: none")
    teacher: Annotated[str, "teacher_logprobs", Added("")] = Field(
        default="",
        description="Teacher of this set of use rl in place of rl.teacher, named as that; empty: rl.teacher",
    )


class EvaluationConfig(BaseModel, **STRICT):
    """The evaluation of policies: when and how."""

    every: Annotated[int, "plan"] = Field(
        default=10, ge=0, le=100_000, description="Iterations between evaluations; 0: only at the start and at the end"
    )
    prompts_max: Annotated[int, "evaluation"] = Field(
        default=200, ge=1, le=10**6, description="Prompts of each evaluation set"
    )
    num_completions: Annotated[int, "evaluation"] = Field(
        default=1, ge=1, le=64, description="Sampled completions per prompt, n: for pass@1, pass@k up to n, and maj@n"
    )
    completion_tokens_max: Annotated[int | None, "evaluation if own"] = Field(
        default=None, ge=1, le=TOKENS_MAX, description="Longest completion, tokens; none: rl.completion_tokens_max"
    )
    temperature: Annotated[float, "evaluation if not 1"] = Field(
        default=1.0,
        ge=0.01,
        le=2,
        description="Temperature of the sampled completions; each prompt also gets one greedy completion",
    )
    top_p: Annotated[float | None, "evaluation if own"] = Field(
        default=None, gt=0, le=1, description="Nucleus sampling; none: rl.top_p"
    )
    rewards: Annotated[dict[str, float], "evaluation if own"] = Field(
        default_factory=dict,
        description="Reward -> weight; empty: rl.rewards. Their arguments are in rl.reward_args too",
    )
    pass_threshold: Annotated[float | None, "evaluation", "batch if curriculum"] = Field(
        default=None,
        description=(
            "A rollout passes when its reward is at least this; none: the sum of the positive weights, which is the"
            " best reward where each part is at most 1"
        ),
    )
    gate_against: Annotated[str, "operational", Added("")] = Field(
        default="",
        pattern=r"^(base|champion|run:[A-Za-z0-9][A-Za-z0-9._-]*(@\d{1,9})?)?$",
        description="Policy to beat: base (RL's start), run:NAME, run:NAME@VERSION, champion (of MLflow); empty: none",
    )
    gate_at_least: Annotated[dict[str, Annotated[float, Field(ge=-1e6, le=1e6)]], "operational", Added({})] = Field(
        default_factory=dict, description="SET_METRIC -> smallest lower bound of its difference (95 % interval)"
    )
    gate_at_most_below: Annotated[dict[str, Annotated[float, Field(ge=0, le=1e6)]], "operational", Added({})] = Field(
        default_factory=dict, description="SET_METRIC -> how far below 0 that lower bound may be; 0.02 for example"
    )


class CheckpointConfig(BaseModel, **STRICT):
    """The states and policies that are kept. Pruning, and how a pruned one is made again, are in
    docs/store.md.
    """

    state_every: int = Field(
        default=5,
        ge=1,
        le=100_000,
        description="Iterations between stored training states; resume replays at most this many",
    )
    keep_states: int = Field(
        default=0,
        ge=0,
        le=100_000,
        description="Training states of RL to keep, the newest ones; 0: all. A fork at an older iteration replays more",
    )
    keep_policies_last: int = Field(
        default=0, ge=0, le=100_000, description="Policies of RL to keep, the newest ones; 0: all, and none is pruned"
    )
    keep_policies_every: int = Field(
        default=0,
        ge=0,
        le=100_000,
        description="Also keep each policy whose weight version is a multiple of this; 0: keep no others",
    )
    full_every: int = Field(
        default=1,
        ge=1,
        le=100,
        description=(
            "Weight versions from one policy that is stored whole to the next; each policy between is stored as its"
            " difference to the policy before it"
        ),
    )


class FrozenModel(NamedTuple):
    """A frozen model that a run names beside its policy. `field`: where, as in `--set`."""

    field: str
    name: str  # a folder, a hub name, or run:NAME


class Sections(Protocol):
    """The config as its rules see it: `rlpipe.config.pipeline.PipelineConfig`, which imports the
    rules.
    """

    @property
    def run(self) -> str: ...
    @property
    def model(self) -> ModelConfig: ...
    @property
    def data(self) -> list[DataConfig]: ...
    @property
    def sft(self) -> SftConfig: ...
    @property
    def rl(self) -> RlConfig: ...
    @property
    def evaluation(self) -> EvaluationConfig: ...
    @property
    def scratch(self) -> str: ...
    @property
    def budget(self) -> BudgetConfig: ...
    @property
    def stop(self) -> StopConfig: ...
    @property
    def trainer(self) -> TrainerConfig: ...
    @property
    def engines(self) -> EnginesConfig: ...
    @property
    def checkpoint(self) -> CheckpointConfig: ...
    @property
    def frozen_models(self) -> dict[str, FrozenModel]: ...
    @property
    def teachers(self) -> list[str]: ...
    def sets(self, use: str) -> list[DataConfig]: ...
    def model_dump(self) -> dict[str, Any]: ...
