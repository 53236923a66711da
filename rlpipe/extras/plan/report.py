"""`rlpipe plan`: what a config would start and take, and all that is wrong with it."""

from __future__ import annotations

from dataclasses import dataclass

from rlpipe.base.values import JsonDict, expanded
from rlpipe.checks.content import Content, named_folder, tried_line
from rlpipe.checks.preflight import look_at
from rlpipe.checks.tried_model import tried_adapter
from rlpipe.config.pipeline import PipelineConfig
from rlpipe.extras.plan.cost import disk_lines, time_lines
from rlpipe.extras.plan.memory import memory_lines
from rlpipe.extras.plan.sizes import SizedModel, size_model
from rlpipe.extras.plan.work import PlannedWork, plan_lines, planned_work
from rlpipe.stages.base import new_config
from rlpipe.stages.model_source import place_of_model, source_of


@dataclass(frozen=True)
class PlanReport:
    """What would start where, and what is wrong. `work`: its sizes; `plan`, `read`: lines on where
    it runs, and on what was read and the memory, disk and time that it needs.
    """

    work: PlannedWork
    plan: list[str]
    read: list[str]
    warnings: list[str]
    faults: list[str]

    def lines(self) -> list[str]:
        """All lines, faults last."""
        warnings, faults = [f"WARNING {text}" for text in self.warnings], [f"FAULT {text}" for text in self.faults]
        return [*self.plan, *self.read, *warnings, *faults]


def plan_report(config: PipelineConfig) -> PlanReport:
    """The plan of a config. Downloads no model, reads no store, leaves nothing running."""
    content = PlannedContent(config)
    seen = look_at(content, ("memory", content.memory))
    read = [line for text in seen.lines for line in text.splitlines()]
    return PlanReport(planned_work(config), plan_lines(config), read, seen.warnings, seen.faults)


class PlannedContent(Content):
    """The things that a config names, for a plan: its model may be elsewhere, and is counted."""

    def __init__(self, config: PipelineConfig) -> None:
        super().__init__(config)
        self.model_config: JsonDict | None = None  # of a model that is not on this machine
        self.sized: SizedModel | None = None

    def model(self) -> str:
        """As for a run; of a model that is not on this machine, its config.json is read."""
        if self._is_elsewhere():
            place, self.model_config = place_of_model(self.config)
            return f"model: {place}"
        folder = source_of(self.config).folder
        self.sized = size_model(self.config, named_folder("model.path", folder) | tried_adapter(self.config))
        return f"model: {tried_line(folder, self.sized)}"

    def _is_elsewhere(self) -> bool:
        path = self.config.model.path
        return bool(path) and not expanded(path).is_dir()

    def tokenizer(self) -> str:
        """As for a run, where the model is on this machine."""
        return "tokenizer: not tried, the model is not here" if self._is_elsewhere() else super().tokenizer()

    def memory(self) -> str:
        """Lines on the memory, disk and hours that a run needs, by the model's shapes.

        The shapes are those of its folder, of its config.json, or of the config where neither is on
        this machine.
        """
        model = self.config.model
        stands_in = model.path and self.sized is None and self.model_config is None
        if stands_in and ("hidden_size" not in model.model_fields_set or expanded(model.path).is_dir()):
            is_here = expanded(model.path).is_dir()
            why = (
                "does not load: its fault is named"
                if is_here
                else "is no folder here, and its config.json cannot be read from here"
            )
            return f"memory: not estimated, as {model.path} {why}"
        if self.sized is None:
            made = new_config(model, self.vocab_size) | {"tie_word_embeddings": not stands_in}
            tried = {"where": "memory", "config": self.model_config or made, **tried_adapter(self.config)}
            self.sized = size_model(self.config, tried)
        sizes = self.sized.sizes
        costs = [*disk_lines(self.config, sizes), *time_lines(self.config, self.sized.speed, self.lengths)]
        lines = [*memory_lines(self.config, sizes), *costs]
        if stands_in:  # the shape does not say if the model's embeddings are tied
            output = model.hidden_size * self.vocab_size / 1e6
            lines.append(
                "  (by the shape in [model], as the model itself is not here: with an output layer of"
                f" {output:,.1f}M parameters, which a model with tied embeddings has not)"
            )
        return "\n".join(lines)
