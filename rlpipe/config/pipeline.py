"""The config: one pydantic tree, two levels deep.

Every field has a description, its unit and its bounds.

`model`, `data`, `sft`, `rl`, `evaluation` and `seed` determine *what* is computed: they are fixed
for a run. The sections in `OPERATIONAL`, and fields that are marked so, determine *where, how fast
and how far*: they may change between two starts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, ValidationInfo, model_validator

from rlpipe.base.hashing import sha256_of
from rlpipe.base.values import JsonDict, expanded
from rlpipe.config.affects import Added, T
from rlpipe.config.extras import SOURCES
from rlpipe.config.faults import STOP, rule_for_all
from rlpipe.config.model import ModelConfig
from rlpipe.config.operational import STRICT, BudgetConfig, EnginesConfig, StopConfig, TrackingConfig, TrainerConfig
from rlpipe.config.rules import broken_layout, broken_rules
from rlpipe.config.secrecy import refuse_secrets
from rlpipe.config.sections import CheckpointConfig, DataConfig, EvaluationConfig, FrozenModel
from rlpipe.config.training import BETA1, RlConfig, SftConfig

SET_TEACHER = "teacher-"  # begins the name of a stage that copies the teacher of a data set
RUN = "run:"  # begins the name of what another run of the store made
OPERATIONAL = {"run", "store", "scratch", "trainer", "engines", "checkpoint", "tracking", "budget", "stop", "approval"}
PASSED_BEFORE = 1.0  # `evaluation.pass_threshold` of older runs that did not set it
STORED = "stored"  # the pydantic context for configs from a store
# retired fields of older versions, by section, with the value that all runs now use
RETIRED: dict[str, dict[str, float]] = {
    "sft": {"beta1": BETA1},
    "rl": {"beta1": BETA1, "top_k": -1},
    "trainer": {"port": 0, "job_timeout_s": 7200.0},
    "engines": {"port": 0, "restarts_max": 5, "request_timeout_s": 600.0},
}
RETIRED_MARKS = (("beta1", "policy"), ("top_k", "rollouts"), ("top_k", "evaluation"))


class PipelineConfig(BaseModel, **STRICT):
    """SFT and RL of one model, from data to a registered policy."""

    run: str = Field(default="", description="Name of the run in the store: the same name continues it", max_length=80)
    model: Annotated[ModelConfig, "tokenizer", "policy", "probe"] = Field(
        default_factory=ModelConfig, description="What training starts from"
    )
    data: Annotated[list[DataConfig], "data", "selection", "prompts", "imported", "evaluation"] = Field(
        default_factory=list, description="The data sets"
    )
    sft: SftConfig = Field(default_factory=SftConfig, description="Supervised fine-tuning")
    rl: RlConfig = Field(default_factory=RlConfig, description="Reinforcement learning")
    evaluation: EvaluationConfig = Field(
        default_factory=EvaluationConfig, description="Evaluations on held-out prompts"
    )
    seed: int = Field(
        default=0, ge=0, le=2**31 - 1, description="Seed from which all random numbers of the run are derived"
    )
    store: str = Field(
        default="./rlpipe-store",
        description="Where everything is kept: file:///path or s3://bucket/prefix",
        min_length=1,
    )
    scratch: str = Field(
        default=".rlpipe",
        min_length=1,
        description=(
            "Folder on each node for logs and local copies; best on a fast disk, with room for three policies and a"
            " state, and 4 GiB for a store on S3"
        ),
    )
    budget: BudgetConfig = Field(default_factory=BudgetConfig, description="What the run may spend")
    stop: StopConfig = Field(default_factory=StopConfig, description="Rules that end RL early")
    approval: list[Literal["rl", "register"]] = Field(
        default_factory=list,
        description="Where post-train waits until a person presses Resume: before RL, before registration",
    )
    trainer: TrainerConfig = Field(default_factory=TrainerConfig, description="Where and how fast it trains")
    engines: EnginesConfig = Field(default_factory=EnginesConfig, description="Where and how fast it samples")
    checkpoint: CheckpointConfig = Field(
        default_factory=CheckpointConfig, description="What is kept of training states and policies"
    )
    tracking: TrackingConfig = Field(default_factory=TrackingConfig, description="MLflow")

    @model_validator(mode="before")
    @classmethod
    def _can_be_kept(cls, tree: Any, info: ValidationInfo) -> Any:
        # the config of a stored run is read even if it would be refused today
        if info.context == STORED:
            tree = _with_added(tree)
        else:
            refuse_secrets(tree, info.context)
        # a retired field with another value is kept, and refused as an unknown field
        return _without_retired(tree)

    @model_validator(mode="after")
    def _fits_together(self, info: ValidationInfo) -> PipelineConfig:
        lines = [*broken_rules(self), *([] if info.context == STORED else broken_layout(self))]
        if lines:
            raise ValueError("\n".join(lines))
        return self

    @property
    def scratch_folder(self) -> Path:
        """The scratch folder of this machine; below the working directory unless it is absolute."""
        return expanded(self.scratch).absolute()

    @property
    def engines_here(self) -> bool:
        """True when the engines are child processes of the flow."""
        return self.engines.place == "process"

    @property
    def samples(self) -> bool:
        """True when the run needs an engine, to sample rollouts or to evaluate."""
        return not self.rl.rollouts_from or bool(self.sets("evaluation"))

    def completion_tokens_max(self, use: str) -> int:
        """The largest number of tokens of a completion of use rl or evaluation."""
        own = self.evaluation.completion_tokens_max if use == "evaluation" else None
        return self.rl.completion_tokens_max if own is None else own

    def rewards(self, use: str) -> dict[str, float]:
        """The rewards that score a rollout of use rl or evaluation, with their weights."""
        return (use == "evaluation" and self.evaluation.rewards) or self.rl.rewards

    def reward_args(self, use: str) -> dict[str, dict[str, Any]]:
        """The arguments of those rewards; for rl also those for no reward at all, which is an
        error.
        """
        rewards, others = self.rewards(use), self.evaluation.rewards
        return {
            name: args
            for name, args in self.rl.reward_args.items()
            if name in rewards or (use == "rl" and name not in others)
        }

    @property
    def frozen_models(self) -> dict[str, FrozenModel]:
        """The frozen models that the run names, by the stages that copy them: reference, teacher
        (that of `rl.teacher`), and one for each other teacher that data sets name.
        """
        named = {role: FrozenModel(f"rl.{role}", getattr(self.rl, role)) for role in ("reference", "teacher")}
        for data in self.sets("rl"):
            named.setdefault(self.teacher_of(data), FrozenModel(f"data.{data.name}.teacher", data.teacher))
        return {stage: model for stage, model in named.items() if model.name}

    @property
    def teachers(self) -> list[str]:
        """The stages that copy the teachers, without repetition; that of `rl.teacher` is first."""
        return [stage for stage in self.frozen_models if stage != "reference"]

    def teacher_of(self, data: DataConfig) -> str:
        """The stage that copies the teacher of a data set of use rl."""
        own = data.teacher if data.teacher != self.rl.teacher else ""
        return f"{SET_TEACHER}{sha256_of(own)[:12]}" if own else "teacher"

    def drops(self, use: str) -> bool:
        """True when rows of one use that are too long are left out."""
        return any(data.on_too_long == "drop" for data in self.sets(use))

    def sets(self, use: str) -> list[DataConfig]:
        """The data sets of one use, in the order of the config. For sft the source `run:NAME` is
        the function that gives the rollouts of that run.
        """
        chosen = [data for data in self.data if data.use == use]
        return [self._of_run(data) if use == "sft" and data.source.startswith(RUN) else data for data in chosen]

    def _of_run(self, data: DataConfig) -> DataConfig:
        args = {"store": self.store, **data.args, "run": data.source.removeprefix(RUN)}
        return data.model_copy(update={"source": SOURCES[RUN], "args": args})


def marks(kind: type[T]) -> Iterator[tuple[str, str, T]]:
    """Yields section, name and mark of the fields (affects.py), of sections with an empty name."""
    for section, info in PipelineConfig.model_fields.items():
        model = DataConfig if section == "data" else info.annotation
        for name, field in {"": info, **getattr(model, "model_fields", {})}.items():
            yield from ((section, name, mark) for mark in field.metadata if isinstance(mark, kind))


OPERATIONAL_FIELDS = {f"{section}.{name}" for section, name, mark in marks(str) if mark == "operational"}
ADDED = list(marks(Added))


def stored_tree(config: PipelineConfig) -> JsonDict:
    """The config in its stored form: with the retired fields, and without added fields that change
    nothing, so that equal settings of old and new runs have the same bytes.
    """
    tree = config.model_dump(mode="json")
    for section, name, added in ADDED:
        for fields in tree[section] if section == "data" else [tree[section]]:
            if added.beside not in fields if added.beside else fields[name] == added.before:
                del fields[name]
    tree = tree | {section: tree[section] | fields for section, fields in RETIRED.items()}
    if for_all := rule_for_all(config.rl.faults):
        rule, rl = for_all[0], {name: value for name, value in tree["rl"].items() if name != "faults"}
        tree["rl"] = rl | {"reward_fallback": None if rule == STOP else rule}
    return tree


def _with_added(tree: JsonDict) -> JsonDict:
    """The tree of a stored config, with the added fields that it lacks set to the values of older
    runs.
    """
    for section, name, added in ADDED:
        if isinstance(fields := tree.get(section), dict) and not added.beside:
            tree = tree | {section: {name: added.before} | fields}
    return tree


def from_stored(tree: Any) -> Any:
    """The tree of a config of any version, without the retired fields. A retired field that
    determines what is computed stays if it has another value than today.
    """
    return _without_retired(tree, OPERATIONAL)


def _without_retired(tree: Any, whatever: Collection[str] = ()) -> Any:
    """The tree without the retired fields that have today's value, and in the sections `whatever`
    without all retired fields.
    """
    for section, name, value in list(_retired(tree)):
        if section in whatever or value == RETIRED[section][name]:
            tree = tree | {section: {key: entry for key, entry in tree[section].items() if key != name}}
    return tree


def as_begun(config: PipelineConfig, begun: PipelineConfig) -> PipelineConfig:
    """The config with which a run is continued.

    Fields that are not set and have another default today keep the value with which the run began:
    `rl.faults` was one rule for all, `evaluation.pass_threshold` 1.0 and `model.control_tokens`
    "as_written".
    """
    if config.evaluation.pass_threshold is None and begun.evaluation.pass_threshold == PASSED_BEFORE:
        evaluation = config.evaluation.model_copy(update={"pass_threshold": PASSED_BEFORE})
        config = config.model_copy(update={"evaluation": evaluation})
    for section, name in (("rl", "faults"), ("model", "control_tokens")):
        given, then = getattr(config, section), getattr(begun, section)
        if name not in given.model_fields_set:
            config = config.model_copy(update={section: given.model_copy(update={name: getattr(then, name)})})
    return config


def _retired(tree: Any) -> Iterator[tuple[str, str, Any]]:
    """Yields section, name and value of each retired field in the tree."""
    for section, fields in RETIRED.items():
        entries = tree.get(section) if isinstance(tree, dict) else None
        if isinstance(entries, dict):
            yield from ((section, name, entries[name]) for name in fields if name in entries)


def identity(config: PipelineConfig) -> JsonDict:
    """The fields, flattened, that determine what is computed: they must be equal in all starts of a
    run.
    """
    tree = config.model_dump(mode="json", exclude=OPERATIONAL)
    sections = {section: value if isinstance(value, dict) else {"": value} for section, value in tree.items()}
    flat = {
        f"{section}.{key}".rstrip("."): value for section, fields in sections.items() for key, value in fields.items()
    }
    return {key: value for key, value in flat.items() if key not in OPERATIONAL_FIELDS}
