"""What both phases start from."""

from __future__ import annotations

from rlpipe.stages.session import Session
from rlpipe.types import StageResult
from tasks.stages import prepare_model, prepare_probe, prepare_tokenizer


async def prepare(session: Session) -> StageResult:
    """Commits tokenizer and base model when they are not; returns the tokenizer."""
    tokenizer = await prepare_tokenizer(session)
    base = await prepare_model(session, tokenizer=tokenizer.ref)
    if session.config.model.path:
        await prepare_probe(session, policy=base.ref)
    return tokenizer
