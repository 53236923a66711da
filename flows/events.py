"""Events of a run on the Prefect server, on which automations can fire (docs/nights.md).

An event that the server does not accept costs the run nothing. Events are sent after the commit
that they report, at most once: when a process dies in between, the event is never sent, also not by
the next start.
"""

from __future__ import annotations

from typing import Any, Literal, TypedDict

from prefect.events import emit_event

from flows.terminal import iteration_line
from rlpipe.base.manifests import IterationRecord
from rlpipe.base.printable import printable
from rlpipe.base.values import Metrics
from rlpipe.report.reward import fall

Event = Literal["iteration.committed", "policy.registered", "gate.passed", "gate.failed", "reward.fell", "run.stopped"]


class Facts(TypedDict, total=False):
    """The values of an event, beside its message."""

    iteration: int
    weight_version: int
    metrics: Metrics
    policy: str
    store: str


def tell(run: str, event: Event, message: str, facts: Facts | None = None) -> None:
    """Emits `rlpipe.<event>` of a run; Prefect adds the flow run, its deployment and its tags."""
    resource = {"prefect.resource.id": f"rlpipe.run.{run}", "prefect.resource.name": run}
    payload: dict[str, Any] = {"run": run, "message": printable(message)}
    payload.update(facts or {})
    # sent by a thread of Prefect's, which fails open
    emit_event(event=f"rlpipe.{event}", resource=resource, payload=payload)


def tell_iteration(record: IterationRecord) -> None:
    """Emits the event of the iteration's commit, and, where its reward fell, the event of that."""
    facts: Facts = {"iteration": record.iteration, "weight_version": record.weight_version}
    tell(record.run, "iteration.committed", iteration_line(record), facts | {"metrics": record.metrics})
    if message := fall(record.curve):
        message = f"{message}. What changed: rlpipe why {record.run} --at {record.iteration}"
        tell(record.run, "reward.fell", message, facts)
