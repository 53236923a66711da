"""Calls to Prefect's server that a run does not wait for: they are sent in order while it goes on.

Prefect's engine waits for the answer to every call. What the server answers is known where a flow
run that this process has created begins, or succeeds: here the engine gets that answer at once. All
other states (failed, crashed, cancelled) are sent after these, and waited for.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from contextvars import ContextVar
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack
from uuid import UUID

import httpx
from prefect.client.orchestration import PrefectClient
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.client.schemas.responses import OrchestrationResult, SetStateStatus, StateAcceptDetails
from prefect.exceptions import PrefectException

import flows.vanished  # noqa: F401  # its answer to a deleted flow run is the one that is replaced here
from rlpipe.base.futures import begin_after

if TYPE_CHECKING:
    from prefect.client.schemas.objects import ConcurrencyLeaseHolder, FlowRunPolicy

CLOSE_S = 30.0  # for calls that are still to be sent when something else has failed
ACCEPTED = (StateType.RUNNING, StateType.COMPLETED)
DONE = httpx.Response(204)
set_flow_run_state, set_flow_run_name = PrefectClient.set_flow_run_state, PrefectClient.set_flow_run_name
read_flow_run, update_flow_run = PrefectClient.read_flow_run, PrefectClient.update_flow_run
increment = PrefectClient.increment_concurrency_slots_with_lease

Act = Callable[[], Awaitable[object]]


class Calls:
    """Calls that are sent one after the other. The first one that fails ends them; its error is
    raised for all that wait.
    """

    def __init__(self) -> None:
        self.last: asyncio.Task[None] | None = None

    def send(self, act: Act) -> None:
        """Starts `act` after all calls before it."""
        self.last = begin_after(self.last, act)

    async def all_sent(self) -> None:
        """Returns when the server has answered every call."""
        if self.last is not None:
            await asyncio.shield(self.last)

    async def close(self) -> None:
        """Waits CLOSE_S for the calls that are still to be sent; raises nothing."""
        if self.last is None:
            return
        await asyncio.wait({self.last}, timeout=CLOSE_S)
        self.last.cancel()


class ShownRun:
    """A flow run of this process, as the server shows it once it has all calls."""

    def __init__(self, flow_run: FlowRun, calls: Calls) -> None:
        self.flow_run, self.calls = flow_run, calls


_calls: ContextVar[Calls | None] = ContextVar("calls", default=None)
_shown: dict[UUID, ShownRun] = {}


@asynccontextmanager
async def calls_in_order() -> AsyncIterator[Calls]:
    """Yields the calls that nobody waits for in the body; at its end all of them are sent, or the
    first fault is raised.
    """
    calls = Calls()
    token = _calls.set(calls)
    try:
        yield calls
        await calls.all_sent()
    finally:
        _calls.reset(token)
        await calls.close()


async def unawaited(act: Act) -> None:
    """Sends a call after those before it; outside of `calls_in_order` it is waited for."""
    if (calls := _calls.get()) is None:
        await act()
    else:
        calls.send(act)


@asynccontextmanager
async def shown(flow_run: FlowRun, calls: Calls) -> AsyncIterator[None]:
    """Marks a flow run that nobody else works on, and that has not begun: in the body its engine
    waits for no answer about it.
    """
    _shown[flow_run.id] = ShownRun(flow_run, calls)
    try:
        yield
    finally:
        del _shown[flow_run.id]


async def set_state(self: PrefectClient, flow_run_id: UUID | str, state: State[Any], force: bool = False) -> Any:
    """Sets the state of a flow run; of a shown one that begins or succeeds without waiting."""
    run = _shown.get(UUID(str(flow_run_id)))
    if run is None:
        return await set_flow_run_state(self, flow_run_id, state, force)
    if force or state.type not in ACCEPTED:
        await run.calls.close()
        return await set_flow_run_state(self, flow_run_id, state, force)
    run.calls.send(partial(set_flow_run_state, self, flow_run_id, state.model_copy(), force))
    now = {"state": state, "state_type": state.type, "state_name": state.name}
    run.flow_run = run.flow_run.model_copy(update=now)
    return OrchestrationResult(state=state, status=SetStateStatus.ACCEPT, details=StateAcceptDetails())


async def read(self: PrefectClient, flow_run_id: UUID) -> FlowRun:
    """Returns a flow run; a shown one without asking."""
    run = _shown.get(flow_run_id)
    return run.flow_run if run is not None else await read_flow_run(self, flow_run_id)


async def set_name(self: PrefectClient, flow_run_id: UUID, name: str) -> httpx.Response:
    """Names a flow run; a shown one that has this name is not named again."""
    run = _shown.get(flow_run_id)
    has_it = run is not None and run.flow_run.name == name
    return DONE if has_it else await set_flow_run_name(self, flow_run_id, name)


class FlowRunFields(TypedDict, total=False):
    """The fields of a flow run that an update may set."""

    flow_version: str | None
    parameters: dict[str, Any] | None
    name: str | None
    tags: Iterable[str] | None
    empirical_policy: FlowRunPolicy | None
    infrastructure_pid: str | None
    job_variables: dict[str, Any] | None


async def update(self: PrefectClient, flow_run_id: UUID, **fields: Unpack[FlowRunFields]) -> httpx.Response:
    """Updates a flow run; a shown one was created with its version and policy."""
    if flow_run_id in _shown and fields.keys() <= {"flow_version", "empirical_policy"}:
        return DONE
    return await update_flow_run(
        self,
        flow_run_id,
        **fields,
    )


_unlimited: dict[frozenset[str], httpx.Response] = {}  # names without a limit, and the answer that said so
_asking: set[asyncio.Task[None]] = set()


async def occupy(
    self: PrefectClient,
    names: list[str],
    slots: int,
    mode: Literal["concurrency", "rate_limit"],
    lease_duration: float,
    holder: ConcurrencyLeaseHolder | None = None,
) -> httpx.Response:
    """Occupies slots of the limits of a task's tags.

    A task whose tags had no limit when they were last asked for does not wait: it is asked
    meanwhile. So a new limit holds from the next task with these tags on.
    """
    key = frozenset(names)
    ask = partial(increment, self, names, slots, mode, lease_duration, holder)
    if holder is None or holder.type != "task_run" or not all(name.startswith("tag:") for name in names):
        return await ask()
    if (answer := _unlimited.get(key)) is None:
        return _heard(key, await ask())

    async def ask_again() -> None:
        try:
            answer = _heard(key, await ask())
            if answer.json()["limits"]:
                await self.release_concurrency_slots_with_lease(UUID(answer.json()["lease_id"]))
        except (httpx.HTTPError, PrefectException):
            # a limit that is used up, a server that is away: the next task waits for the answer
            _unlimited.pop(key, None)

    task = asyncio.create_task(ask_again())
    _asking.add(task)
    task.add_done_callback(_asking.discard)
    return answer


def _heard(key: frozenset[str], answer: httpx.Response) -> httpx.Response:
    if answer.json()["limits"]:
        _unlimited.pop(key, None)
    else:
        _unlimited[key] = answer
    return answer


PrefectClient.set_flow_run_state = set_state  # pyright: ignore[reportAttributeAccessIssue]
PrefectClient.set_flow_run_name = set_name
PrefectClient.read_flow_run = read
PrefectClient.update_flow_run = update  # pyright: ignore[reportAttributeAccessIssue]
PrefectClient.increment_concurrency_slots_with_lease = occupy
