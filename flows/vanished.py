"""A flow run whose row was deleted from Prefect's server works on, with a warning: its results are
in the store.

Prefect ends such a flow run with ObjectNotFound where it sets its next state, and with a refusal
where it begins a flow run inside of it. Here the state counts as set, and the inner flow run begins
without the outer one. So to delete a flow run does not stop it; to cancel it does.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable
from typing import Any, TypedDict, Unpack
from uuid import UUID

import httpx
from prefect import Task
from prefect.client.orchestration import PrefectClient
from prefect.client.schemas.objects import Constant, FlowRunResult, Parameter, State, TaskRun, TaskRunResult
from prefect.client.schemas.responses import OrchestrationResult, SetStateStatus, StateAcceptDetails
from prefect.exceptions import ObjectNotFound

CONFLICT = 409  # the row that a new one refers to does not exist
log = logging.getLogger(__name__)
set_flow_run_state, create_task_run = PrefectClient.set_flow_run_state, PrefectClient.create_task_run


async def set_state(self: PrefectClient, flow_run_id: UUID | str, state: State[Any], force: bool = False) -> Any:
    """Sets the state of a flow run; if its row is gone, the state counts as set."""
    try:
        return await set_flow_run_state(self, flow_run_id, state, force)
    except ObjectNotFound:
        warn(str(flow_run_id))
        return OrchestrationResult(state=state, status=SetStateStatus.ACCEPT, details=StateAcceptDetails())


class TaskRunFields(TypedDict, total=False):
    """The optional fields of a new task run, beside its task and its place in a flow run."""

    id: UUID | None
    name: str | None
    extra_tags: Iterable[str] | None
    state: State[Any] | None
    task_inputs: dict[str, list[TaskRunResult | FlowRunResult | Parameter | Constant]] | None


async def begin_inside(
    self: PrefectClient,
    task: Task[..., Any],
    flow_run_id: UUID | None,
    dynamic_key: str,
    **fields: Unpack[TaskRunFields],
) -> TaskRun:
    """The task run that links a flow run to its outer one; without the link where the row of the
    outer one is gone.
    """

    async def begin(inside: UUID | None) -> TaskRun:
        return await create_task_run(
            self,
            task,
            inside,
            dynamic_key,
            id=fields.get("id"),
            name=fields.get("name"),
            extra_tags=fields.get("extra_tags"),
            state=fields.get("state"),
            task_inputs=fields.get("task_inputs"),
        )

    try:
        return await begin(flow_run_id)
    except httpx.HTTPStatusError as error:
        if error.response.status_code != CONFLICT or flow_run_id is None or await _is_there(self, flow_run_id):
            raise
        warn(str(flow_run_id))
        return await begin(None)


async def _is_there(client: PrefectClient, flow_run_id: UUID) -> bool:
    try:
        return bool(await client.read_flow_run(flow_run_id))
    except ObjectNotFound:
        return False


@functools.cache
def warn(flow_run_id: str) -> None:
    """Logs a warning, once for each flow run."""
    log.warning(
        "flow run %s is gone from Prefect's server: it was deleted. The run goes on, and what the UI shows of it ends"
        " here (to stop a run, cancel it)",
        flow_run_id,
    )


PrefectClient.set_flow_run_state = set_state  # pyright: ignore[reportAttributeAccessIssue]
PrefectClient.create_task_run = begin_inside  # pyright: ignore[reportAttributeAccessIssue]
