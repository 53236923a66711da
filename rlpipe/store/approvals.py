"""Gates at which a run waits until a person agrees (`approval` of the config).

The agreement is a file in the store.
"""

from __future__ import annotations

from typing import Literal

from rlpipe.base.hashing import canonical_json
from rlpipe.store.progress import Progress
from rlpipe.store.run import Run

Gate = Literal["rl", "register"]
BEFORE: dict[Gate, str] = {"rl": "RL starts", "register": "the policy is registered"}


def is_awaited(run: Run, gate: Gate) -> bool:
    """True when the run must wait at a gate, because nobody has agreed yet."""
    return gate in run.config.approval and not run.store.exists(_key(run, gate))


def approve(run: Run, gate: Gate, flow_run: str) -> None:
    """Stores that somebody agreed, on the page of a flow run; later starts of the run do not ask
    again.
    """
    run.store.create(_key(run, gate), canonical_json({"gate": gate, "flow_run": flow_run}))


def awaited_gate(run: Run, ended: bool) -> Gate | None:
    """The gate at which a run without a holder waits; None where it waits at none.

    `ended`: True when its RL is complete, or was stopped.
    """
    if not Progress(run).sft_complete:
        return None
    if run.config.rl.num_iterations and is_awaited(run, "rl"):
        return "rl"
    return "register" if ended and is_awaited(run, "register") else None


def _key(run: Run, gate: Gate) -> str:
    return f"{run.root}/approval/{gate}.json"
