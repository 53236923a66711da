"""A lower bound of the number of tokens of a text, computed without encoding it. So a text that
cannot fit is refused at once: encoding takes a second of processor time per megabyte.
"""

from __future__ import annotations

import json
from collections.abc import Container
from typing import Any

from tokenizers import Tokenizer, models
from tokenizers.pre_tokenizers import ByteLevel

# characters assumed per token where there is no bound: WordPiece makes one token of a word of
# 10,000 letters
ASSUMED_CHARS = 128
# NFC and NFKC compose at most so many characters to one; at most one of them is ASCII
COMPOSED_CHARS = 4
COMPOSING, LENGTHENING = ("NFC", "NFKC"), ("NFD", "NFKD", "Lowercase", "Prepend", "ByteLevel")  # normalizers
# pre-tokenizers that drop no characters
KEEPING = ("ByteLevel", "Metaspace", "Digits", "UnicodeScripts")


class FewestTokens:
    """A lower bound of the tokens of a text: its number of characters divided by the characters of
    the longest token.

    `exact`: it holds for every text. Otherwise ASSUMED_CHARS is assumed, and the bound may be too
    high: for a tokenizer that drops characters, or makes one unknown token of any number of
    characters.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        normalizers, pre_tokenizers = _flat(tokenizer.normalizer), _flat(tokenizer.pre_tokenizer)
        takes_spaces = any(token.lstrip or token.rstrip for token in tokenizer.get_added_tokens_decoder().values())
        replaced = _replaced(normalizers)
        dropped = _dropped(tokenizer, any(one["type"] == "ByteLevel" for one in (*normalizers, *pre_tokenizers)))
        keeps_all = all(map(_keeps_all, pre_tokenizers)) and not takes_spaces
        self.exact = keeps_all and replaced is not None and dropped is not None and not (dropped and normalizers)
        self._composes = any(one["type"] in COMPOSING for one in normalizers)
        self._dropped = dropped or ""
        longest = max(map(len, tokenizer.get_vocab(with_added_tokens=True)), default=1)
        self.chars_of_one = (replaced or 1) * (longest if self.exact else max(longest, ASSUMED_CHARS))

    def __call__(self, text: str) -> int:
        length = len(text)
        if self._composes and not text.isascii():
            length = max(len(text.encode("ascii", "ignore")), length // COMPOSED_CHARS)
        return (length - sum(map(text.count, self._dropped))) // self.chars_of_one


def _replaced(normalizers: list[Any]) -> int | None:
    """The largest number of characters that normalizers replace by one, without composition; None
    where there is no bound.
    """
    replaced, composes = 1, any(one["type"] in COMPOSING for one in normalizers)
    for one in normalizers:
        match one:
            case {"type": "Replace", "pattern": {"String": str(pattern)}, "content": str(content)} if content:
                # it may be an accent, which is composed with a further ASCII character
                if composes and not content.isascii():
                    return None
                replaced *= max(1, -(-len(pattern) // len(content)))
            case _ if one["type"] not in (*COMPOSING, *LENGTHENING):
                return None
    return replaced


def _keeps_all(pre_tokenizer: Any) -> bool:
    """True when a pre-tokenizer drops no character."""
    if pre_tokenizer["type"] in ("Split", "Punctuation"):
        return pre_tokenizer["behavior"] != "Removed"
    return pre_tokenizer["type"] in KEEPING


def _dropped(tokenizer: Tokenizer, writes_bytes: bool) -> str | None:
    """The ASCII characters without a token, which are dropped; None where others may be dropped, or
    one unknown token may stand for many.

    `writes_bytes`: the model gets each byte as a letter.
    """
    model, known = tokenizer.model, tokenizer.get_vocab(with_added_tokens=False)
    if not isinstance(model, models.BPE):
        return None
    if model.byte_fallback and all(f"<0x{byte:02X}>" in known for byte in range(256)):
        return ""
    if model.unk_token in known:
        return None if model.fuse_unk else ""
    if model.unk_token is None and writes_bytes:
        return _without_letter(known)
    return None


def _without_letter(known: Container[str]) -> str | None:
    """The ASCII characters whose byte has no letter; None where a last byte of other characters has
    none.
    """

    def has_letter(char: str) -> bool:
        return ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(char)[0][0][-1] in known

    if not all(map(has_letter, map(chr, range(0x80, 0xC0)))):
        return None
    return "".join(char for char in map(chr, range(0x80)) if not has_letter(char))


def _flat(part: Any) -> list[Any]:
    """The flat list of the normalizers, or pre-tokenizers, in a part of a tokenizer, as JSON."""
    return [] if part is None else _leaves(json.loads(part.__getstate__()))


def _leaves(state: Any) -> list[Any]:
    if state["type"] != "Sequence":
        return [state]
    return [leaf for inner in state.get("normalizers", state.get("pretokenizers")) for leaf in _leaves(inner)]
