"""The config: one pydantic tree, two levels deep. Every field says what it is, its unit and its bounds.

`model`, `data`, `sft`, `rl`, `evaluation` and `seed` say *what* is computed: they are fixed for a run. The sections and fields in
`OPERATIONAL` and `OPERATIONAL_FIELDS` say *where, how fast and how far*: they may change between two starts.
"""

from __future__ import annotations

import re
from typing import Any, Literal

from pydantic import BaseModel, Field, field_validator, model_validator

from rlpipe.config_limits import BudgetConfig, StopConfig
from rlpipe.config_training import STRICT, RlConfig, SftConfig
from rlpipe.secrecy import refuse_secrets
from rlpipe.types import JsonDict

OPERATIONAL = {"run", "store", "trainer", "engines", "checkpoint", "tracking", "budget", "stop", "approval"}
OPERATIONAL_FIELDS = {
    "rl.num_iterations",
    "rl.reward_workers",
    "rl.reward_timeout_s",
    "rl.environment_timeout_s",
    "rl.on_mismatch",
    "rl.mismatch_max",
}


class ModelConfig(BaseModel):
    """The model that training starts from: a folder in HF format, or a new Qwen3 of the given shape."""

    model_config = STRICT

    path: str = Field(
        default="", description="Folder (or hub name) of a model in HF format; empty builds a new Qwen3 model and tokenizer"
    )
    dtype: Literal["float32", "bfloat16"] = Field(default="float32", description="Number type of the forward and backward pass")
    hidden_size: int = Field(default=128, ge=8, description="Width of a new model (plan also uses the shape for estimates)")
    intermediate_size: int = Field(default=384, ge=8, description="Width of a new model's MLP")
    num_layers: int = Field(default=4, ge=1, description="Layers of a new model")
    num_heads: int = Field(default=4, ge=1, description="Attention heads of a new model")
    num_kv_heads: int = Field(default=2, ge=1, description="Key-value heads of a new model")
    init_std: float = Field(default=0.02, gt=0, le=1, description="Standard deviation of a new model's initial weights")
    vocab_size: int = Field(default=0, ge=0, description="Vocabulary for plan's estimates; 0: the tokenizer's own")
    context_tokens_max: int = Field(
        default=512,
        ge=16,
        description="Longest prompt + completion, and longest conversation, tokens; longer ones are truncated and counted",
    )
    chat_template: str = Field(default="", description="Jinja chat template that replaces the tokenizer's; empty keeps it")
    chat_template_args: dict[str, Any] = Field(
        default_factory=dict,
        description='More variables of the chat template, for example `{"enable_thinking": false}`, or tools as JSON schemas',
    )

    @field_validator("chat_template_args")
    @classmethod
    def _what_the_pipeline_sets_itself(cls, value: dict[str, Any]) -> dict[str, Any]:
        if taken := sorted({"messages", "add_generation_prompt"} & set(value)):
            raise ValueError(
                f"{taken[0]} comes from the data and the stage; remove it (a system message is data's system_prompt)"
            )
        return value


class DataConfig(BaseModel):
    """One data set and what it is used for."""

    model_config = STRICT

    name: str = Field(description="Name in metrics and prompt ids", pattern=r"^[a-z0-9_]+$")
    use: Literal["sft", "rl", "evaluation"] = Field(description="Which phase reads it")
    source: str = Field(
        description="reasoning_gym:NAME, datasets:PATH, a path to .jsonl or .parquet, or package.module:function that gives rows",
        min_length=1,
    )
    weight: float = Field(default=1.0, gt=0, description="Share in the mixture, relative to the other sets of the same use")
    rows_max: int = Field(default=0, ge=0, description="Rows read (0: all); for a generator the number of items made")
    part: Literal["all", "train", "heldout"] = Field(default="all", description="Which side of the split by prompt hash")
    heldout_fraction: float = Field(default=0.1, gt=0, lt=1, description="Share of prompts that are held out")
    args: dict[str, Any] = Field(default_factory=dict, description="Arguments of a generator, a function or `datasets`")
    prompt_field: str = Field(default="prompt", description="Column of the prompt: text or messages")
    answer_field: str = Field(default="answer", description="Column of the reference answer")
    completion_template: str = Field(default="{answer}", description="SFT completion made from the answer")
    system_prompt: str = Field(default="", description="System message put before every prompt; empty: none")


class EvaluationConfig(BaseModel):
    """When and how policies are evaluated."""

    model_config = STRICT

    every: int = Field(default=10, ge=0, description="Iterations between evaluations; 0: only at the start and at the end")
    prompts_max: int = Field(default=200, ge=1, description="Prompts of each evaluation set")
    num_completions: int = Field(
        default=1, ge=1, le=64, description="Completions per prompt at temperature 1, n: for pass@1, pass@k up to n, and maj@n"
    )
    pass_threshold: float = Field(default=1.0, description="A rollout passes when its reward is at least this")


