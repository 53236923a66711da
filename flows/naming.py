"""Names a person can read, and the same again when a flow run is retried."""

from __future__ import annotations

from collections.abc import Callable

from prefect.runtime import flow_run

from rlpipe.config import PipelineConfig


def named(config: PipelineConfig) -> PipelineConfig:
    """The config with a run name: a flow run that was given none (a schedule) is named after itself, retries included."""
    return config if config.run else config.model_copy(update={"run": f"run-{str(flow_run.id)[:8]}"})


def run_name(flow: str) -> Callable[[], str]:
    """The name of a flow's run: the flow and the pipeline run."""

    def name() -> str:
        config = flow_run.parameters["config"]
        run = config.run if isinstance(config, PipelineConfig) else config.get("run", "")
        return f"{flow} {run or 'run-' + str(flow_run.id)[:8]}"

    return name
