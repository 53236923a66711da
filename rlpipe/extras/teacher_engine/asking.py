"""What a teacher that an engine serves gives to the tokens of a batch: `rl.teacher_engine`.

Legend: N scored tokens of a row, K top tokens of the teacher.
"""

from __future__ import annotations

import asyncio
import os

import numpy as np

from rlpipe.base.errors import EngineError, UserError
from rlpipe.base.references import ArtifactRef
from rlpipe.engines.client import EngineClient, EngineUnavailable, RequestRefused, ScoredTokens
from rlpipe.engines.kind import kind_of
from rlpipe.records.rollout import BATCH, BRANCHES_FILE, Branch, Rollout, TeacherLogprobs, TeacherTop, with_branches
from rlpipe.services.calls import new_session
from rlpipe.store.artifacts import read_manifest, read_records
from rlpipe.store.backend import Store

KEY_VARIABLE = "RLPIPE_TEACHER_KEY"  # of the engine, if it wants one
AT_ONCE = 32  # requests
TRIES, WAIT_S = 6, 2.0  # for one row; the wait doubles: about a minute
REST_MIN = 2.0**-24  # of the probability of all other tokens, which is 1 minus a sum in fp32
Taught = tuple[TeacherLogprobs, TeacherTop]  # of a row


async def ask(store: Store, address: str, batch: ArtifactRef, top_k: int = 0, vocab_size: int = 0) -> list[Taught]:
    """The logprobs of every scored token of a batch, row by row as the trainer reads it, from the
    engine at KIND:URL; and the teacher's `top_k` tokens there, at most all of the vocabulary.

    EngineError when it cannot be reached, UserError when it refuses, a logprob is not finite or a
    top token is missing.
    """
    top_k = min(top_k, vocab_size)
    kind, _, url = address.partition(":")
    rows = await asyncio.to_thread(_rows, store, batch)
    async with new_session() as session:
        client = kind_of(kind).client("teacher", url, session, (os.environ.get(KEY_VARIABLE, ""), ""))
        limit = asyncio.Semaphore(AT_ONCE)

        async def asked(row: Rollout | Branch) -> Taught:
            async with limit:
                return _taught(row, await _scored(client, row, top_k), top_k, whole=top_k == vocab_size)

        taught = await asyncio.gather(*map(asked, rows))
    place = f"rl.teacher_engine={address!r}: it gives"
    tops = [np.isfinite(top.logprobs).reshape(len(top.rest), top_k).all(-1) for _, top in taught]
    known = [np.isfinite(own.logprobs) & finite_N for (own, _), finite_N in zip(taught, tops, strict=True)]
    if unknown := sum(int((~one).sum()) for one in known):
        raise UserError(f"{place} {unknown} tokens of {batch.folder} no finite logprob")
    if (largest := max((int(top.tokens.max(initial=0)) for _, top in taught), default=0)) >= vocab_size > 0:
        raise UserError(f"{place} token {largest}, outside of the vocabulary of {vocab_size}; lower rl.teacher_top_k")
    return taught


def _taught(row: Rollout | Branch, given: ScoredTokens, top_k: int, *, whole: bool) -> Taught:
    """The records of the scored tokens of a row. The probability of all tokens but the top ones is
    1 minus the sum of theirs, at least REST_MIN; there are no others where the top ones are the
    `whole` vocabulary.
    """
    scored = np.flatnonzero(row.loss_mask)
    top = [given.top[place] for place in scored] if top_k else []
    if short := [len(pairs) for pairs in top if len(pairs) != top_k]:
        raise UserError(f"rl.teacher_top_k={top_k}: the engine gives {short[0]} top tokens; lower it")
    pairs_NK2 = np.array(top, np.float64).reshape(len(scored), top_k, 2)
    rest_N = np.log(np.maximum(1 - np.exp(pairs_NK2[..., 1]).sum(-1), REST_MIN))
    at, columns = (row.group_index, row.rollout_index), pairs_NK2.reshape(-1, 2)
    own = TeacherLogprobs(*at, np.asarray(given.logprobs, np.float32)[scored])
    rest = np.where(whole, -np.inf, rest_N).astype(np.float32)
    return own, TeacherTop(*at, columns[:, 0].astype(np.int32), columns[:, 1].astype(np.float32), rest)


def _rows(store: Store, batch: ArtifactRef) -> list[Rollout | Branch]:
    rollouts = list(read_records(store, batch, "batch.parquet", Rollout, BATCH))
    names = {file.name.rpartition("/")[2] for file in read_manifest(store, batch.folder, batch.sha256).files}
    branches = read_records(store, batch, BRANCHES_FILE, Branch) if BRANCHES_FILE in names else []
    return [*with_branches(rollouts, branches)[0]]


async def _scored(client: EngineClient, row: Rollout | Branch, top_k: int) -> ScoredTokens:
    """Of the completion of a row, in as many tries as an engine that restarts may need."""
    if not np.any(row.loss_mask):
        return ScoredTokens([0.0] * len(row.completion_tokens), [])
    tokens = [*row.prompt_tokens.tolist(), *row.completion_tokens.tolist()]
    for attempt in range(TRIES):
        try:
            return await client.score_top(tokens, len(row.completion_tokens), top_k)
        except RequestRefused as error:
            raise UserError(f"rl.teacher_engine: {error}") from error
        except EngineUnavailable as error:
            if attempt == TRIES - 1:
                raise EngineError(
                    f"rl.teacher_engine: {client.url} did not answer in {TRIES} tries: {error}"
                ) from error
            await asyncio.sleep(WAIT_S * 2**attempt)
    raise AssertionError("the last try returns or raises")
