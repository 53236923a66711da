"""Who said what in stored rollouts: their tokens, and the run's own tokenizer."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache

from tokenizers import Tokenizer

from rlpipe.records.prompt import Messages
from rlpipe.records.rollout import Rollout
from rlpipe.records.turns import turns_of
from rlpipe.store.artifacts import read_file
from rlpipe.store.run import Run
from rlpipe.types import StoreError

Turns = Callable[[Rollout], Messages]


def stored_tokenizer(run: Run) -> Tokenizer:
    """What turns the run's tokens into text; StoreError when it is missing."""
    ref, manifest = run.committed("base", 0, "tokenizer")
    return _tokenizer(read_file(run.store, ref.folder, manifest.file("tokenizer.json")))


@lru_cache(maxsize=4)
def _tokenizer(data: bytes) -> Tokenizer:
    return Tokenizer.from_str(data.decode())


def turns_reader(run: Run) -> Turns:
    """What gives the turns of a run's rollouts, which a run with its `rl.agent` sampled. The tokenizer is read when a rollout of
    several turns comes, once; StoreError when it is missing."""
    tokenizer = cache(lambda: stored_tokenizer(run))

    def turns(rollout: Rollout) -> Messages:
        return turns_of(rollout, lambda tokens: tokenizer().decode(tokens, skip_special_tokens=True), bool(run.config.rl.agent))

    return turns


def turns_to_show(run: Run) -> Turns:
    """As `turns_reader`; where the tokenizer is missing, each completion is shown as one turn."""
    read = turns_reader(run)

    def turns(rollout: Rollout) -> Messages:
        try:
            return read(rollout)
        except StoreError:
            return [{"role": "assistant", "content": rollout.completion}]

    return turns
