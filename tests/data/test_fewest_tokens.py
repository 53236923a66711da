"""What is refused for its characters would be refused for its tokens, wherever the bound is exact;
and where it is not, that is known."""

from __future__ import annotations

from typing import Any

import aiohttp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

from rlpipe.data import encoding
from rlpipe.data.chat import ChatTokenizer
from rlpipe.data.encoding import TooLong
from rlpipe.data.fewest_tokens import ASSUMED_CHARS, FewestTokens
from rlpipe.extras.agents.rollout import AgentRollout
from tests.agent_world import ANSWER, SpokenPool, door_of, rollout_of, tokenizer_in
from tests.data.test_pieces import KINDS, tokenizer_of

PIECES = ["a", "yo", " yo", "Yo", "▁", " ", "  ", "\n", "\t", "é", "e\u0301", "\u0301", "ᾂ",
          "α\u0313\u0300\u0345", "한", "ﬁ", "İ", "😀",
          "\U0010ffff", "\x00", "\x04", "\x1d", "\u200b", "<s>", "<|u|>", "ab", "'", "中", "[rlpipe border]",
          "longest", "-" * 40]  # fmt: skip
TEXTS = st.lists(st.tuples(st.sampled_from(PIECES) | st.text(max_size=8), st.integers(1, 30)), max_size=6).map(
    lambda parts: "".join(piece * times for piece, times in parts)
)


def of_bytes(without: str = "", *merged: str) -> Tokenizer:
    """A byte-level one; `without`: letters that it has not."""
    letters = [letter for letter in sorted(pre_tokenizers.ByteLevel.alphabet()) if letter not in without]
    merges = [(word[:end], word[end]) for word in merged for end in range(1, len(word))]
    tokens = dict.fromkeys([*letters, *(left + right for left, right in merges)])
    made = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return made


def with_fallback(*, fuse_unk: bool = True, all_bytes: bool = True) -> Tokenizer:
    """As Gemma's and Llama 2's: what has no token is written as bytes."""
    tokens = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256 if all_bytes else 128)), "▁", "y", "o", "yo", "▁yo"]
    vocab = {token: index for index, token in enumerate(tokens)}
    made = Tokenizer(
        models.BPE(
            vocab=vocab, merges=[("y", "o"), ("▁", "yo")], unk_token="<unk>", fuse_unk=fuse_unk, byte_fallback=True
        )
    )
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return made


def changed(
    made: Tokenizer, normalizer: normalizers.Normalizer | None = None, added: AddedToken | None = None
) -> Tokenizer:
    if normalizer is not None:
        made.normalizer = normalizer
    if added is not None:
        made.add_tokens([added])
    return made


def words(kind: str) -> Tokenizer:
    made = Tokenizer(models.WordPiece({"[UNK]": 0, "yo": 1}, unk_token="[UNK]"))
    if kind == "bert":
        made.normalizer, made.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    return made


