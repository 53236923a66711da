"""Which segment SFT ends with, where it is validated: the one with the lowest validation loss, as an artifact of its own."""

from __future__ import annotations

import asyncio

from rlpipe.config_training import SftConfig
from rlpipe.stages.commit import Attempt, Produced, StageKey, run_stage
from rlpipe.stages.session import Session
from rlpipe.store.run import Run
from rlpipe.types import StageResult

LOSS = "train/validation_loss"


def validation_losses(run: Run, num_segments: int) -> list[float]:
    """The validation loss of each of the first `num_segments` segments, which are committed; none without validation."""
    if not run.config.sft.validated:
        return []
    return [run.committed("sft", segment, "policy")[1].metrics[LOSS] for segment in range(num_segments)]


def best_segment(losses: list[float]) -> int:
    """The segment with the lowest loss; of equal ones the first."""
    return min(range(len(losses)), key=lambda segment: (losses[segment], segment))


def out_of_patience(sft: SftConfig, losses: list[float]) -> bool:
    """Whether the last `sft.patience` segments brought no loss below those before."""
    return 0 < sft.patience <= len(losses) - 1 - best_segment(losses) if losses else False


async def select_segment(session: Session) -> StageResult:
    """Commits the choice once SFT is over: `segment` is the best one, `num_segments` were trained, `losses` is one a segment.

    It is a function of the committed segments: whoever comes back after a crash chooses the same.
    """
    run = session.run

    def produce(_: Attempt) -> Produced:
        losses = validation_losses(run, done)
        assert done == run.num_segments or out_of_patience(run.config.sft, losses), "SFT is not over"
        return Produced([], {"segment": best_segment(losses), "num_segments": done, "losses": losses})

    done = await asyncio.to_thread(run.num_committed, "sft", run.num_segments)
    last, _ = await asyncio.to_thread(run.committed, "sft", done - 1, "policy")
    return await run_stage(session, StageKey("data", 0, "selection"), {"last": last}, produce)
