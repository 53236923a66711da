"""The task start_service: a node of the trainer gang, or of the engines, as a run of its deployment."""

from __future__ import annotations

import asyncio

from prefect import get_client, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterState, FlowRunFilterStateType, FlowRunFilterTags
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.deployments import run_deployment
from prefect.states import Cancelling

from rlpipe.config import PipelineConfig
from rlpipe.types import JsonDict

UNDER_WAY = [StateType.SCHEDULED, StateType.PENDING, StateType.RUNNING, StateType.PAUSED]


class ServiceStarter:
    """What a session asks for a run's services: `rlpipe.services.StartService`."""

    def __init__(self, config: PipelineConfig) -> None:
        self._config = config
        self._asked = asyncio.Lock()  # shards ask at the same time

    async def __call__(self, kind: str, node: int, lost: bool) -> None:
        """Sees to it that a service of the run is under way. `lost`: the one that is cannot be reached, so it is replaced."""
        async with self._asked:
            under_way = await _under_way(_tag(self._config, kind, node))
            if lost:
                async with get_client() as client:
                    for flow_run in under_way:
                        await client.set_flow_run_state(flow_run.id, Cancelling(message="it cannot be reached"), force=True)
            if lost or not under_way:
                await _start(self._config, kind, node)


@task(
    name="start_service",
    description="Starts a node of the trainer gang, or of the engines, as a run of its deployment.",
    task_run_name="start {kind} {node}",
    retries=2,
    retry_delay_seconds=5,
    persist_result=False,
    cache_policy=NO_CACHE,
)
async def _start(config: PipelineConfig, kind: str, node: int) -> None:
    part = {"trainer": config.trainer, "engines": config.engines}[kind]
    parameters: JsonDict = {"store": config.store, "run": config.run, "node": node, kind: part.model_dump(mode="json")}
    name = f"serve-{kind} {config.run} node {node}"  # readable while it waits for room, too
    await run_deployment(part.deployment, flow_run_name=name, parameters=parameters, timeout=0, tags=[_tag(config, kind, node)])  # pyright: ignore[reportGeneralTypeIssues]


def _tag(config: PipelineConfig, kind: str, node: int) -> str:
    return f"{config.store}/runs/{config.run}/services/{kind}/{node}"


async def _under_way(tag: str) -> list[FlowRun]:
    wanted = FlowRunFilter(
        tags=FlowRunFilterTags(all_=[tag]), state=FlowRunFilterState(type=FlowRunFilterStateType(any_=UNDER_WAY))
    )
    async with get_client() as client:
        return await client.read_flow_runs(flow_run_filter=wanted)
