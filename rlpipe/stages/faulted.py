"""Which rollouts that their environment failed may be committed: what is committed is not sampled again.

A shard that has such rollouts and none that the environment answered is committed only after another shard of its round that has one.
So a round that is committed holds a rollout that can be scored, and an environment that works for nobody spoils none.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import Counter

from rlpipe.rollouts import ROLLOUTS, read_rows
from rlpipe.stages.commit import StageKey
from rlpipe.stages.session import Session
from rlpipe.types import EngineError, JsonDict, UserError

log = logging.getLogger(__name__)
POLL_S = 2.0


async def check_answered(session: Session, key: StageKey, others: list[StageKey], rows: list[JsonDict]) -> None:
    """Returns when the rollouts `rows` of the shard `key` may be committed; `others`: the other shards of its round.

    UserError when the environment has answered no rollout of the round without a fault. EngineError when the other shards do not
    end: none within `rl.turns_max` times `engines.request_timeout_s`.
    """
    faults = Counter(fault for row in rows if row["environment"] and (fault := json.loads(row["environment"])["fault"]))
    if not faults or _answered(rows):
        return
    log.warning("%s: the environment failed all that it heard, %s; waiting for the other shards", key.stage, dict(faults))
    session.unanswered.add((key.iteration, key.stage))
    patience_s = session.config.rl.turns_max * session.config.engines.request_timeout_s
    committed: set[StageKey] = set()
    deadline_s = time.monotonic() + patience_s
    while True:
        session.check_open()
        for other in (other for other in others if other not in committed):
            rows_there = await asyncio.to_thread(_committed_rows, session, other)
            if rows_there is not None:
                if _answered(rows_there):
                    return
                committed.add(other)
                deadline_s = time.monotonic() + patience_s
        if all(other in committed or (other.iteration, other.stage) in session.unanswered for other in others):
            raise UserError(_nobody(session, key, faults, len(rows)))
        if time.monotonic() > deadline_s:
            raise EngineError(
                f"{key.stage}: its environment failed all that it heard, and no other shard ended in {patience_s:g} s"
            )
        await asyncio.sleep(POLL_S)


def _answered(rows: list[JsonDict]) -> bool:
    """Whether the environment took part in one of these rollouts to its end: one that the policy did not end was never heard."""
    records = (json.loads(row["environment"]) for row in rows if row["environment"])
    return any(record["messages"] and not record["fault"] for record in records)


def _committed_rows(session: Session, key: StageKey) -> list[JsonDict] | None:
    found = session.run.artifact(*key)
    return read_rows(session.run.store, found[0], "rollouts.parquet", ROLLOUTS) if found else None


def _nobody(session: Session, key: StageKey, faults: Counter[str], num_rows: int) -> str:
    return (
        f"rl.environment={session.config.rl.environment!r} has answered no rollout of iteration {key.iteration} without a fault; "
        f"{key.stage}: {faults.total()} of {num_rows} rollouts had one ({dict(faults)}; the log says which). These are not "
        "committed: mend the environment and start again, and they are sampled again"
    )
