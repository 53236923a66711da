"""The operational sections of the config (where, how fast, how far), which may change between two
starts, and definitions that all sections share.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from rlpipe.config.affects import Added

# rows are split evenly over threads, as a row could otherwise be computed by another code path
LOCAL_THREADS = (1, 2, 4, 8, 16)
# by class, the fields that a form shows first, as people change them; then come the section's own
# fields, then inherited ones
FIRST = {
    "SftConfig": ["num_steps", "batch_size", "learning_rate"],
    "RlConfig": [
        "rewards", "num_iterations", "num_prompts", "group_size", "completion_tokens_max", "learning_rate",
        "temperature", "filters"
    ],
    "TrainerConfig": ["place", "deployment", "ranks", "nodes", "gpu_ids", "tokens_max", "threads"],
    "EnginesConfig": ["place", "deployment", "kind", "count", "nodes", "gpu_ids", "threads"],
}  # fmt: skip


def _positions(schema: dict[str, Any], section: type[Any]) -> None:
    """Sets the order of the fields in a form.

    Postgres does not keep the order of keys; Prefect's UI reads `position`.
    """
    order = [*FIRST.get(section.__name__, []), *section.__annotations__]
    names = sorted(schema["properties"], key=lambda name: order.index(name) if name in order else len(order))
    for position, name in enumerate(names):
        schema["properties"][name]["position"] = position


def _title(name: str, _field: object) -> str:
    """The title of a field in a form: its name, as in errors, docs and `changes`."""
    return name


STRICT = ConfigDict(  # refuses unknown fields, and numbers that JSON cannot represent
    extra="forbid",
    frozen=True,
    validate_default=True,
    allow_inf_nan=False,
    json_schema_extra=_positions,
    field_title_generator=_title,
)
TOKENS_MAX = 1 << 24  # per context
# bytes of moments that are copied together (`trainer.offload`); a parameter is never split
PART_BYTES = 2**27
# such parts on the device during an update: one is updated and copied back while the next is copied
# in
PARTS_HERE = 2
VARIABLE = re.compile("[A-Za-z_][A-Za-z0-9_]*")
Bound = Annotated[float, Field(ge=0)]
# seconds; at most some months, which all timers support
Timeout = Annotated[float, Field(gt=0, le=10_000_000)]


class BudgetConfig(BaseModel, **STRICT):
    """The most that a run may spend. The run ends at the first segment or iteration boundary at
    which a budget is used up."""

    wall_clock_h: Bound = Field(
        default=0.0, description="Most hours of committed SFT segments and RL iterations; 0: no bound"
    )
    rollout_tokens: int = Field(default=0, ge=0, description="Most tokens sampled for training; 0: no bound")
    gpu_h: Bound = Field(
        default=0.0, description="Most GPU hours of committed work: the trainer's, in RL the engines' too; 0: no bound"
    )
    price_per_gpu_h: Annotated[Bound, Added(0.0)] = Field(
        default=0.0, description="Price of a GPU hour, in any currency; 0: none"
    )
    cost: Annotated[Bound, Added(0.0)] = Field(
        default=0.0, description="Most that the GPU hours of committed work cost, in that currency; 0: no bound"
    )


class StopConfig(BaseModel, **STRICT):
    """Rules that end RL at an iteration boundary.

    The rule on engine-trainer mismatch is rl.on_mismatch = "stop".
    """

    reward_plateau: int = Field(
        default=0, ge=0, description="End RL after this many iterations without a new best mean reward; 0: no rule"
    )
    kl_max: Bound = Field(
        default=0.0, description="End RL when the KL to the reference (train/kl; needs rl.kl) is larger; 0: no rule"
    )
    proximal_kl_max: Bound = Field(
        default=0.0,
        description="End RL when the KL to the proximal logprobs (train/proximal_kl) is larger; these are from the"
        " start of the iteration or, with rl.proximal = 'engine', recorded while sampling. 0: no rule",
    )


class ServiceConfig(BaseModel, **STRICT):
    """The place of the trainer processes or of the engines; the parent of their two sections, which
    also set their speed.
    """

    place: Literal["process", "deployment", "elsewhere"] = Field(
        default="process",
        description=(
            "Where it runs. process: child processes of the flow; deployment: flow runs of a Prefect deployment;"
            " elsewhere: where you start it (`rlpipe trainer`, `rlpipe host`)"
        ),
    )
    deployment: str = Field(
        default="",
        description=(
            "Prefect deployment that starts a node; empty: serve-trainer/serve-trainer or serve-engines/serve-engines"
        ),
    )
    nodes: int = Field(default=1, ge=1, le=1024, description="Nodes for the trainer processes, or for the engines")
    gpu_ids: list[int] = Field(
        default_factory=list,
        description=(
            "GPUs of each node, numbered from 0 within CUDA_VISIBLE_DEVICES where that is set: one per rank, an equal"
            " share per engine; empty: the CPU"
        ),
    )
    threads: int = Field(default=1, ge=1, le=256, description="CPU threads per rank or engine")
    queue_timeout_s: Timeout = Field(
        default=86_400,
        description=(
            "Longest wait for nodes while the work pool has no room for them or none has joined yet, s; a node whose"
            " Slurm job is queued has no limit"
        ),
    )
    lost_timeout_s: Timeout = Field(
        default=600, description="Longest wait for nodes elsewhere that have joined and no longer answer, s"
    )

    def deployment_of(self, kind: str) -> str:
        """The name of the deployment of `kind`, trainer or engines."""
        return self.deployment or f"serve-{kind}/serve-{kind}"


class TrainerConfig(ServiceConfig):
    """The trainer processes: where and how fast they run, not what they compute."""

    ranks: int = Field(
        default=1, ge=1, le=1024, description="Trainer processes on each node: one per GPU, or any number on a CPU"
    )
    tokens_max: int = Field(default=4096, ge=64, le=TOKENS_MAX, description="Tokens of a microbatch, per rank")
    context_ranks: int = Field(
        default=1,
        ge=1,
        le=1024,
        description=(
            "Size of a context-parallel group: ranks of one node that split each row among them. A row may have"
            " context_ranks x tokens_max tokens"
        ),
    )
    activation_checkpointing: bool = Field(
        default=False, description="Recompute activations in the backward pass: less memory"
    )
    offload: Literal["none", "optimizer"] = Field(
        default="none",
        description=(
            "Where AdamW's moments are during forward and backward passes. none: on the GPUs; optimizer: in host"
            " memory, which frees 8 bytes per parameter on the GPUs, and every update fetches them"
        ),
    )
    split_over: Literal["gang", "node"] = Field(
        default="gang",
        description=(
            "Ranks over which weights, gradients and moments are sharded. gang: all ranks; node: those of one node,"
            " so that every node holds a whole copy and only gradients cross between nodes"
        ),
    )
    nccl_algo: str = Field(
        default="Ring",
        pattern=r"^[A-Za-z0-9,:;^/-]*$",
        max_length=200,
        description=(
            "NCCL_ALGO of the trainer processes: how GPUs sum gradients, unless their environment sets it; empty:"
            " NCCL chooses by size and network, and two runs may end with different bits (docs/gpu.md)"
        ),
    )

    @property
    def copies(self) -> int:
        """The number of copies of the whole model on all trainer processes together."""
        return self.nodes if self.split_over == "node" else 1


class EnginesConfig(ServiceConfig):
    """The engines: where and how fast they run, not what they compute."""

    kind: Literal["local", "sglang", "vllm"] = Field(
        default="local", description="Engine that samples: rlpipe's own (local; on transformers), SGLang or vLLM"
    )
    count: int = Field(default=1, ge=1, le=1024, description="Engines per node")
    colocate: bool = Field(
        default=False,
        description="Trainer and engines are on the same GPUs and use their memory in turns (docs/gpu.md)",
    )
    transport: Literal["disk", "tensor"] = Field(
        default="disk",
        description=(
            "How a new policy gets from the trainer to SGLang. disk: as files; tensor: from memory to memory, over"
            " NCCL (on CPUs gloo), and as files where that fails"
        ),
    )
    python: str = Field(
        default="", description="Python interpreter that has SGLang or vLLM installed; empty: the one that runs rlpipe"
    )
    flags: list[str] = Field(default_factory=list, description="More flags for SGLang's or vLLM's server")
    environment: dict[str, str] = Field(default_factory=dict, description="More environment variables for the engines")
    in_flight_max: int = Field(
        default=256,
        ge=1,
        le=65_536,
        description="Most rollouts in flight per engine; the local engine computes as many (16 to 128) at every step",
    )
    progress_timeout_s: Timeout = Field(
        default=600, description="An engine that samples no token for this time is given up, s"
    )
    hung_timeout_s: Timeout = Field(
        default=60, description="An engine that fails its health checks for this time is restarted, s"
    )


class TrackingConfig(BaseModel, **STRICT):
    """The MLflow store that metrics go to, and the address of `rlpipe view` for links."""

    uri: str = Field(
        default="sqlite:///mlflow.db",
        description=(
            "MLflow tracking URI. When it is not set here, the environment variable MLFLOW_TRACKING_URI replaces the"
            " default; empty: not tracked"
        ),
    )
    project: str = Field(
        default="rlpipe",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9 ._-]*$",
        max_length=80,
        description=(
            "Name of the MLflow experiment with the run's metrics, and of the registered model with its policies;"
            " runs that are compared have the same one"
        ),
    )
    view_url: str = Field(
        default="",
        pattern=r"^(https?://[^\s?#]+)?$",
        max_length=200,
        description="Address of `rlpipe view` for this store: Prefect and MLflow link to it; empty: no links",
    )

    def view_of(self, run: str, page: str = "") -> str:
        """The URL of a run's page, or of a page below it; empty without a view."""
        return f"{self.view_url.rstrip('/')}/runs/{run}{page}" if self.view_url else ""


def broken_environment(engines: EnginesConfig) -> Iterator[str]:
    """Yields one line for each environment variable that a process cannot have."""
    for name, value in engines.environment.items():
        if not VARIABLE.fullmatch(name) or "\0" in value:
            yield (
                f"engines.environment={{{name!r:.80}: ...}}: no process can have it; a name has letters, digits and"
                " '_', a value no zero byte"
            )