COMPOSED = normalizers.Sequence([normalizers.NFD(), normalizers.NFC()])
EXACT = {
    **{kind: tokenizer_of(kind) for kind in KINDS if kind != "unigram"},
    "bytes and words": of_bytes("", "longest", "-" * 40),
    "some control bytes": of_bytes("ĄĆĝ"),  # as SmolLM2's, which leaves them out
    "fallback": with_fallback(),
    "composed": changed(of_bytes("", "longest"), COMPOSED),
    "composed and lower": changed(of_bytes(), normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])),
    "replaced": changed(of_bytes(), normalizers.Replace("ab", "c")),
    "a long added token": changed(of_bytes(), added=AddedToken("a" * 300)),
}
UNBOUNDED = {  # with a text that has few tokens, however long it is
    "unigram": (tokenizer_of("unigram"), "中" * 10_000),
    "a word": (words(""), "x" * 10_000),
    "bert": (words("bert"), "\u200b" * 10_000),
    "unknown fused": (with_fallback(all_bytes=False), "\U0010ffff" * 10_000),
    "stripped": (changed(of_bytes(), normalizers.Strip()), " " * 10_000),
    "collapsed": (changed(of_bytes(), normalizers.Replace(Regex(" {2,}"), " ")), " " * 10_000),
    "removed": (changed(of_bytes(), normalizers.Replace("a", "")), "a" * 10_000),
    "a greedy token": (changed(of_bytes(), added=AddedToken("<mask>", lstrip=True)), " " * 10_000 + "<mask>"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", EXACT)
@settings(max_examples=40)
@given(text=TEXTS)
def test_no_text_has_less_tokens_than_its_characters_say(name: str, text: str) -> None:
    fewest = FewestTokens(EXACT[name])
    assert fewest.exact and fewest(text) <= len(EXACT[name].encode(text, add_special_tokens=False).ids)


@pytest.mark.parametrize("name", UNBOUNDED)
def test_where_a_token_stands_for_any_number_of_characters_so_many_are_assumed(name: str) -> None:
    made, text = UNBOUNDED[name]
    fewest = FewestTokens(made)
    assert not fewest.exact and fewest.chars_of_one == max(ASSUMED_CHARS, *map(len, made.get_vocab()))
    assert (
        len(made.encode(text, add_special_tokens=False).ids) <= 2 and fewest(text) == len(text) // fewest.chars_of_one
    )


@settings(max_examples=40)
@given(text=TEXTS, tokens_max=st.integers(1, 200))
def test_what_is_refused_by_characters_is_refused_by_tokens(text: str, tokens_max: int) -> None:
    """Also piece by piece, and where control tokens are letters."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(encoding, "LONG_CHARS", 0)
        for made in EXACT.values():
            encoder = encoding.Encoder(made)
            try:
                encoder.check_fits(text, tokens_max)
            except TooLong:
                letters = [(0, len(text))] if encoder.specials else []
                for before in ([], [1]):
                    assert len(encoder.encode(text, before=before)) >= tokens_max
                    assert len(encoder.encode(text, letters, before=before)) >= tokens_max


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    return tokenizer_in(tmp_path_factory.mktemp("tokenizer"))


async def refusals(rollout: AgentRollout, *talks: list[Any]) -> list[tuple[int, Any]]:
    """How a rollout answers calls in both wire forms."""
    found = []
    async with (
        door_of(rollout) as door,
        aiohttp.ClientSession(headers={"Authorization": f"Bearer {door.api_key}"}) as session,
    ):
        for talk in talks:
            for path, more in (("/chat/completions", {}), ("/messages", {"max_tokens": 4})):
                async with session.post(door.base_url + path, json={"messages": talk, **more}) as answer:
                    found.append((answer.status, await answer.json()))
    return found


async def test_a_message_that_cannot_fit_is_refused_alike_and_unread_by_the_tokenizer(
    tokenizer: ChatTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    real = encoding._encoded
    monkeypatch.setattr(encoding, "_encoded", lambda made, text: read.append(len(text)) or real(made, text))
    said, chars = [], 2 * encoding.LONG_CHARS
    for size in (1000, chars):  # too long for its tokens, and for its characters
        pool = SpokenPool(tokenizer)
        pool.texts = [ANSWER]
        begun = [{"role": "user", "content": "Calculate 3*4"}]
        async with door_of(rollout := rollout_of(pool)) as door, aiohttp.ClientSession() as session:
            call = {"json": {"messages": begun}, "headers": {"Authorization": f"Bearer {door.api_key}"}}
            async with session.post(f"{door.base_url}/chat/completions", **call) as answer:  # type: ignore[arg-type]
                reply = (await answer.json())["choices"][0]["message"]
        long = {"role": "user", "content": "+".join(["12"] * (size // 3))}
        said.append(await refusals(rollout, [long], [*begun, {"role": "assistant", "content": reply["content"]}, long]))
        assert rollout.finish_reason == "length" and len(rollout.conversation.nodes) == 1
    assert said[0] == said[1] and {status for status, _ in said[0]} == {400}
    assert (
        said[0][0][1]["error"]["code"] == "context_length_exceeded"
        and "400 tokens" in said[0][0][1]["error"]["message"]
    )
    assert max(read) < chars // 2


async def test_a_call_that_is_refused_uses_up_no_turn(tokenizer: ChatTokenizer) -> None:
    rollout = rollout_of(SpokenPool(tokenizer, [ANSWER, ANSWER]), calls=2)
    long, short = [{"role": "user", "content": "1" * 2 * encoding.LONG_CHARS}], [{"role": "user", "content": "1"}]
    answers = await refusals(rollout, long, long, short, short)
    assert [answer["error"].get("code") for _, answer in answers[:4:2]] == ["context_length_exceeded"] * 2
    assert [status for status, _ in answers] == [400] * 4 + [200] * 2 + [400] * 2
    assert "rl.turns_max=2" in answers[-1][1]["error"]["message"] and rollout.finish_reason == "turns"
