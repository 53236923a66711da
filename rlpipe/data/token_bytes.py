"""The bytes that each token stands for: a character may lie in several tokens, none of which is
text by itself.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer

# bytes that byte-level BPE writes as the letter of that number
PRINTED = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
OTHERS = [byte for byte in range(0x100) if byte not in PRINTED]  # and those for which it takes the letters from 256 on
BYTES = {chr(byte): byte for byte in PRINTED} | {chr(0x100 + index): byte for index, byte in enumerate(OTHERS)}
FALLBACK = re.compile("<0x([0-9A-F]{2})>")


class TokenBytes:
    """Gives the bytes that the tokens of a text stand for. Joined they are the UTF-8 of the text
    that the tokenizer's decoder makes of the tokens, where that is text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        decoder = tokenizer.decoder
        kinds = [] if decoder is None else _kinds(json.loads(decoder.__getstate__()))
        self._is_byte_level, self._falls_back = kinds == ["ByteLevel"], "ByteFallback" in kinds

    def __call__(self, tokens: Sequence[int]) -> list[bytes]:
        """The bytes of each token; none of an id that is no token."""
        pieces: list[bytes] = []
        before: list[int] = []  # the token before, on which it depends whether a space is written
        for token in tokens:
            name = self._tokenizer.id_to_token(token)
            pieces.append(b"" if name is None else self._bytes(before, token, name))
            before = before if name is None else [token]
        return pieces

    def _bytes(self, before: list[int], token: int, name: str) -> bytes:
        if self._is_byte_level:
            known = [BYTES.get(letter) for letter in name]
            return name.encode() if None in known else bytes(byte for byte in known if byte is not None)
        fallback = FALLBACK.fullmatch(name) if self._falls_back else None
        if fallback and (before or int(fallback[1], 16) >= 0x80):  # a space at the beginning may be left out
            return bytes.fromhex(fallback[1])
        return self._text([*before, token])[len(self._text(before)) :].encode()

    def _text(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=False)


def _kinds(state: Any) -> list[str]:
    """The kinds of decoders that a decoder is made of."""
    if state["type"] != "Sequence":
        return [state["type"]]
    return [kind for inner in state["decoders"] for kind in _kinds(inner)]
