"""SFT, then RL: the parent flow.

Where the config says so, a person approves the next phase; the run is released while it waits.

An approval is kept in the store with the run: a retry, and another flow run of the same name, do
not ask again.
"""

from __future__ import annotations

import asyncio

from prefect import flow
from prefect.flow_runs import apause_flow_run, asuspend_flow_run
from prefect.runtime import flow_run
from prefect.utilities.urls import url_for

from flows.evaluate import evaluate_version, judge_version
from flows.printing import echo
from flows.rl import rl
from flows.session import open_session, prepare, reason_to_end, requested, run_name
from flows.sft import evaluate_sft, sft
from flows.terminal import of_deployment
from flows.ui import RunReport, ended, publish_evaluation, publish_report, untrained_so_far
from rlpipe.base.errors import RunWaits
from rlpipe.config.pipeline import PipelineConfig
from rlpipe.config.source import Changes
from rlpipe.loop.session import Session
from rlpipe.store.approvals import BEFORE, Gate, approve, is_awaited
from rlpipe.store.run import Run
from tasks.stages import evaluate

PHASES = ("sft", "rl")
APPROVAL_TIMEOUT_S = 30 * 24 * 3600


class ApprovalNeeded(RunWaits):
    """Raised at a gate that a person has not approved yet.

    `lines`: the evaluation that the person may look at.
    """

    def __init__(self, run: Run, gate: Gate, lines: list[str]) -> None:
        super().__init__(f"approval.{gate}")
        self.run, self.lines = run, lines
        self.gate: Gate = gate


@flow(name="post-train", flow_run_name=run_name("post-train"), persist_result=False)
async def post_train(changes: Changes | None = None, *, config: PipelineConfig) -> RunReport:
    """Takes a model through SFT and RL. The same run name continues; a
    committed stage is never done twice.

    A run that a budget or a stop rule ended is published as far as it came, in a state `Stopped`.
    One that trained nothing is not registered, and ends in a state `NothingTrained`; one whose
    policy fails its gate is not promoted, and ends in a state `GateFailed`.

    Args:
        changes: Only what differs from the config below, for example
            `{"run": "monday", "rl.num_iterations": 30, "data.words.rows_max": 500}`. With
            `"preset": "smollm2"` among them that preset is taken instead of the config.
        config: The whole config. The same `run` continues; an empty one makes a run of its own,
            named by schedule and time (the Run Name above is replaced).
    """
    config = await requested(config, changes)
    while True:
        try:
            return await _phases(config)
        except ApprovalNeeded as needed:  # the run and its services are released by now
            await _wait_for_approval(needed)


async def _phases(config: PipelineConfig) -> RunReport:
    async with open_session(config) as session:
        run = session.run
        if run.config.sft.num_segments and run.parent is None:
            await sft(config=config)
            if not await asyncio.to_thread(lambda: session.progress.sft_complete):
                reason = await reason_to_end(session, "sft", await asyncio.to_thread(session.progress.num_done, "sft"))
                return await ended(session, PHASES, {"run": run.name, "stopped": reason}, reason)
        elif not config.rl.num_iterations:
            await prepare(session)
            await evaluate_sft(session)
        if config.rl.num_iterations:
            await _require_approval(session, "rl")
            await rl(config=config)
        done = await asyncio.to_thread(session.progress.num_done, "rl")
        gate_failed = None
        if not (await asyncio.to_thread(untrained_so_far, session.run, done)).is_all:
            gate_failed = await _pass_gate(session, done)
            await _require_approval(session, "register")
        report = await publish_report(session, done, gate_failed)
        reason = await reason_to_end(session, "rl", done)
        report |= {"stopped": reason} if reason else {}
        return await ended(session, PHASES, report, reason, gate_failed or "")


async def _pass_gate(session: Session, version: int) -> str | None:
    """The verdict in one line where a weight version fails the gate of the config, empty where it
    passes; None where there is no gate. Evaluates what is to be compared of this run. A gate that
    cannot judge has failed.
    """
    evaluation = session.config.evaluation
    if not evaluation.gate_against:
        return None
    for compared in {version, 0} if evaluation.gate_against in ("base", "champion") else {version}:
        await evaluate_version(session, compared)
    passed, lines = await judge_version(session, version)
    return "" if passed else lines[0]


async def _require_approval(session: Session, gate: Gate) -> None:
    """ApprovalNeeded when the config wants an approval here and the store has none; evaluates
    first, so that the person has an evaluation to look at.
    """
    run, config = session.run, session.config
    if not await asyncio.to_thread(is_awaited, run, gate):
        return
    evaluated = gate == "rl" and config.sets("evaluation") and not config.rl.rollouts_from
    if evaluated and not await asyncio.to_thread(session.progress.num_done, "rl"):
        policy, _ = await asyncio.to_thread(run.policy, 0)
        await evaluate(session, policy=policy, version=0)  # RL begins with it, and finds it committed
    raise ApprovalNeeded(run, gate, await publish_evaluation(session, BEFORE[gate]))


async def _wait_for_approval(needed: ApprovalNeeded) -> None:
    """Returns once somebody has pressed Resume, and stores the approval.

    Called while the run is not held. The flow run of a deployment is suspended: its process ends,
    and Resume schedules it again. From the command line it is paused.
    """
    gate = needed.gate
    if of_deployment():
        await asuspend_flow_run(timeout=APPROVAL_TIMEOUT_S, key=gate)
    else:
        echo(f"\nrun {needed.run.name} waits for your approval before {BEFORE[gate]}.", *needed.lines,
              f"  Look at it, then press Resume: {url_for('flow-run', flow_run.id)}",
              "  Or stop here (Ctrl-C): nothing is lost, and the same command asks again")  # fmt: skip
        await apause_flow_run(timeout=APPROVAL_TIMEOUT_S, key=gate)
    await asyncio.to_thread(approve, needed.run, gate, str(flow_run.id))
