"""Events of a run on the Prefect server, on which automations can fire (docs/nights.md).

What the server does not take costs the run nothing.

They come after what they tell of is committed, once at most: a process that dies in between has
told nobody, and the next start does not.
"""

from __future__ import annotations

from typing import Any, Literal

from prefect.events import emit_event

from flows.terminal import iteration_line
from rlpipe.base.manifests import IterationRecord
from rlpipe.base.printable import printable
from rlpipe.base.values import JsonDict
from rlpipe.report.reward import fall

Event = Literal["iteration.committed", "policy.registered", "reward.fell", "run.stopped"]


def tell(run: str, event: Event, message: str, **facts: Any) -> None:
    """Emits `rlpipe.<event>` of a run; Prefect adds the flow run, its deployment and its tags."""
    resource = {"prefect.resource.id": f"rlpipe.run.{run}", "prefect.resource.name": run}
    payload: JsonDict = {"run": run, "message": printable(message), **facts}
    # sent by a thread of Prefect's, which fails open
    emit_event(event=f"rlpipe.{event}", resource=resource, payload=payload)


def tell_iteration(record: IterationRecord) -> None:
    """The iteration's commit, and that its reward fell, where it did."""
    iteration, version = record.iteration, record.weight_version
    committed = iteration_line(record)
    tell(
        record.run,
        "iteration.committed",
        committed,
        iteration=iteration,
        weight_version=version,
        metrics=record.metrics,
    )
    if message := fall(record.curve):
        message = f"{message}. What changed: rlpipe why {record.run} --at {iteration}"
        tell(record.run, "reward.fell", message, iteration=iteration, weight_version=version)
