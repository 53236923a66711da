"""Flow runs of iterations on a real Prefect server: begun ahead, shown without waiting, and true
whatever ends them."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import httpx
import pytest
from prefect import flow, get_client, tags, task
from prefect.client.orchestration import PrefectClient
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterTags,
    TaskRunFilter,
    TaskRunFilterFlowRunId,
)
from prefect.client.schemas.objects import FlowRun
from prefect.runtime import flow_run
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.states import Pending

from flows import unawaited
from flows.iteration_runs import begin_next, iteration_runs
from rlpipe.base.manifests import BestReward, IterationRecord
from rlpipe.config.pipeline import PipelineConfig
from rlpipe.config.source import read_config
from tests.deadlines import until_async
from tests.paths import ROOT

pytestmark = [
    pytest.mark.slow,
    # Prefect's services for limits and logs keep a client each, in threads of their own
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

IDS = re.compile(r"[0-9a-f]{8}-[0-9a-f-]{27}")


@pytest.fixture(autouse=True)
def server(prefect_api: dict[str, str]) -> Iterator[None]:
    with temporary_settings({PREFECT_API_URL: prefect_api["PREFECT_API_URL"]}):
        yield


@pytest.fixture
def config() -> PipelineConfig:
    sizes = ["rl.num_iterations=4", "seed=9", f"run=x{uuid4().hex[:8]}"]
    return read_config("tiny", sizes, ROOT / "flows" / "presets")


def record(iteration: int) -> IterationRecord:
    return IterationRecord("a", iteration, iteration + 1, {}, -1, {}, [], BestReward(0, 0.5), "")


@task(persist_result=False)
async def work() -> None:
    begin_next()
    await asyncio.sleep(0.3)


@flow(name="iteration", flow_run_name="{config.run}-{iteration:05d}", validate_parameters=False, persist_result=False)
async def one(config: PipelineConfig, iteration: int) -> IterationRecord:
    await work()
    if config.seed == iteration:
        raise ValueError("the cause")
    return record(iteration)


@flow(name="phase", validate_parameters=False, persist_result=False)
async def phase(config: PipelineConfig, num: int) -> str:
    async with iteration_runs(one, config) as runs:
        for iteration in range(num):
            assert (await runs.run(iteration)).iteration == iteration
    return str(flow_run.id)


async def run_phase(config: PipelineConfig, num: int) -> None:
    with tags(f"run:{config.run}"):
        await phase(config, num)


async def runs_of(config: PipelineConfig) -> dict[str, FlowRun]:
    wanted = FlowRunFilter(tags=FlowRunFilterTags(all_=[f"run:{config.run}"]))
    async with get_client() as client:
        return {run.name: run for run in await client.read_flow_runs(flow_run_filter=wanted)}


async def states_of(client: PrefectClient, run: FlowRun) -> list[str]:
    return [state.name or "" for state in await client.read_flow_run_states(run.id)]


async def test_a_phase_shows_each_iteration_as_prefect_does(config: PipelineConfig) -> None:
    await run_phase(config, 4)
    runs = await runs_of(config)
    iterations = [runs.pop(f"{config.run}-{number:05d}") for number in range(4)]
    (outer,) = runs.values()
    async with get_client() as client:
        for run in iterations:
            assert await states_of(client, run) == ["Pending", "Running", "Completed"]
            assert run.run_count == 1 and run.tags == [f"run:{config.run}"] and run.parent_task_run_id is not None
            link = await client.read_task_run(run.parent_task_run_id)
            assert link.flow_run_id == outer.id and link.state is not None and link.state.is_completed()
        links = await client.read_task_runs(
            task_run_filter=TaskRunFilter(flow_run_id=TaskRunFilterFlowRunId(any_=[outer.id]))
        )
        assert sorted(link.name for link in links) == [f"iteration-{number}" for number in range(4)]
    begun, ended = ([getattr(run, name) for run in iterations] for name in ("start_time", "end_time"))
    assert begun == sorted(begun) and ended == sorted(ended)


async def test_an_iteration_costs_six_calls_and_waits_for_none(
    config: PipelineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where Prefect's engine makes other calls than today, this fails."""
    calls: Counter[str] = Counter()
    answered = asyncio.Event()
    answered.set()
    send = httpx.AsyncClient.send

    async def written_down(self: httpx.AsyncClient, request: httpx.Request, **how: Any) -> httpx.Response:
        said = f"{request.method} {IDS.sub('ID', request.url.path)}"
        if "set_state" in said:
            await answered.wait()
        calls[said] += not re.search("logs|concurrency|admin|csrf", said)
        return await send(self, request, **how)

    @flow(name="iteration", flow_run_name="{config.run}-{iteration:05d}", validate_parameters=False)
    async def waits(config: PipelineConfig, iteration: int) -> IterationRecord:
        # the states of iterations 0 and 1 are not answered before 1 has begun
        answered.set() if iteration else answered.clear()
        begin_next()
        return record(iteration)

    @flow(name="phase", validate_parameters=False)
    async def phase(config: PipelineConfig) -> None:
        async with iteration_runs(waits, config) as runs:
            for iteration in range(4):
                await runs.run(iteration)

    monkeypatch.setattr(httpx.AsyncClient, "send", written_down)
    await phase(config)
    assert +calls == {
        "POST /api/task_runs/": 4,
        "POST /api/flow_runs/filter": 4 + 1,  # and one for what an earlier start left
        "POST /api/flows/": 4 + 1,  # and those of the phase itself
        "POST /api/flow_runs/": 4 + 1,
        "POST /api/flow_runs/ID/set_state": 2 * (4 + 1),
        "GET /api/flow_runs/ID": 1,
    }


