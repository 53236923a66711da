"""Trials of a model before a run depends on it, in a process of their own (`trial.py`)."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from dataclasses import asdict
from pathlib import Path

from pydantic import TypeAdapter

from rlpipe.checks.plan_cost import TriedModel, places
from rlpipe.config.pipeline import PipelineConfig
from rlpipe.engines.weights import reading_s
from rlpipe.processes.launch import READY_TIMEOUT_S
from rlpipe.processes.pool import WorkerPool
from rlpipe.stages.training import new_adapter


def try_model(config: PipelineConfig, named: Mapping[str, object], *, sized: bool) -> TriedModel:
    """Tries a model in a process of its own. `named`: its origin (`where`), and its `folder` or
    `config`; `sized`: True for the sizes that a plan needs.
    """
    trainer, shared = config.trainer, {"context_ranks": config.trainer.context_ranks}
    hello = {**named, "context_tokens_max": config.model.context_tokens_max, **shared}
    if sized:
        training = {"tokens_max": trainer.tokens_max, "activation_checkpointing": trainer.activation_checkpointing}
        hello["training"] = training | {"dtype": config.model.dtype} | shared
        if not (trainer.gpu_ids or config.engines.gpu_ids):
            engine = {"places": places(config), "engine_threads": config.engines.threads}
            hello["timed"] = {"tokens_max": trainer.tokens_max, "threads": trainer.threads, **engine}
    field = str(named["where"])
    timeout_s = READY_TIMEOUT_S + (reading_s(Path(str(named["folder"]))) if "folder" in named else 0)
    with closing(WorkerPool(field, "rlpipe.checks.trial", hello, start_timeout_s=timeout_s)) as trial:
        (ready,) = trial.start()
    tried = TypeAdapter(TriedModel).validate_python(ready)
    assert tried.num_parameters > 0, "a model without parameters"
    return tried


def tried_adapter(config: PipelineConfig) -> dict[str, object]:
    """The arguments of `try_model` on the adapter that a model gets; empty without an adapter."""
    adapter = new_adapter(config)
    return {"adapter": asdict(adapter.settings)} if adapter else {}
