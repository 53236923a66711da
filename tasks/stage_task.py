"""How a stage becomes a Prefect task: named, timed, retried; shown as `Cached` when its result was committed before."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.states import Completed

from rlpipe.engines.client import RequestRefused
from rlpipe.stages.session import Session
from rlpipe.types import StageResult, StepRefused, StoreError, UserError

RETRIES = 2
RETRY_DELAY_S = 2.0
FINAL = (UserError, StoreError, StepRefused, RequestRefused, AssertionError)  # asking again changes nothing

Stage = Callable[..., Awaitable[StageResult]]


async def _worth_retrying(_task: object, _run: object, state: State[Any]) -> bool:
    raised = await state.aresult(raise_on_failure=False)
    return not isinstance(raised, FINAL)


def stage_task(verb: str, run_name: str) -> Callable[[Stage], Stage]:
    """Turns `async def stage(session, ...) -> StageResult` into a task of that verb with a readable run name."""

    def decorate(stage: Stage) -> Stage:
        async def body(session: Session, **arguments: Any) -> StageResult | State[StageResult]:
            with session.timed(verb):
                result = await stage(session, **arguments)
            return Completed(name="Cached", data=result) if result.cached else result

        policy = task(
            name=verb,
            description=stage.__doc__,
            task_run_name=lambda: _named(run_name),
            retries=RETRIES,
            retry_delay_seconds=RETRY_DELAY_S,
            retry_condition_fn=_worth_retrying,
            persist_result=False,
            cache_policy=NO_CACHE,
        )
        told = policy(body)

        async def run(session: Session, **arguments: Any) -> StageResult:
            state: State[StageResult] = await told(session, **arguments, return_state=True)  # pyright: ignore[reportAssignmentType]
            return await state.aresult()

        return run

    return decorate


def _named(template: str) -> str:
    from prefect.runtime import task_run

    return template.format(**task_run.parameters["arguments"])
