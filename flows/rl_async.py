"""An RL iteration one step off policy: while the trainer makes the next weight version, the engines
sample with the version that it starts from.

Iteration k trains version k + 1 on the rollouts of version k - 1 (iteration 0 on those of version
0), and meanwhile samples the rollouts of iteration k + 1 with version k. The stages, and the
artifacts that they commit, are those of flows/rl_iteration.py.
"""

from __future__ import annotations

import asyncio

from prefect import flow

from flows.rl_iteration import Sampled, end_iteration, sample_batch, take_batch, train_batch
from flows.session import open_session
from rlpipe.base.manifests import IterationRecord
from rlpipe.config.pipeline import PipelineConfig
from rlpipe.loop.session import Session


@flow(
    name="rl-iteration-async",
    flow_run_name="{config.run}-{iteration:05d}",
    validate_parameters=False,
    persist_result=False,
)
async def rl_async_iteration(config: PipelineConfig, iteration: int) -> IterationRecord:
    """Weight version k becomes k + 1, and samples what version k + 1 is trained on.
    Returns the record of the commit.

    When training or sampling fails, the other comes to its end first. Trained, the iteration is
    committed all the same.
    """
    async with open_session(config) as session:
        session.clock.begin(iteration)
        # sampled by the previous iteration, except for the first
        sampled = await take_batch(session, iteration)
        trained, ahead = await asyncio.gather(
            train_batch(session, iteration, sampled), sample_ahead(session, iteration, sampled), return_exceptions=True
        )
        if isinstance(trained, BaseException):
            raise trained
        record = await end_iteration(session, iteration, sampled, trained)
        if isinstance(ahead, BaseException):
            raise ahead
        return record


async def sample_ahead(session: Session, iteration: int, sampled: Sampled) -> None:
    """Commits the batch of the next iteration.

    There is none after the last iteration, and a redone one needs no engine.
    """
    if iteration + 1 < session.config.rl.num_iterations and not session.run.redoes(iteration):
        await sample_batch(session, iteration + 1, sampled.before_next)
