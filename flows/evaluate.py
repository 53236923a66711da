"""Evaluates one committed policy of a run, at any time."""

from __future__ import annotations

import asyncio
from typing import Any

from prefect import flow
from prefect.states import Completed

from flows.session import open_session, run_name
from flows.ui import publish_gate, revoke
from rlpipe.base.errors import UserError
from rlpipe.base.manifests import StageResult
from rlpipe.base.values import Metrics
from rlpipe.config.extras import COMMANDS, opened
from rlpipe.config.pipeline import PipelineConfig
from rlpipe.config.source import Changes, change_config
from rlpipe.loop.session import Session
from rlpipe.store.backend import open_store
from rlpipe.store.opening import find_run
from rlpipe.store.run import Run
from rlpipe.stored.remaking import committed_version, is_missing_to_evaluate
from tasks.stages import evaluate as evaluate_task
from tasks.stages import restore_policy


@flow(name="evaluate", flow_run_name=run_name("evaluate"), persist_result=False)
async def evaluate(changes: Changes | None = None, version: int | None = None, *, config: PipelineConfig) -> Any:
    """The evaluation metrics of a weight version of the run, computed now or read from the store.

    Where the config has a gate, it judges what is stored. One that fails revokes a registered
    policy that passed before, and the flow run ends in a state `GateFailed`.

    Args:
        changes: Only what differs from the config below, for example `{"run": "monday"}`.
        version: The weight version: 0 is what RL starts from, k what iteration k - 1 made, -1 the
            model before SFT; none is the newest.
        config: The config of the run; its name says which one.
    """
    config = change_config(config, changes) if changes else config
    run = await asyncio.to_thread(lambda: find_run(open_store(config.store), config)) if config.run else None
    if run is None:
        raise UserError(f"run={config.run!r}: name a run that exists in {config.store}")
    newest = await asyncio.to_thread(version_to_evaluate, run, version)
    async with open_session(config) as session:
        metrics: Metrics = (await evaluate_version(session, newest)).metrics
        if not config.evaluation.gate_against:
            return metrics
        passed, lines = await judge_version(session, newest)
        if passed is False:
            await revoke(session, newest, lines[0])
            return Completed(name="GateFailed", message=lines[0], data=metrics)
        return metrics


async def evaluate_version(session: Session, version: int) -> StageResult:
    """The evaluation of a committed weight version, whose policy is made again where it is pruned;
    also tracked.
    """
    policy, _ = await asyncio.to_thread(session.run.policy, version)
    if await asyncio.to_thread(is_missing_to_evaluate, session.run, version):
        await restore_policy(session, version=version)
    evaluated = await evaluate_task(session, policy=policy, version=version)
    session.tracker.evaluated(version)
    return evaluated


async def judge_version(session: Session, version: int) -> tuple[bool | None, list[str]]:
    """Whether a weight version passes the gate of the config, None where the gate cannot judge; and
    its report as lines, which is also shown.
    """
    judge = opened(COMMANDS["gate of a run"], "evaluation.gate_against")
    try:
        passed, lines = await asyncio.to_thread(judge, session.run, version, session.config)
    except UserError as error:  # what the run made is published all the same
        passed, lines = None, [f"the gate cannot judge: {error}"]
    await publish_gate(session, passed, lines)
    return passed, lines


def version_to_evaluate(run: Run, version: int | None) -> int:
    """The requested version, or the newest one; UserError when it is not committed, or there are no
    evaluation sets.
    """
    if not run.config.sets("evaluation"):
        raise UserError(f"run {run.name} has no data set of use = 'evaluation': there is nothing to evaluate it on")
    return committed_version(run, version)
