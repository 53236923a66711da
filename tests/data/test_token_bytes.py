"""The bytes of tokens: joined they are the text, whatever the tokenizer, and wherever a character
lies in several tokens."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from rlpipe.data.token_bytes import TokenBytes
from tests.data.test_fewest_tokens import with_fallback
from tests.data.test_pieces import KINDS, tokenizer_of

TEXTS = st.text(
    alphabet=st.one_of(st.sampled_from("yo aN ▁<0xE>"), st.characters(exclude_categories=["Cs"])), max_size=12
)


def fallback(*parts: decoders.Decoder) -> Tokenizer:
    made = with_fallback()
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *parts])
    made.add_special_tokens(["</s>"])
    return made


def words(decoder: decoders.Decoder | None, *tokens: str) -> Tokenizer:
    vocab = {token: index for index, token in enumerate(tokens)}
    made = Tokenizer(models.WordPiece(vocab, unk_token=tokens[0]))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    if decoder is not None:
        made.decoder = decoder
    return made


def with_added() -> Tokenizer:
    """Added tokens, of which one has letters that stand for bytes, and one has others."""
    made = tokenizer_of("bytes")
    made.add_tokens([AddedToken("é", normalized=False), AddedToken("<|日本|>", normalized=False)])
    return made


TOKENIZERS: dict[str, Callable[[], Tokenizer]] = {
    **{kind: lambda kind=kind: tokenizer_of(kind) for kind in KINDS},
    "added": with_added,
    "llama 2": lambda: fallback(decoders.Strip(" ", 1, 0)),
    "gemma": fallback,
    "bert": lambda: words(decoders.WordPiece(), "[UNK]", "yo", "##y", "##o", "a", "."),
    "bpe": lambda: words(decoders.BPEDecoder(), "<unk>", "yo</w>", "y", "o</w>", "a</w>"),
    "no decoder": lambda: words(None, "<unk>", "yo", "y"),
}


@pytest.fixture(scope="module", params=TOKENIZERS)
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return TOKENIZERS[request.param]()


@settings(max_examples=150, deadline=None)
@given(numbers=st.lists(st.integers(0, 1 << 20), max_size=12), text=TEXTS)
@example(numbers=[], text="é日本🙂 yo")
@example(numbers=[5000, 5001], text="")
def test_the_bytes_of_tokens_are_those_of_their_text(numbers: list[int], text: str, tokenizer: Tokenizer) -> None:
    size = tokenizer.get_vocab_size()
    # two of them are of no token: an engine may sample such
    ids = [number % (size + 2) for number in numbers]
    for tokens in (ids, tokenizer.encode(text, add_special_tokens=False).ids):
        pieces, whole = TokenBytes(tokenizer)(tokens), tokenizer.decode(tokens, skip_special_tokens=False)
        assert len(pieces) == len(tokens)
        joined = b"".join(pieces)
        if "\ufffd" not in whole:
            assert joined == whole.encode()
        elif type(tokenizer.decoder).__name__ == "ByteLevel":
            assert joined.decode(errors="replace") == whole


@pytest.mark.parametrize("kind", ["bytes", "llama 2", "gemma"])
def test_a_character_of_several_tokens_has_its_bytes_in_them(kind: str) -> None:
    """Each was that of U+FFFD, three bytes."""
    tokenizer = TOKENIZERS[kind]()
    tokens = tokenizer.encode("🙂", add_special_tokens=False).ids
    assert [*filter(None, TokenBytes(tokenizer)(tokens))][-4:] == [b"\xf0", b"\x9f", b"\x99", b"\x82"]
    assert TokenBytes(tokenizer)(tokens[-2:]) == [b"\x99", b"\x82"], "a reply may begin in the midst of one"


def test_letters_of_bytes_are_those_of_the_library() -> None:
    made = Tokenizer(
        models.BPE(vocab={letter: index for index, letter in enumerate(pre_tokenizers.ByteLevel.alphabet())}, merges=[])
    )
    made.pre_tokenizer, made.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        decoders.ByteLevel(),
    )
    text = "".join(map(chr, range(0x800)))
    assert b"".join(TokenBytes(made)(made.encode(text).ids)) == text.encode()
