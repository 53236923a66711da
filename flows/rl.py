"""RL: iteration after iteration, from the newest committed one."""

from __future__ import annotations

import asyncio
from functools import partial

from prefect import flow

from flows.iteration_runs import iteration_runs
from flows.rl_async import rl_async_iteration
from flows.rl_iteration import rl_iteration
from flows.session import begin_rl, open_session, reason_to_end, requested, run_name
from flows.terminal import say
from flows.ui import ended, watch
from rlpipe.config.pipeline import PipelineConfig
from rlpipe.config.source import Changes
from rlpipe.processes.memory import settled_heap
from rlpipe.stored.remaking import pruned_versions
from tasks.stages import evaluate, reload_engines, restore_policy

ITERATION = {"none": rl_iteration, "iteration": rl_async_iteration}  # by `rl.overlap`


@flow(name="rl", flow_run_name=run_name("rl"), persist_result=False)
async def rl(changes: Changes | None = None, *, config: PipelineConfig) -> dict[str, str]:
    """The RL phase of a run; starts it, or goes on after its newest committed iteration. Returns
    the final policy's reference.

    Args:
        changes: Only what differs from the config below, for example
            `{"run": "monday", "rl.num_iterations": 30, "data.words.rows_max": 500}`. With
            `"preset": "smollm2"` among them that preset is taken instead of the config.
        config: The whole config. The same `run` continues; an empty one makes a run of its own,
            named by schedule and time (the Run Name above is replaced).
    """
    config = await requested(config, changes)
    async with open_session(config) as session:
        iteration = await begin_rl(session)
        reason = await reason_to_end(session, "rl", iteration)
        if iteration < config.rl.num_iterations and not reason and not session.run.redoes(iteration):
            first = "the policy is evaluated, then " if iteration == 0 and config.sets("evaluation") else ""
            say(
                f"RL: engines and trainer start if they do not run yet (logs: {session.data.folder}), {first}each"
                " iteration prints a line"
            )
            if config.trainer.place == "deployment":
                # before the engines: of two runs that each hold one of two full pools, both would
                # wait
                await session.trainer.ready()
            policy, _ = await asyncio.to_thread(session.run.policy, iteration)
            if not config.rl.rollouts_from:  # else they are needed to evaluate only
                for version in await asyncio.to_thread(pruned_versions, session.run, iteration):
                    await restore_policy(session, version=version)
                await reload_engines(session, policy=policy, version=iteration)
            if iteration == 0 and config.sets("evaluation"):
                await evaluate(session, policy=policy, version=0)
        async with iteration_runs(ITERATION[config.rl.overlap], config) as runs:
            with settled_heap(), watch(session, iteration) as committed:
                while iteration < config.rl.num_iterations and not reason:
                    record = await runs.run(iteration)
                    assert record.iteration == iteration, (
                        f"iteration {iteration} was computed, {record.iteration} was committed"
                    )
                    iteration += 1
                    session.commits.then(partial(committed, record))
                    reason = await reason_to_end(session, "rl", iteration)
                await session.commits.all_committed()
        policy, _ = await asyncio.to_thread(session.run.policy, iteration)
        return await ended(session, ("rl",), policy.as_json(), reason)
