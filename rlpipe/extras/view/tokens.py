"""A completion token by token: the text of each one, and the numbers that it is coloured by."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from tokenizers import Tokenizer

from rlpipe.base.errors import StoreError
from rlpipe.records.rollout import Rollout

SURPRISE_MAX = 5.0  # nats at which a colour is full
GAP_MAX = 0.2  # the same, of a gap
PARTS_MAX = 8  # tokens of one character; after as many what cannot be read is shown as it is
UNREADABLE = "\ufffd"  # what is decoded of bytes that are no character, or none yet


@dataclass(frozen=True)
class ShownToken:
    """One token.

    `text` is empty where its bytes are only a part of a character: it is then with the token that
    completes the character.
    """

    token: int
    text: str
    piece: str  # its name in the vocabulary
    logprob: float | None  # of the engine; None where it was not recorded
    is_trained: bool
    version: int
    # the trainer's logprob minus the engine's; None where it is not stored
    gap: float | None = None
    speaker: str = ""  # the role whose turn begins here, where there are several turns

    @property
    def apart(self) -> float:
        """1 where the trainer's logprob is higher by GAP_MAX nats or more, -1 where the engine's
        is.
        """
        return 0.0 if self.gap is None else min(max(self.gap / GAP_MAX, -1.0), 1.0)

    @property
    def surprise(self) -> float:
        """The surprise of the token: `min(-logprob / SURPRISE_MAX, 1)`, 0 for certain, 1 at
        SURPRISE_MAX nats or more; 0 where the logprob was not recorded.
        """
        return 0.0 if self.logprob is None else min(max(-self.logprob / SURPRISE_MAX, 0.0), 1.0)


def shown_tokens(
    rollout: Rollout,
    mask: list[int],
    tokenizer: Tokenizer,
    gaps: Sequence[float] | np.ndarray = (),
    speakers: Mapping[int, str] | None = None,
) -> list[ShownToken]:
    """The tokens of a completion.

    `mask`: 1 where a token is trained; `gaps`: one for each of these, or none at all; `speakers`:
    the token with which a turn begins -> its role. StoreError when the number of gaps does not fit.
    """
    if len(gaps) not in (0, sum(mask)):
        raise StoreError(f"gap.parquet has {len(gaps)} gaps of a rollout with {sum(mask)} trained tokens")
    lengths = [
        len(rollout.completion_tokens),
        len(rollout.rollout_logprobs),
        len(mask),
        sum(span.num_tokens for span in rollout.weight_versions),
    ]
    if len({*lengths}) > 1:
        raise StoreError(f"a rollout has {lengths} tokens, logprobs, entries of the mask and tokens of versions")
    versions = [span.version for span in rollout.weight_versions for _ in range(span.num_tokens)]
    tokens = rollout.completion_tokens.tolist()
    apart = np.full(len(tokens), np.nan)
    apart[np.flatnonzero(mask)[: len(gaps)]] = gaps
    logprobs = _known(rollout.rollout_logprobs)
    entries = zip(tokens, token_texts(tokens, tokenizer), logprobs, mask, versions, _known(apart), strict=True)
    return [
        ShownToken(
            token,
            text,
            tokenizer.id_to_token(token) or "",
            logprob,
            bool(one),
            version,
            gap,
            (speakers or {}).get(index, ""),
        )
        for index, (token, text, logprob, one, version, gap) in enumerate(entries)
    ]


def _known(values: np.ndarray) -> list[float | None]:
    return [value if math.isfinite(value) else None for value in values.tolist()]


def token_texts(tokens: list[int], tokenizer: Tokenizer) -> list[str]:
    """The text that each token adds; empty where a later token completes its character."""
    texts = list[str]()
    # tokens[before:start] are the last that were complete: a decoder looks at what is before
    before = start = 0
    for end in range(1, len(tokens) + 1):
        known = tokenizer.decode(tokens[before:start], skip_special_tokens=False)
        text = tokenizer.decode(tokens[before:end], skip_special_tokens=False)
        if text.endswith(UNREADABLE) and end < len(tokens) and end - start < PARTS_MAX:
            texts.append("")
        else:
            texts.append(text[len(known) :])
            before, start = start, end
    return texts
