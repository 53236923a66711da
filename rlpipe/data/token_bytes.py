"""The bytes of each token: a character may span several tokens, none of which is valid text
alone.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer

# bytes that byte-level BPE writes as the character with the same number
PRINTED = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
# bytes that it writes as the characters from 256 on
OTHERS = [byte for byte in range(0x100) if byte not in PRINTED]
BYTES = {chr(byte): byte for byte in PRINTED} | {chr(0x100 + index): byte for index, byte in enumerate(OTHERS)}
FALLBACK = re.compile("<0x([0-9A-F]{2})>")


class TokenBytes:
    """Maps the tokens of a text to bytes. Joined they are the UTF-8 of the tokenizer's decoded
    text, if that is valid text.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        decoder = tokenizer.decoder
        kinds = [] if decoder is None else _kinds(json.loads(decoder.__getstate__()))
        self._is_byte_level, self._falls_back = kinds == ["ByteLevel"], "ByteFallback" in kinds

    def __call__(self, tokens: Sequence[int]) -> list[bytes]:
        """The bytes of each token; empty for an id without a token."""
        pieces: list[bytes] = []
        before: list[int] = []  # the previous token, on which a leading space depends
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
        if fallback and (before or int(fallback[1], 16) >= 0x80):  # a leading space may be dropped
            return bytes.fromhex(fallback[1])
        return self._text([*before, token])[len(self._text(before)) :].encode()

    def _text(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=False)


def _kinds(state: Any) -> list[str]:
    """The types of the decoders in a decoder."""
    if state["type"] != "Sequence":
        return [state["type"]]
    return [kind for inner in state["decoders"] for kind in _kinds(inner)]
