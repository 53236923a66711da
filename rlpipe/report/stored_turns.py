"""The turns of stored rollouts, from their tokens and the run's own tokenizer."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from functools import cache, lru_cache
from pathlib import Path

from tokenizers import Tokenizer

from rlpipe.base.errors import StoreError, UserError
from rlpipe.data.chat import ChatTokenizer
from rlpipe.data.tokenizer_files import BESIDE, add_tokens
from rlpipe.records.prompt import Messages
from rlpipe.records.rollout import Rollout
from rlpipe.records.turns import Decode, turns_of
from rlpipe.store.artifacts import read_file
from rlpipe.store.local_copy import materialise
from rlpipe.store.run import Run

Turns = Callable[[Rollout], Messages]


def stored_tokenizer(run: Run) -> Tokenizer:
    """The tokenizer that turns the run's tokens into text; StoreError when it is missing."""
    ref, manifest = run.committed("base", 0, "tokenizer")
    beside = [record for record in manifest.files if record.plain_name in BESIDE]
    data = read_file(run.store, ref.folder, manifest.file("tokenizer.json"))
    return _tokenizer(data, tuple((record.plain_name, read_file(run.store, ref.folder, record)) for record in beside))


@lru_cache(maxsize=4)
def _tokenizer(data: bytes, beside: tuple[tuple[str, bytes], ...]) -> Tokenizer:
    tokenizer = Tokenizer.from_str(data.decode())
    add_tokens(tokenizer, {name: json.loads(document) for name, document in beside})
    return tokenizer


def _decoder(run: Run) -> Decode:
    """The function by which the run's rewards read tokens as text; StoreError when the tokenizer is
    missing."""
    source, _ = run.committed("base", 0, "tokenizer")
    model = run.config.model
    with tempfile.TemporaryDirectory() as name:
        folder = materialise(run.store, source, Path(name) / "tokenizer")
        return ChatTokenizer.from_folder(
            folder, model.chat_template, model.chat_template_args, model.control_tokens
        ).decode


def turns_reader(run: Run) -> Turns:
    """Returns a function from a rollout of this run to its turns, which its `rl.agent` may have
    made. It reads the tokenizer once, at the first rollout of several turns; StoreError when it is
    missing.
    """
    decode = cache(lambda: _decoder(run))

    def turns(rollout: Rollout) -> Messages:
        return turns_of(rollout, lambda tokens: decode()(tokens), bool(run.config.rl.agent))

    return turns


def turns_to_show(run: Run) -> Turns:
    """As `turns_reader`; where the tokenizer is missing, each completion is shown as one turn."""
    read = turns_reader(run)

    def turns(rollout: Rollout) -> Messages:
        try:
            return read(rollout)
        except (StoreError, UserError):
            return [{"role": "assistant", "content": rollout.completion}]

    return turns
