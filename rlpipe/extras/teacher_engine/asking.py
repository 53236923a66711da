"""What a teacher that an engine serves gives to the tokens of a batch: `rl.teacher_engine`."""

from __future__ import annotations

import asyncio
import os

import numpy as np

from rlpipe.base.errors import EngineError, UserError
from rlpipe.base.references import ArtifactRef
from rlpipe.engines.client import EngineClient, EngineUnavailable
from rlpipe.engines.kind import kind_of
from rlpipe.records.rollout import BATCH, BRANCHES_FILE, Branch, Rollout, TeacherLogprobs, with_branches
from rlpipe.services.calls import new_session
from rlpipe.store.artifacts import read_manifest, read_records
from rlpipe.store.backend import Store

KEY_VARIABLE = "RLPIPE_TEACHER_KEY"  # of the engine, if it wants one
AT_ONCE = 32  # requests
TRIES, WAIT_S = 6, 2.0  # for one row; the wait doubles: about a minute


async def ask(store: Store, address: str, batch: ArtifactRef) -> list[TeacherLogprobs]:
    """The logprobs of every scored token of a batch, row by row as the trainer reads it, from the
    engine at KIND:URL.

    EngineError when it cannot be reached or refuses, UserError when a logprob is not finite.
    """
    kind, _, url = address.partition(":")
    rows = await asyncio.to_thread(_rows, store, batch)
    async with new_session() as session:
        client = kind_of(kind).client("teacher", url, session, (os.environ.get(KEY_VARIABLE, ""), ""))
        limit = asyncio.Semaphore(AT_ONCE)

        async def asked(row: Rollout | Branch) -> TeacherLogprobs:
            async with limit:
                return TeacherLogprobs(row.group_index, row.rollout_index, await _logprobs(client, row))

        taught = await asyncio.gather(*map(asked, rows))
    if unknown := sum(int((~np.isfinite(one.logprobs)).sum()) for one in taught):
        raise UserError(f"rl.teacher_engine={address!r}: it gives {unknown} tokens of {batch.folder} no finite logprob")
    return taught


def _rows(store: Store, batch: ArtifactRef) -> list[Rollout | Branch]:
    rollouts = list(read_records(store, batch, "batch.parquet", Rollout, BATCH))
    names = {file.name.rpartition("/")[2] for file in read_manifest(store, batch.folder, batch.sha256).files}
    branches = read_records(store, batch, BRANCHES_FILE, Branch) if BRANCHES_FILE in names else []
    return [*with_branches(rollouts, branches)[0]]


async def _logprobs(client: EngineClient, row: Rollout | Branch) -> np.ndarray:
    """Of the scored tokens of a row, in as many tries as an engine that restarts may need."""
    scored = np.flatnonzero(row.loss_mask)
    if not len(scored):
        return np.zeros(0, np.float32)
    tokens = [*row.prompt_tokens.tolist(), *row.completion_tokens.tolist()]
    for attempt in range(TRIES):
        try:
            logprobs = await client.score(tokens, len(row.completion_tokens))
            return np.asarray(logprobs, np.float32)[scored]
        except EngineUnavailable as error:
            if attempt == TRIES - 1:
                raise EngineError(
                    f"rl.teacher_engine: {client.url} did not answer in {TRIES} tries: {error}"
                ) from error
            await asyncio.sleep(WAIT_S * 2**attempt)
    raise AssertionError("the last try returns or raises")
