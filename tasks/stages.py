"""Every stage as a Prefect task: named, timed, retried; shown as `Cached` when its result was
committed before.

And the task start_service, which starts the trainer processes, or the engines, of a node as a run
of their deployment.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Concatenate, ParamSpec, TypeVar

from prefect import get_client, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterState, FlowRunFilterStateType, FlowRunFilterTags
from prefect.client.schemas.objects import State, StateType
from prefect.deployments import run_deployment
from prefect.runtime import task_run
from prefect.states import Cancelling, Completed

from rlpipe.base.errors import StepRefused, StoreError, UserError
from rlpipe.base.manifests import ActionResult, StageResult
from rlpipe.base.references import ArtifactRef
from rlpipe.config.extras import IMPORTS, opened
from rlpipe.config.pipeline import PipelineConfig
from rlpipe.engines.client import RequestRefused
from rlpipe.loop.session import Session
from rlpipe.services.finder import StartService
from rlpipe.stages import base, evaluation, filtering, generation, policy, sampling, scoring, sft, teacher
from rlpipe.store.patience import Away
from rlpipe.stored import remaking

RETRIES = 2
RETRY_DELAY_S = 2.0
FINAL = (UserError, StoreError, StepRefused, RequestRefused, AssertionError, Away)  # a retry would fail again

NUMBERS = ("iteration", "segment", "round_index", "shard", "version")  # arguments that name a task run
UNDER_WAY = [StateType.SCHEDULED, StateType.PENDING, StateType.RUNNING, StateType.PAUSED]

P = ParamSpec("P")
Result = TypeVar("Result", StageResult, ActionResult)


async def _worth_retrying(_task: object, _run: object, state: State[Any]) -> bool:
    raised = await state.aresult(raise_on_failure=False)
    return not isinstance(raised, FINAL)


def _task(
    stage: Callable[Concatenate[Session, P], Awaitable[Result]],
) -> Callable[Concatenate[Session, P], Coroutine[Any, Any, Result]]:
    """The task of a stage, or of an action, which no `@stage` declares; its run is named after it
    and the numbers in its arguments.
    """
    function = getattr(stage, "function", stage)
    verb: str = getattr(stage, "verb", function.__name__)

    @task(
        name=verb,
        description=function.__doc__,
        # tags that limit how many run at once, in all runs (docs/cluster.md)
        tags={f"stage:{verb}"},
        task_run_name=lambda: _run_name(verb, task_run.parameters["numbers"]),
        retries=RETRIES,
        retry_delay_seconds=RETRY_DELAY_S,
        retry_condition_fn=_worth_retrying,
        persist_result=False,
        cache_policy=NO_CACHE,
    )
    async def timed(numbers: dict[str, int], answer: Callable[[], Awaitable[Result]]) -> Result | State[Result]:
        result = await answer()
        return Completed(name="Cached", data=result) if result.cached else result

    async def run(session: Session, *none: P.args, **arguments: P.kwargs) -> Result:
        assert not none, "the arguments of a stage have names"

        async def answer() -> Result:
            with session.clock.during(verb, numbers.get("iteration")):
                return await stage(session, *none, **arguments)

        # Prefect searches the arguments of a task for results of others, at each step of it: it
        # gets those that name its run
        numbers = {name: value for name, value in arguments.items() if name in NUMBERS and isinstance(value, int)}
        result = await timed(numbers, answer)
        return await result.aresult() if isinstance(result, State) else result

    return run


def _run_name(verb: str, numbers: dict[str, int]) -> str:
    """The name of a task run. Examples: "generate 00012 round 0 shard 3", and without numbers
    "prepare tokenizer".
    """
    words = [verb]
    words += [f"{numbers[name]:05d}" for name in NUMBERS[:2] if name in numbers]
    words += [f"{name.removesuffix('_index')} {numbers[name]}" for name in NUMBERS[2:] if name in numbers]
    return " ".join(words) if len(words) > 1 else verb.replace("_", " ")


prepare_tokenizer = _task(base.base_tokenizer)
prepare_model = _task(base.base_policy)
prepare_probe = _task(base.base_probe)
prepare_reference = _task(base.base_reference)
prepare_teacher = _task(base.base_teacher)
prepare_set_teacher = _task(base.base_set_teacher)

prepare_sft_data = _task(sft.prepare_sft_data)
train_segment = _task(sft.train_segment)
select_segment = _task(sft.select_segment)

sample_prompts = _task(sampling.sample_prompts)
generate = _task(generation.generate)
score = _task(scoring.score)
filter_groups = _task(filtering.filter_groups)
ask_teacher = _task(teacher.ask_teacher)
train = _task(policy.train)
checkpoint = _task(policy.checkpoint)
restore_policy = _task(remaking.restore_policy)
reload_engines = _task(policy.reload_engines)
evaluate = _task(evaluation.evaluate)


@_task
async def import_prompts(session: Session, *, iteration: int) -> StageResult:
    """The prompts of this iteration's stored rollouts."""
    return await opened(IMPORTS["prompts"], "rl.rollouts_from")(session, iteration=iteration)


@_task
async def import_rollouts(session: Session, *, iteration: int, prompts: ArtifactRef) -> StageResult:
    """This iteration's stored rollouts, and their stored rewards where the prompts are not
    known.
    """
    return await opened(IMPORTS["rollouts"], "rl.rollouts_from")(session, iteration=iteration, prompts=prompts)


def service_starter(config: PipelineConfig) -> StartService:
    """Returns the function with which a session requests a run's services: it makes sure that a
    service of a kind runs on a node, and replaces a lost one.
    """
    lock = asyncio.Lock()  # shards ask at the same time

    async def start(kind: str, node: int, lost: bool) -> None:
        tag = f"{config.store}/runs/{config.run}/services/{kind}/{node}"
        wanted = FlowRunFilter(
            tags=FlowRunFilterTags(all_=[tag]), state=FlowRunFilterState(type=FlowRunFilterStateType(any_=UNDER_WAY))
        )
        async with lock:
            async with get_client() as client:
                under_way = await client.read_flow_runs(flow_run_filter=wanted)
                for flow_run in under_way if lost else ():
                    await client.set_flow_run_state(flow_run.id, Cancelling(message="it cannot be reached"), force=True)
            if lost or not under_way:
                await _start_service(config, kind, node, tag)

    return start


@task(
    name="start_service",
    description="Starts a node of the trainer, or of the engines, as a flow run of its deployment.",
    task_run_name="start {kind} {node}",
    retries=RETRIES,
    retry_delay_seconds=5,
    persist_result=False,
    cache_policy=NO_CACHE,
)
async def _start_service(config: PipelineConfig, kind: str, node: int, tag: str) -> None:
    part = {"trainer": config.trainer, "engines": config.engines}[kind]
    parameters = {"store": config.store, "run": config.run, "node": node, kind: part.model_dump(mode="json")}
    name = f"serve-{kind} {config.run} node {node}"  # readable, also while it waits for room
    await run_deployment(  # pyright: ignore[reportGeneralTypeIssues]
        part.deployment_of(kind), flow_run_name=name, parameters=parameters, timeout=0, tags=[tag]
    )
