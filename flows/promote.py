"""Promotions: what a policy that passed its gate does in production, and how it comes back.

The deployments of both are started by events of runs (`prefect.yaml`). What an event says is not
believed: the extra looks into MLflow and the store (`rlpipe/extras/gate/promotion.py`).
"""

from __future__ import annotations

import asyncio
from typing import Any

from prefect import flow
from prefect.states import Completed

import flows.outage  # noqa: F401  # a flow run whose server is away for a while goes on
from flows.cli_services import STORE
from flows.terminal import say
from rlpipe.config.extras import COMMANDS, opened
from rlpipe.store.backend import open_store

PRODUCTION = "production"


@flow(name="promote", flow_run_name="promote {run} version {version}", persist_result=False)
async def promote(run: str, version: int, store: str = STORE, alias: str = PRODUCTION) -> Any:
    """Gives a policy that passed its gate an alias of the project's model in MLflow, if it also
    passes against the policy that has the alias now, which becomes `previous`.

    Ends in a state `GateFailed` where it is not promoted. Twice does the same as once.

    Args:
        run: The run of the policy.
        version: Its weight version.
        store: Where the run is.
        alias: The alias of the policy that is in production.
    """
    move: Any = await asyncio.to_thread(opened(COMMANDS["promote"], "promote"), open_store(store), run, version, alias)
    return _ended(move, "Completed")


@flow(name="rollback", flow_run_name="rollback {run} version {version}", persist_result=False)
async def rollback(run: str, version: int, store: str = STORE, alias: str = PRODUCTION, because: str = "") -> Any:
    """Gives the alias of a policy back to the policy that is `previous`, if a later evaluation
    failed its gate, or somebody says why. Twice does the same as once.

    Ends in a state `RolledBack`, or `Completed` where the policy does not have the alias.

    Args:
        run: The run of the policy to take back.
        version: Its weight version.
        store: Where the run is.
        alias: The alias of the policy that is in production.
        because: Why it is taken back; empty: its gate failed, as MLflow says.
    """
    roll_back = opened(COMMANDS["rollback"], "rollback")
    move: Any = await asyncio.to_thread(roll_back, open_store(store), run, version, alias, because)
    return _ended(move, "RolledBack" if move.moved else "Completed")


def _ended(move: Any, name: str) -> Any:
    """The final state of a promotion or a rollback, which says what became of it."""
    for line in [move.said, *move.report]:
        say(line)
    return Completed(name="GateFailed" if move.gate_failed else name, message=move.said, data=move.said)
