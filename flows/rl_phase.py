"""What the modes of RL share: how the phase begins, and its loop."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from prefect.states import Completed

from flows.prepare import prepare
from flows.progress import bar, iteration_line
from flows.rl_redo import rl_redo
from rlpipe.config import PipelineConfig
from rlpipe.stages.limits import reason_to_stop
from rlpipe.stages.session import Session
from rlpipe.types import JsonDict, UserError


async def begin_rl(session: Session) -> int:
    """Prepares the phase; the first iteration that is to do. UserError when the SFT before it is not complete."""
    run, total = session.run, session.config.rl.num_iterations
    if not run.sft_complete:
        raise UserError(f"the SFT of run {run.name} is not complete: start post-train or sft first, or set sft.num_steps = 0")
    await prepare(session)
    first = run.num_committed("rl", total)
    session.tracker.committed("rl", first)
    if first < total and run.redoes(first):
        print(iteration_line(await rl_redo(session.config, first)))
        first += 1
        session.tracker.committed("rl", first)
    return first


async def iterate(session: Session, first: int, one_iteration: Callable[[PipelineConfig, int], Awaitable[JsonDict]]) -> Any:
    """Does the iterations from `first` on; the policy's reference, in a state `Stopped` when a budget or a rule ended the phase."""
    done, total = first, session.config.rl.num_iterations
    with bar("RL", total, first, "iteration") as progress:
        while not (reason := await why_not_on(session, done)) and done < total:
            record = await one_iteration(session.config, done)
            done += 1
            session.tracker.committed("rl", done)
            progress.write(iteration_line(record))
            progress.update()
    policy = session.run.policy(done)[0].as_json()
    return stopped(reason, policy) if reason else policy


async def why_not_on(session: Session, done: int) -> str:
    """The reason not to go on after `done` iterations; empty: go on, or there is nothing left to do."""
    return await asyncio.to_thread(reason_to_stop, session.run, "rl", done)


def stopped(reason: str, data: JsonDict) -> Any:
    """The state of a flow run that a budget or a stop rule ended: no failure, and no plain success."""
    return Completed(name="Stopped", message=reason, data=data)
