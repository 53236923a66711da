"""Trials of a model before a run depends on it, in a process of their own (`trial.py`)."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

from pydantic import TypeAdapter

from rlpipe.config.pipeline import PipelineConfig
from rlpipe.engines.weights import reading_s
from rlpipe.processes.launch import READY_TIMEOUT_S
from rlpipe.processes.pool import WorkerPool
from rlpipe.stages.training import new_adapter


@dataclass(frozen=True)
class TriedModel:
    """The facts of a model whose config and shapes were tried. `num_adapted`: parameters of its
    adapter; `rows`: how sequences are put into rows.
    """

    num_parameters: int
    num_adapted: int
    rows: str


Tried = TypeVar("Tried", bound=TriedModel)


def try_model(config: PipelineConfig, named: Mapping[str, object]) -> TriedModel:
    """Tries a model in a process of its own. `named`: its origin (`where`), and its `folder` or
    `config`.
    """
    return answer_of(TriedModel, "rlpipe.checks.trial", config, named)


def answer_of(kind: type[Tried], module: str, config: PipelineConfig, named: Mapping[str, object]) -> Tried:
    """The answer of a process that runs `module` and tries a model; `named`: as of `try_model`, and
    what the process wants beside it.
    """
    shared = {"context_tokens_max": config.model.context_tokens_max, "context_ranks": config.trainer.context_ranks}
    timeout_s = READY_TIMEOUT_S + (reading_s(Path(str(named["folder"]))) if "folder" in named else 0)
    with closing(WorkerPool(str(named["where"]), module, {**named, **shared}, start_timeout_s=timeout_s)) as trial:
        (ready,) = trial.start()
    tried = TypeAdapter(kind).validate_python(ready)
    assert tried.num_parameters > 0, "a model without parameters"
    return tried


def tried_adapter(config: PipelineConfig) -> dict[str, object]:
    """The arguments of `try_model` on the adapter that a model gets; empty without an adapter."""
    adapter = new_adapter(config)
    return {"adapter": asdict(adapter.settings)} if adapter else {}
