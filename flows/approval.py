"""A person's approval, before RL or before the policy is registered. Nothing is held while a run waits for it.

An approval is a fact of the run, kept in the store: a retry, and another flow run of the same name, does not ask again.
"""

from __future__ import annotations

import asyncio
from typing import Literal

from prefect.flow_runs import apause_flow_run, asuspend_flow_run
from prefect.runtime import deployment, flow_run
from prefect.utilities.urls import url_for

from rlpipe.config import PipelineConfig
from rlpipe.stages.session import Session
from rlpipe.store.backend import open_store
from rlpipe.types import canonical_json

Gate = Literal["rl", "register"]
TIMEOUT_S = 30 * 24 * 3600
BEFORE = {"rl": "RL starts", "register": "the policy is registered"}


class ApprovalNeeded(Exception):
    """The run does not go on past a gate before a person says so."""

    def __init__(self, gate: Gate) -> None:
        super().__init__(f"approval.{gate}")
        self.gate: Gate = gate


async def require_approval(session: Session, gate: Gate) -> None:
    """ApprovalNeeded when the config wants an approval here and none is in the store."""
    if gate in session.config.approval and not await asyncio.to_thread(session.run.store.exists, _key(session.config, gate)):
        raise ApprovalNeeded(gate)


async def wait_for_approval(config: PipelineConfig, gate: Gate) -> None:
    """Returns once somebody has pressed Resume, and keeps that in the store. Called when the run is not held.

    A deployment's flow run is suspended: its process ends, and Resume schedules it anew. From the command line it is paused.
    """
    if deployment.id:
        await asuspend_flow_run(timeout=TIMEOUT_S, key=gate)
    else:
        print(f"\nrun {config.run} waits for your approval before {BEFORE[gate]}.\n"
              f"  Look at it, then press Resume: {url_for('flow-run', flow_run.id)}\n"
              "  Or stop here (Ctrl-C): nothing is lost, and the same command asks again", flush=True)  # fmt: skip
        await apause_flow_run(timeout=TIMEOUT_S, key=gate)
    record = canonical_json({"gate": gate, "flow_run": str(flow_run.id)})
    await asyncio.to_thread(lambda: open_store(config.store).create(_key(config, gate), record))


def _key(config: PipelineConfig, gate: Gate) -> str:
    return f"runs/{config.run}/approval/{gate}.json"
