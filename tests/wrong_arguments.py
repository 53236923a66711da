"""Calls of stages with wrong arguments: pyright, which CI runs over this file, has to find each of
them. Nothing runs it.

Where it finds none, the comment that expects the error is an error itself.
"""

# pyright: reportUnnecessaryTypeIgnoreComment=true

from __future__ import annotations

from rlpipe.base.references import ArtifactRef
from rlpipe.loop.session import Session
from rlpipe.stages.sampling import sample_prompts
from tasks import stages


async def wrong(session: Session, ref: ArtifactRef) -> None:
    """A name that is none, one that is missing, a list in place of a reference, a text in place of
    a number, no name at all."""
    await stages.sample_prompts(session, iteration=0, round_index=0, before=None, seed=1)  # pyright: ignore[reportCallIssue]
    await stages.score(session, iteration=0, prompts=ref, rollouts=[ref])  # pyright: ignore[reportCallIssue]
    await stages.filter_groups(session, iteration=0, round_index=0, prompts=ref, scores=[ref])  # pyright: ignore[reportArgumentType]
    await stages.train(session, iteration="0", batch=ref)  # pyright: ignore[reportArgumentType]
    await stages.reload_engines(session, ref, 1)  # pyright: ignore[reportCallIssue]
    await sample_prompts(session, iteration=0, round_index=0)  # pyright: ignore[reportCallIssue]


async def right(session: Session, ref: ArtifactRef) -> None:
    """The same calls as flows make them."""
    await stages.sample_prompts(session, iteration=0, round_index=0, before=None)
    await stages.score(session, iteration=0, round_index=0, prompts=ref, rollouts=[ref])
    await stages.filter_groups(session, iteration=0, round_index=0, prompts=[ref], scores=[ref])
    await stages.train(session, iteration=0, batch=ref)
    await stages.reload_engines(session, policy=ref, version=1)
    await sample_prompts(session, iteration=0, round_index=0, before=None)