LOCAL_THREADS = (1, 2, 4, 8, 16)  # rows are split evenly over threads, else the same row could be computed by another code path
Place = Literal["process", "deployment", "elsewhere"]


class TrainerConfig(BaseModel):
    """The trainer gang: where and how fast, not what."""

    model_config = STRICT

    place: Place = Field(
        default="process",
        description="Where the gang runs: child processes of the flow, runs of a Prefect deployment, or elsewhere, whence it joins "
        "the run by `rlpipe trainer`",
    )
    deployment: str = Field(default="serve-trainer/serve-trainer", description="The deployment that serves a node of the gang")
    ranks: int = Field(default=1, ge=1, le=1024, description="Training processes on one node (GPUs, or processes on a CPU)")
    nodes: int = Field(default=1, ge=1, le=1024, description="Nodes of the gang")
    gpu_ids: list[int] = Field(default_factory=list, description="GPUs of a node that train; empty: a CPU trains")
    tokens_max: int = Field(default=4096, ge=64, description="Tokens of a microbatch, per rank")
    threads: int = Field(default=1, ge=1, le=256, description="CPU threads per rank")
    activation_checkpointing: bool = Field(
        default=False, description="Recompute activations in the backward pass to save memory"
    )
    port: int = Field(default=0, ge=0, le=65535, description="Port of the trainer; 0: a free one")
    job_timeout_s: float = Field(default=7200, gt=0, description="Longest single job, s")


class EnginesConfig(BaseModel):
    """The engines: where and how fast, not what."""

    model_config = STRICT

    place: Place = Field(
        default="process",
        description="Where the engines run: child processes of the flow, runs of a Prefect deployment, or elsewhere, whence they "
        "join the run by `rlpipe host`",
    )
    deployment: str = Field(
        default="serve-engines/serve-engines", description="The deployment that serves the engines of a node"
    )
    kind: Literal["local", "sglang", "vllm"] = Field(
        default="local", description="rlpipe's own engine on transformers, SGLang, or vLLM"
    )
    count: int = Field(default=1, ge=1, le=1024, description="Engines per node")
    nodes: int = Field(default=1, ge=1, le=1024, description="Nodes that sample")
    gpu_ids: list[int] = Field(
        default_factory=list, description="GPUs of a node that sample, split among its engines; empty: CPU"
    )
    threads: int = Field(default=1, ge=1, le=256, description="CPU threads per engine")
    python: str = Field(default="", description="Interpreter that has SGLang or vLLM installed; empty: this one")
    flags: list[str] = Field(default_factory=list, description="More flags for SGLang's or vLLM's server")
    environment: dict[str, str] = Field(default_factory=dict, description="More environment variables for the engines")
    in_flight_max: int = Field(
        default=256,
        ge=1,
        description="Rollouts in flight per engine; the local engine computes so many places (16 to 128) at every step, busy or not",
    )
    port: int = Field(default=0, ge=0, le=65535, description="Port of the first engine, the others follow; 0: free ones")
    request_timeout_s: float = Field(default=600, gt=0, description="Longest single request, s")
    hung_timeout_s: float = Field(default=60, gt=0, description="An engine that is unwell for so long is restarted, s")
    restarts_max: int = Field(default=5, ge=0, description="Restarts of an engine within one start of a run")

    @model_validator(mode="after")
    def _threads_share_rows_evenly(self) -> EnginesConfig:
        if self.kind == "local" and self.threads not in LOCAL_THREADS:
            raise ValueError(
                f"threads={self.threads}: of the local engine choose one of {LOCAL_THREADS}: its results must not depend on the batch"
            )
        return self


class CheckpointConfig(BaseModel):
    """What is kept to go on from."""

    model_config = STRICT

    state_every: int = Field(
        default=5, ge=1, description="Iterations between training states; resume replays at most that many"
    )


class TrackingConfig(BaseModel):
    """Where metrics go."""

    model_config = STRICT

    uri: str = Field(
        default="sqlite:///mlflow.db",
        description="MLflow tracking URI; where it is left as it is, MLFLOW_TRACKING_URI of the environment goes before; empty: not tracked",
    )


