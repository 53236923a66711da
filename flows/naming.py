"""What a flow run is asked for, and names a person can read: the same again when a flow run is retried."""

from __future__ import annotations

from collections.abc import Callable

from prefect.runtime import flow_run

from rlpipe.config import PipelineConfig
from rlpipe.config_source import change_config
from rlpipe.types import JsonDict


def named(config: PipelineConfig, changes: JsonDict | None = None) -> PipelineConfig:
    """The config with its changes and a run name: a flow run that was given none (a schedule) is named after itself.

    UserError for a change that makes no valid config.
    """
    changed = change_config(config, changes) if changes else config
    return changed if changed.run else changed.model_copy(update={"run": _own_name()})


def run_name(flow: str) -> Callable[[], str]:
    """The name of a flow's run: the flow and the pipeline run."""

    def name() -> str:
        config, changes = flow_run.parameters["config"], flow_run.parameters.get("changes") or {}
        run = config.run if isinstance(config, PipelineConfig) else config.get("run", "")
        version = f" version {flow_run.parameters['version']}" if "version" in flow_run.parameters else ""
        return f"{flow} {changes.get('run') or run or _own_name()}{version}"

    return name


def _own_name() -> str:
    return f"run-{str(flow_run.id)[:8]}"
