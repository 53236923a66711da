"""Encodes a text piece by piece: each piece has the same tokens as within the whole text, and its
control tokens can be encoded as letters.
"""

from __future__ import annotations

import copy
import itertools
import json
import re
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from tokenizers import AddedToken, Encoding, Tokenizer

from rlpipe.base.errors import UserError
from rlpipe.data.fewest_tokens import FewestTokens

Span = tuple[int, int]  # characters, end exclusive
LONG_CHARS = 100_000  # takes about 0.1 s of processor time
BORDER = "[rlpipe border]"  # put before a piece as a control token, and cut off again


class TooLong(UserError):
    """The text is too long for any tokens, and was not encoded."""


class Encoder:
    """Encodes a text as the continuation of text that is encoded already.

    Many tokenizers put a space before a text (SentencePiece's), some before every part that follows
    a control token, some only before the first. A piece that is encoded alone would have a space
    that the whole text does not have.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self._added = {token_id: token.content for token_id, token in added.items()}
        self.specials = tuple(token.content for token in added.values() if token.special)
        self._any_added, self._any_special = any_of(self._added.values()), any_of(self.specials)

    def check_fits(self, text: str, tokens_max: int | None) -> None:
        """Raises TooLong when the number of characters shows that the text has at least
        `tokens_max` tokens.
        """
        if tokens_max is not None and len(text) >= LONG_CHARS and self._fewest(text) >= tokens_max:
            raise TooLong(
                f"a text of {len(text)} characters needs more than the {tokens_max} tokens that there is room for"
            )

    def encode(self, text: str, as_text: Sequence[Span] = (), before: Sequence[int] = ()) -> list[int]:
        """The tokens of `text` after the tokens `before`.

        Control tokens within the spans `as_text` are encoded as letters.
        """
        tokens, borders = [*before], [0, *(border for part in self._parts(text, as_text) for border in part), len(text)]
        for index, (start, end) in enumerate(itertools.pairwise(borders)):
            if start < end:
                tokens += (
                    self._letters(text[start:end], tokens) if index % 2 else self._following(text[start:end], tokens)
                )
        return tokens[len(before) :]

    def whole(self, text: str) -> tuple[list[int], list[Span]]:
        """The tokens of a text by itself, and the span of each."""
        encoding = _encoded(self._tokenizer, text)
        return encoding.ids, encoding.offsets

    def _parts(self, text: str, as_text: Sequence[Span]) -> list[Span]:
        """The spans to encode as letters, extended to the control tokens around them, as the text
        between two control tokens is encoded as one piece.
        """
        if not as_text:
            return []
        assert self._any_special is not None, "only control tokens are made letters"
        inside = [(start, end) for start, end in as_text if start < end]
        controls = [match.span() for match in self._any_special.finditer(text)]
        controls = [
            (start, end) for start, end in controls if not any(start < right and left < end for left, right in inside)
        ]
        parts: list[Span] = []
        for left, right in inside:
            start = max((end for _, end in controls if end <= left), default=0)
            end = min((start for start, _ in controls if start >= right), default=len(text))
            if not parts or parts[-1] != (start, end):
                parts.append((start, end))
        return parts

    def _following(self, text: str, before: list[int]) -> list[int]:
        """The tokens of a piece after the tokens `before`: after a control token as a part of its
        own, else as a continuation.
        """
        if not before:
            return self.whole(text)[0]
        if prefix := self._added.get(before[-1]):
            tokens = self.whole(prefix + text)[0]
            if tokens[:1] == before[-1:]:
                return tokens[1:]
        if self._going_on is self._tokenizer:
            return self.whole(text)[0]
        # it is a continuation only up to the next control token
        control = self._any_added and self._any_added.search(text)
        end = control.start() if control else len(text)
        rest = self.whole(text[end:])[0] if end < len(text) else []
        return _encoded(self._going_on, text[:end]).ids + rest

    def _letters(self, text: str, before: list[int]) -> list[int]:
        """As `_following`, with control tokens encoded as letters."""
        if BORDER in text:  # split in two, BORDER is text
            cut = text.index(BORDER) + 1
            first = self._letters(text[:cut], before)
            return first + self._letters(text[cut:], [*before, *first])
        if not before:
            return _encoded(self._spelling, text).ids
        if before[-1] in self._added:
            return _encoded(self._spelling, BORDER + text).ids[1:]
        return _encoded(self._spelling_on, text).ids

    @cached_property
    def _fewest(self) -> FewestTokens:
        return FewestTokens(self._tokenizer)

    @cached_property
    def _going_on(self) -> Tokenizer:
        """The tokenizer without the space that it puts before a text; itself if it puts none."""
        parts = (self._tokenizer.pre_tokenizer, self._tokenizer.normalizer)
        states = [json.loads(part.__getstate__()) for part in parts if part is not None]
        if states == [without_space(state) for state in states]:
            return self._tokenizer
        tree = json.loads(self._tokenizer.to_str())
        return Tokenizer.from_str(
            json.dumps(tree | {name: without_space(tree.get(name)) for name in ("pre_tokenizer", "normalizer")})
        )

    @cached_property
    def _spelling(self) -> Tokenizer:
        """The tokenizer without control tokens except BORDER."""
        return _spelling(self._tokenizer)

    @cached_property
    def _spelling_on(self) -> Tokenizer:
        """As `_spelling`, without the space before a text."""
        return self._spelling if self._going_on is self._tokenizer else _spelling(self._going_on)


def _encoded(tokenizer: Tokenizer, text: str) -> Encoding:
    """The tokens of a text.

    A long text is encoded as a batch, as the library releases the GIL only for batches.
    """
    if len(text) < LONG_CHARS:
        return tokenizer.encode(text, add_special_tokens=False)
    return tokenizer.encode_batch([text], add_special_tokens=False)[0]


def without_space(part: Any) -> Any:
    """The JSON of a normalizer or pre-tokenizer, changed to put no space before a text."""
    if isinstance(part, list):
        return [
            without_space(entry) for entry in part if not (isinstance(entry, dict) and entry.get("type") == "Prepend")
        ]
    if not isinstance(part, dict):
        return part
    if part.get("type") == "Prepend":
        return None
    without = {"prepend_scheme": "never", "add_prefix_space": False}
    return {
        name: without.get(name, without_space(value) if isinstance(value, (list, dict)) else value)
        for name, value in part.items()
    }


def _spelling(tokenizer: Tokenizer) -> Tokenizer:
    spelling = copy.deepcopy(tokenizer)
    spelling.encode_special_tokens = True
    spelling.add_tokens([AddedToken(BORDER, normalized=False)])
    return spelling


def any_of(contents: Any) -> re.Pattern[str] | None:
    """The pattern that matches any of these texts, the longest first; None without texts."""
    ordered = sorted(filter(None, contents), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, ordered))) if ordered else None
