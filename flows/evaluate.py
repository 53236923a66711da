"""Evaluates one committed policy of a run, whenever somebody asks."""

from __future__ import annotations

from prefect import flow

from rlpipe.config import PipelineConfig
from rlpipe.stages.session import open_session
from rlpipe.types import JsonDict
from tasks.evaluate import evaluate as evaluate_task


@flow(name="evaluate", flow_run_name="evaluate {config.run} version {version}", persist_result=False)
async def evaluate(config: PipelineConfig, version: int = 0) -> JsonDict:
    """The evaluation metrics of a weight version of the run, computed now or read from the store."""
    async with open_session(config) as session:
        policy, _ = session.run.policy(version)
        return (await evaluate_task(session, policy=policy, version=version)).metrics
