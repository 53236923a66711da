"""Every stage as a Prefect task: named, timed, retried; shown as `Cached` when its result was committed before."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.runtime import task_run
from prefect.states import Completed

from rlpipe.engines.client import RequestRefused
from rlpipe.stages import base, evaluation, importing, policy, sampling, scoring, selection, sft
from rlpipe.stages.session import Session
from rlpipe.types import StageResult, StepRefused, StoreError, UserError

RETRIES = 2
RETRY_DELAY_S = 2.0
FINAL = (UserError, StoreError, StepRefused, RequestRefused, AssertionError)  # asking again changes nothing

Stage = Callable[..., Awaitable[StageResult]]


async def _worth_retrying(_task: object, _run: object, state: State[Any]) -> bool:
    raised = await state.aresult(raise_on_failure=False)
    return not isinstance(raised, FINAL)


def _task(stage: Stage, verb: str, run_name: str) -> Stage:
    """The task of that verb around `async def stage(session, ...) -> StageResult`; `run_name` is filled with its arguments."""

    @task(
        name=verb,
        description=stage.__doc__,
        task_run_name=lambda: run_name.format(**task_run.parameters["arguments"]),
        retries=RETRIES,
        retry_delay_seconds=RETRY_DELAY_S,
        retry_condition_fn=_worth_retrying,
        persist_result=False,
        cache_policy=NO_CACHE,
    )
    async def timed(session: Session, **arguments: Any) -> StageResult | State[StageResult]:
        with session.timed(verb):
            result = await stage(session, **arguments)
        return Completed(name="Cached", data=result) if result.cached else result

    async def run(session: Session, **arguments: Any) -> StageResult:
        state: State[StageResult] = await timed(session, **arguments, return_state=True)  # pyright: ignore[reportAssignmentType]
        return await state.aresult()

    return run


prepare_tokenizer = _task(base.base_tokenizer, "prepare_tokenizer", "prepare the tokenizer")
prepare_model = _task(base.base_policy, "prepare_model", "prepare the base model")
prepare_probe = _task(base.base_probe, "prepare_probe", "score the probe with the base model")

prepare_sft_data = _task(sft.prepare_sft_data, "prepare_sft_data", "tokenise the conversations")
train_segment = _task(sft.train_segment, "train_segment", "train segment {segment:05d}")
select_segment = _task(selection.select_segment, "select_segment", "select the best segment")

sample_prompts = _task(sampling.sample_prompts, "sample_prompts", "sample_prompts {iteration:05d} round {round_index}")
generate = _task(sampling.generate, "generate", "generate {iteration:05d} round {round_index} shard {shard}")
import_prompts = _task(importing.import_prompts, "import_prompts", "import_prompts {iteration:05d}")
import_rollouts = _task(importing.import_rollouts, "import_rollouts", "import_rollouts {iteration:05d}")
score = _task(scoring.score, "score", "score {iteration:05d} round {round_index}")
filter_groups = _task(scoring.filter_groups, "filter", "filter {iteration:05d} round {round_index}")
train = _task(policy.train, "train", "train {iteration:05d}")
checkpoint = _task(policy.checkpoint, "checkpoint", "checkpoint {iteration:05d}")
reload_engines = _task(policy.reload_engines, "reload_engines", "reload_engines to version {version}")
evaluate = _task(evaluation.evaluate, "evaluate", "evaluate version {version}")