class PipelineConfig(BaseModel):
    """SFT and RL of one model, from data to a registered policy."""

    model_config = STRICT

    run: str = Field(default="", description="Name of the run in the store: the same name continues it", max_length=80)
    seed: int = Field(default=0, ge=0, le=2**31 - 1, description="The one seed; all randomness derives from it")
    store: str = Field(
        default="./rlpipe-store", description="Where everything is kept: file:///path or s3://bucket/prefix", min_length=1
    )
    sft: SftConfig = Field(default_factory=SftConfig, description="Supervised fine-tuning")
    rl: RlConfig = Field(default_factory=RlConfig, description="Reinforcement learning")
    evaluation: EvaluationConfig = Field(default_factory=EvaluationConfig, description="Evaluations on held-out prompts")
    budget: BudgetConfig = Field(default_factory=BudgetConfig, description="What the run may spend")
    stop: StopConfig = Field(default_factory=StopConfig, description="Rules that end RL early")
    approval: list[Literal["rl", "register"]] = Field(
        default_factory=list,
        description="Where post-train waits until a person presses Resume: before RL, before the policy is registered",
    )
    trainer: TrainerConfig = Field(default_factory=TrainerConfig, description="Where and how fast it trains")
    engines: EnginesConfig = Field(default_factory=EnginesConfig, description="Where and how fast it samples")
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig, description="How often training states are kept")
    tracking: TrackingConfig = Field(default_factory=TrackingConfig, description="MLflow")
    model: ModelConfig = Field(default_factory=ModelConfig, description="What training starts from")
    data: list[DataConfig] = Field(default_factory=list, description="The data sets")

    _no_secrets = model_validator(mode="before")(staticmethod(refuse_secrets))

    @field_validator("run")
    @classmethod
    def _run_is_a_folder_name(cls, value: str) -> str:
        if value and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", value):
            raise ValueError("a run name is a folder name: letters, digits, '.', '_' and '-', and no slash")
        return value

    @model_validator(mode="after")
    def _data_for_every_phase(self) -> PipelineConfig:
        uses = {data.use for data in self.data}
        for use, wanted in (("sft", self.sft.num_steps), ("rl", self.rl.num_iterations)):
            if wanted and use not in uses and not (use == "rl" and self.rl.rollouts_from):
                raise ValueError(f"no data set with use = {use!r}: add a [[data]] table, or set {use}'s length to 0")
        if not self.model.path and not uses & {"rl", "evaluation"}:
            raise ValueError(
                "model.path is empty, and a new tokenizer is made of prompts: add a data set of use rl or evaluation"
            )
        if self.run and self.rl.rollouts_from == f"run:{self.run}":
            raise ValueError(f"rl.rollouts_from={self.rl.rollouts_from!r}: a run cannot be fed from itself; name another one")
        self._check_places()
        if "environment" in self.rl.rewards and not self.rl.environment and "evaluation" in uses:
            raise ValueError(
                "rl.rewards names 'environment', and evaluations sample: name an rl.environment for them, or drop them"
            )
        if self.stop.kl_max and self.rl.kl == "none":
            raise ValueError(
                f"stop.kl_max={self.stop.kl_max:g}: no KL to a reference is computed (rl.kl = 'none'); set rl.kl and rl.kl_coef, or use "
                "stop.proximal_kl_max"
            )
        if self.budget.gpu_h and not (self.trainer.gpu_ids or self.engines.gpu_ids):
            raise ValueError(
                f"budget.gpu_h={self.budget.gpu_h:g}: neither trainer.gpu_ids nor engines.gpu_ids names a GPU, so none is ever spent; "
                "use budget.wall_clock_h"
            )
        names = [(data.use, data.name) for data in self.data]
        if len(set(names)) != len(names):
            raise ValueError("two data sets of one use have the same name; names end up in metrics, so make them differ")
        if len({data.heldout_fraction for data in self.data if data.part != "all"}) > 1:
            raise ValueError("the data sets' heldout_fraction differ: a prompt held out of one would be trained on by another")
        longest = self.model.context_tokens_max
        if self.rl.completion_tokens_max >= longest:
            raise ValueError(f"model.context_tokens_max={longest} leaves no room for a prompt beside rl.completion_tokens_max")
        return self

    def _check_places(self) -> None:
        trainer, engines = self.trainer, self.engines
        for name, part in (("trainer", trainer), ("engines", engines)):
            if part.nodes > 1 and part.place == "process":
                raise ValueError(f"{name}.nodes={part.nodes}: child processes are on one node; set {name}.place = 'deployment'")
        if trainer.place == engines.place == "process" and set(trainer.gpu_ids) & set(engines.gpu_ids):
            raise ValueError(
                f"engines.gpu_ids={engines.gpu_ids}: the trainer has some of them; set engines.place = 'deployment'"
            )

    @property
    def engines_here(self) -> bool:
        """Whether the engines are child processes of the flow."""
        return self.engines.place == "process"

    @property
    def samples(self) -> bool:
        """Whether the run needs an engine."""
        return not self.rl.rollouts_from or bool(self.sets("evaluation"))

    def sets(self, use: str) -> list[DataConfig]:
        """The data sets of one use, in the order of the config."""
        return [data for data in self.data if data.use == use]


def identity(config: PipelineConfig) -> JsonDict:
    """The flat fields that say what is computed: two starts of one run must agree on them."""
    flat: JsonDict = {}
    for section, value in config.model_dump(mode="json").items():
        if section in OPERATIONAL:
            continue
        entries = value.items() if isinstance(value, dict) else [("", value)]
        flat.update({f"{section}.{key}".rstrip("."): entry for key, entry in entries})
    return {key: value for key, value in flat.items() if key not in OPERATIONAL_FIELDS}
