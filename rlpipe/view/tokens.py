"""A completion token by token: what each one says, and the numbers that it is coloured by."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tokenizers import Tokenizer

from rlpipe.records.rollout import Rollout

SURPRISE_MAX = 5.0  # nats at which a colour is full
PARTS_MAX = 8  # tokens of one character; after as many what cannot be read is shown as it is
UNREADABLE = "\ufffd"  # what is decoded of bytes that are no character, or none yet


@dataclass(frozen=True)
class ShownToken:
    """One token. `text` is empty where its bytes are only a part of a character: the token that completes it has it."""

    token: int
    text: str
    piece: str  # its name in the vocabulary
    logprob: float | None  # of the engine; None where nobody recorded it
    is_trained: bool
    version: int

    @property
    def surprise(self) -> float:
        """How unlikely it was: 0 for certain, 1 at SURPRISE_MAX nats or more."""
        return 0.0 if self.logprob is None else min(max(-self.logprob / SURPRISE_MAX, 0.0), 1.0)


def shown_tokens(rollout: Rollout, mask: list[int], tokenizer: Tokenizer) -> list[ShownToken]:
    """The tokens of a completion. `mask`: 1 where a token is trained."""
    versions = [span.version for span in rollout.weight_versions for _ in range(span.num_tokens)]
    tokens = rollout.completion_tokens.tolist()
    entries = zip(tokens, token_texts(tokens, tokenizer), rollout.rollout_logprobs.tolist(), mask, versions, strict=True)
    return [
        ShownToken(
            token, text, tokenizer.id_to_token(token) or "", logprob if math.isfinite(logprob) else None, bool(one), version
        )
        for token, text, logprob, one, version in entries
    ]


def token_texts(tokens: list[int], tokenizer: Tokenizer) -> list[str]:
    """What each token adds to the text; nothing where a later one completes its character."""
    texts = list[str]()
    before = start = 0  # tokens[before:start] are the last that were complete: a decoder looks at what is before
    for end in range(1, len(tokens) + 1):
        known = tokenizer.decode(tokens[before:start], skip_special_tokens=False)
        text = tokenizer.decode(tokens[before:end], skip_special_tokens=False)
        if text.endswith(UNREADABLE) and end < len(tokens) and end - start < PARTS_MAX:
            texts.append("")
        else:
            texts.append(text[len(known) :])
            before, start = start, end
    return texts
