"""SFT: segment after segment of optimizer steps, from the newest committed one."""

from __future__ import annotations

import asyncio
from typing import Any

from prefect import flow

from flows.naming import named, run_name
from flows.prepare import prepare
from flows.progress import bar, segment_line
from flows.rl_phase import stopped
from flows.session import open_session
from rlpipe.config import PipelineConfig
from rlpipe.stages.limits import reason_to_stop
from rlpipe.stages.selection import LOSS, out_of_patience, validation_losses
from rlpipe.stages.session import Session
from rlpipe.types import JsonDict
from tasks.stages import prepare_sft_data, select_segment, train_segment


@flow(name="sft", flow_run_name=run_name("sft"), persist_result=False)
async def sft(changes: JsonDict | None = None, *, config: PipelineConfig) -> JsonDict:
    """The SFT phase of a run; starts it, or goes on after its newest committed segment. Returns the policy's reference.

    Args:
        changes: Only what differs from the config below, for example `{"run": "monday", "rl.num_iterations": 30, "data.words.rows_max": 500}`.
        config: The whole config. The same `run` continues; an empty one names the run after the flow run (whose Run Name above is replaced).
    """
    config = named(config, changes)
    async with open_session(config) as session:
        base = await prepare(session)
        data = await prepare_sft_data(session, tokenizer=base.ref)
        run, total = session.run, session.run.num_segments
        first = run.num_committed("sft", total)
        session.tracker.committed("sft", first)
        steps = config.sft.segment_steps
        losses = validation_losses(run, first)
        with bar("SFT", config.sft.num_steps, min(first * steps, config.sft.num_steps), "step") as progress:
            for segment in range(first, total):
                if out_of_patience(config.sft, losses):
                    progress.write(f"SFT ends: {config.sft.patience} segments without a better validation loss")
                    break
                if reason := await why_sft_stops(session):
                    return stopped(reason, {})

                def show(done: dict[str, Any], segment: int = segment) -> None:
                    progress.n = segment * steps + int(done["done"])
                    progress.refresh()

                trained = await train_segment(session, segment=segment, data=data.ref, tokenizer=base.ref, on_progress=show)
                session.tracker.committed("sft", segment + 1)
                progress.n = min((segment + 1) * steps, config.sft.num_steps)
                progress.write(segment_line(segment, progress.n, trained.metrics))
                losses += [trained.metrics[LOSS]] if config.sft.validated else []
        if config.sft.validated:
            await select_segment(session)
        return run.start_policy()[0].as_json()


async def why_sft_stops(session: Session) -> str:
    """The reason not to train the next segment; empty: train it, or SFT is complete."""
    if session.run.sft_complete:
        return ""
    done = session.run.num_committed("sft", session.run.num_segments)
    return await asyncio.to_thread(reason_to_stop, session.run, "sft", done)
