"""The flow runs of a run's iterations: each is created while the one before it trains, so that no
iteration waits for Prefect's server before it begins.

A flow run that was created and did not begin is deleted: at the end of the phase, or, after a kill,
at the next start of the run.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
from collections.abc import AsyncIterator, Callable
from contextvars import ContextVar
from functools import partial
from typing import Any, cast

from prefect import Flow, get_client
from prefect.client.orchestration import PrefectClient
from prefect.client.schemas.filters import (
    FlowFilter,
    FlowFilterName,
    FlowRunFilter,
    FlowRunFilterState,
    FlowRunFilterStateType,
    FlowRunFilterTags,
)
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.exceptions import ObjectNotFound
from prefect.flow_engine import AsyncFlowRunEngine

from flows.ui import only_shown
from flows.unawaited import Calls, calls_in_order, shown
from rlpipe.base.manifests import IterationRecord
from rlpipe.config.pipeline import PipelineConfig

Engine = AsyncFlowRunEngine[..., IterationRecord]
_begin_next: ContextVar[Callable[[], None] | None] = ContextVar("begin_next", default=None)


def begin_next() -> None:
    """Starts to create the flow run of the next iteration, where there is one."""
    if (begin := _begin_next.get()) is not None:
        begin()


class IterationRuns:
    """The flow runs of iterations inside the flow run of the RL phase, one after the other."""

    def __init__(self, flow: Flow[Any, Any], config: PipelineConfig, calls: Calls) -> None:
        self._flow, self._config, self._calls = flow, config, calls
        self._phase = contextvars.copy_context()  # iterations are begun in it, not in the one before
        self._begun: asyncio.Task[Engine] | None = None
        self._earlier: asyncio.Task[None] | None = None  # the last call about the iteration before the last

    async def run(self, iteration: int) -> IterationRecord:
        """Does an iteration as a flow run; returns its record.

        The server may still lack the end of this flow run, and nothing before it.
        """
        earlier, self._earlier = self._earlier, self._calls.last
        if earlier is not None:
            await asyncio.shield(earlier)
        self._begin(iteration)
        assert self._begun is not None, "it was begun"
        engine, self._begun = await asyncio.shield(self._begun), None
        more = iteration + 1 < self._config.rl.num_iterations
        token = _begin_next.set(partial(self._begin, iteration + 1) if more else None)
        try:
            return await self._conduct(engine)
        finally:
            _begin_next.reset(token)

    def _begin(self, iteration: int) -> None:
        if self._begun is None:
            self._begun = self._phase.copy().run(asyncio.create_task, self._created(iteration))

    async def _created(self, iteration: int) -> Engine:
        parameters = {"config": self._config, "iteration": iteration}
        engine = Engine(flow=self._flow, parameters=parameters)
        name = self._flow.flow_run_name
        assert isinstance(name, str), "a template"
        async with get_client() as client:
            naming = cast(PrefectClient, _Naming(client, name.format_map(parameters)))
            engine.flow_run = await engine.create_flow_run(naming)
        return engine

    async def _conduct(self, engine: Engine) -> IterationRecord:
        flow_run = engine.flow_run
        assert flow_run is not None and flow_run.state is not None, "it was created"
        async with contextlib.AsyncExitStack() as stack:
            if flow_run.state.is_pending():  # else it began in an earlier start of the phase
                await stack.enter_async_context(shown(flow_run, self._calls))
            async with engine.start():
                while engine.is_running():
                    async with engine.run_context():
                        await engine.call_flow_fn()
            record = await engine.result()
            assert isinstance(record, IterationRecord), f"an iteration returned {record!r}"
            return record

    async def discard(self) -> None:
        """Deletes the flow run that was created and did not begin, if there is one."""
        if self._begun is None:
            return
        await asyncio.wait({self._begun})  # ends, as every call to Prefect does
        if not self._begun.cancelled() and self._begun.exception() is None:
            with only_shown():
                async with get_client() as client:
                    await _delete(client, self._begun.result().flow_run)


class _Naming:
    """A client that names the flow runs that it creates; Prefect's engine names them afterwards."""

    def __init__(self, client: PrefectClient, name: str) -> None:
        self._client, self._name = client, name

    def __getattr__(self, method: str) -> Any:
        call = getattr(self._client, method)
        return partial(call, name=self._name) if method == "create_flow_run" else call


@contextlib.asynccontextmanager
async def iteration_runs(flow: Flow[Any, Any], config: PipelineConfig) -> AsyncIterator[IterationRuns]:
    """Yields the flow runs of a phase's iterations. At its end the server has all of them, or the
    fault is raised.
    """
    await _delete_unbegun(flow, config)
    async with calls_in_order() as calls:
        runs = IterationRuns(flow, config, calls)
        try:
            yield runs
        finally:
            await runs.discard()


async def _delete_unbegun(flow: Flow[Any, Any], config: PipelineConfig) -> None:
    """Deletes flow runs that a killed process of this run has created and not begun: the run is
    held, so nobody else begins them.
    """
    wanted = FlowRunFilter(
        tags=FlowRunFilterTags(all_=[f"run:{config.run}"]),
        state=FlowRunFilterState(type=FlowRunFilterStateType(any_=[StateType.PENDING])),
    )
    with only_shown():
        async with get_client() as client:
            named = FlowFilter(name=FlowFilterName(any_=[flow.name]))
            for flow_run in await client.read_flow_runs(flow_filter=named, flow_run_filter=wanted):
                if flow_run.parameters["config"]["store"] == config.store:
                    await _delete(client, flow_run)


async def _delete(client: PrefectClient, flow_run: FlowRun | None) -> None:
    assert flow_run is not None, "it was created"
    with contextlib.suppress(ObjectNotFound):
        await client.delete_flow_run(flow_run.id)
        if flow_run.parent_task_run_id is not None:
            await client.delete_task_run(flow_run.parent_task_run_id)