@pytest.mark.parametrize("fails", [False, True])
async def test_what_was_created_and_did_not_begin_is_deleted(config: PipelineConfig, fails: bool) -> None:
    config = config.model_copy(update={"seed": 1 if fails else 9})
    if fails:
        with pytest.raises(ValueError, match="the cause"):
            await run_phase(config, 4)
    else:
        await run_phase(config, 2)
    runs = await runs_of(config)
    outer = next(run for name, run in runs.items() if not name.startswith(config.run))
    assert {name[-5:] for name in runs if name.startswith(config.run)} == {"00000", "00001"}
    assert runs[f"{config.run}-00000"].state_name == "Completed"
    assert runs[f"{config.run}-00001"].state_name == ("Failed" if fails else "Completed")
    async with get_client() as client:
        assert (await states_of(client, runs[f"{config.run}-00001"]))[:2] == ["Pending", "Running"]
        wanted = TaskRunFilter(flow_run_id=TaskRunFilterFlowRunId(any_=[outer.id]))
        assert len(await client.read_task_runs(task_run_filter=wanted)) == 2


async def test_what_a_killed_process_created_is_deleted_by_the_next_start(config: PipelineConfig) -> None:
    other = config.model_copy(update={"store": f"{config.store}-other"})
    async with get_client() as client:
        for left in (config, other):
            await client.create_flow_run(
                one,
                name=f"left {left.store}",
                parameters=one.serialize_parameters({"config": left, "iteration": 7}),
                tags=[f"run:{config.run}"],
                state=Pending(),
            )
    await run_phase(config, 1)
    runs = await runs_of(config)
    assert f"left {other.store}" in runs and f"left {config.store}" not in runs


async def test_a_phase_that_is_cancelled_leaves_no_iteration_that_seems_to_wait(config: PipelineConfig) -> None:
    running = asyncio.create_task(run_phase(config, 4))

    async def second_created() -> bool:
        return f"{config.run}-00001" in await runs_of(config)

    await until_async(second_created)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    states = {name[-5:]: run.state_name for name, run in (await runs_of(config)).items()}
    assert "Pending" not in states.values() and "Running" not in states.values(), states


async def test_calls_are_sent_in_order_and_the_first_fault_ends_the_phase() -> None:
    sent: list[int] = []

    async def call(number: int) -> None:
        await asyncio.sleep(0.01 * (3 - number))
        sent.append(number)
        if number == 2:
            raise ValueError("the cause")

    async def body() -> None:
        async with unawaited.calls_in_order():
            for number in range(4):
                await unawaited.unawaited(lambda number=number: call(number))
            assert sent == []

    with pytest.raises(ValueError, match="the cause"):
        await body()
    assert sent == [0, 1, 2]
    await unawaited.unawaited(lambda: call(1))  # outside, it is waited for
    assert sent == [0, 1, 2, 1]


async def test_a_limit_of_a_tag_holds_from_the_second_task_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prefect.concurrency.services._should_use_cache", lambda names, holder: False)
    tag, at_once = f"tag{uuid4().hex[:8]}", [0, 0]

    @task(tags={tag}, persist_result=False)
    async def counted() -> None:
        at_once[0] += 1
        at_once[1] = max(at_once)
        await asyncio.sleep(0.3)
        at_once[0] -= 1

    @flow(persist_result=False)
    async def limited() -> None:
        await counted()
        await asyncio.gather(counted(), counted())  # none of them waits for an answer
        assert at_once[1] == 2
        async with get_client() as client:
            await client.create_concurrency_limit(tag=tag, concurrency_limit=1)
            await counted()
            name = f"tag:{tag}"
            assert all(name not in names for names in unawaited._unlimited)
            at_once[1] = 0
            await counted()
            assert at_once[1] == 1
            limit = await client.read_global_concurrency_limit_by_name(name)
            assert limit.active_slots == 0  # what was occupied to ask was released

    await limited()
