"""Pieces of a conversation have the tokens that they have in the whole, whatever
the tokenizer puts before a text."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rlpipe.data.chat import ChatTokenizer

# a turn that ends with a token; the same where the assistant's head
# ends with a space; Llama 2's way
PLAIN = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ m.content }}</s>{% else %}<|u|>{{ m.content }}<|a|>"
    "{% endif %}{% endfor %}"
)
SPACED = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{% if m.role == 'assistant' %}</s>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
LLAMA2 = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ ' ' + m.content + ' </s>' }}{% else %}<s>[INST] "
    "{{ m.content }} [/INST]{% endif %}{% endfor %}"
)
LETTERS = "abcdefghijklmnopqrstuvwxyzYNABIST0123456789:/[]<>|_.'"
WORDS = ["▁Y", "▁Yo", "Yo", "▁y", "▁yo", "yo", "▁a", "▁N", "▁No", "No"]
MERGES = [
    ("▁", "Y"),
    ("▁Y", "o"),
    ("Y", "o"),
    ("▁", "y"),
    ("▁y", "o"),
    ("y", "o"),
    ("▁", "a"),
    ("▁", "N"),
    ("▁N", "o"),
    ("N", "o"),
]
KINDS = ["first", "always", "never", "prepend", "bytes", "bytes with a space", "unigram"]


def tokenizer_of(kind: str) -> Tokenizer:
    """A small tokenizer of each kind of space before a text."""
    vocab = {token: index for index, token in enumerate(["<unk>", "▁", *LETTERS, *WORDS])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=MERGES, unk_token="<unk>"))
    if kind in ("first", "always", "never"):
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=kind, split=False)
        tokenizer.decoder = decoders.Metaspace(prepend_scheme=kind, split=False)
    elif kind == "prepend":  # as Llama 2's tokenizer.json
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    elif kind == "unigram":  # as T5's
        tokenizer = Tokenizer(models.Unigram([(token, -1.0 / len(token)) for token in vocab], unk_id=0))
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(prepend_scheme="always")]
        )
        tokenizer.decoder = decoders.Metaspace()
    else:
        tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "Ġy", "Ġyo", "yo"]
        merges = [("Ġ", "y"), ("Ġy", "o"), ("y", "o")]
        tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=kind == "bytes with a space")
        tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(token, normalized=False, special=True) for token in ("<s>", "</s>", "<|u|>", "<|a|>")]
    )
    return tokenizer


def chat_of(kind: str, template: str) -> ChatTokenizer:
    return ChatTokenizer(tokenizer_of(kind), template, {"eos_token": "</s>", "bos_token": "<s>"})


def spoken(chat: ChatTokenizer, tokens: list[int]) -> list[str]:
    return [chat._tokenizer.id_to_token(token) for token in tokens]


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("said", ["yo", "a yo", " yo", "yo yo", "2"])
@pytest.mark.parametrize("template", [PLAIN, SPACED, LLAMA2])
def test_what_an_environment_says_is_the_tail_of_the_whole(kind: str, said: str, template: str) -> None:
    chat = chat_of(kind, template)
    talk = [user("hi"), assistant("Yo"), user(said)]
    whole = PreTrainedTokenizerFast(tokenizer_object=chat._tokenizer).apply_chat_template(
        talk, chat_template=template, add_generation_prompt=True, return_dict=True
    )["input_ids"]
    end = whole.index(chat.eos_token_id) + 1
    assert chat.encode_continuation(talk[2:]) == whole[end:]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("said", ["Yo", "No yo", "yo"])
@pytest.mark.parametrize("template", [PLAIN, SPACED, LLAMA2])
def test_loss_lies_on_all_that_is_said_after_the_prompt_that_is_sampled_from(
    kind: str, said: str, template: str
) -> None:
    chat = chat_of(kind, template)
    talk = [user("hi"), assistant(said)]
    prompt, (tokens, mask) = chat.encode_prompt(talk[:1]), chat.encode_conversation(talk)
    assert tokens[: len(prompt)] == prompt and mask == [0] * len(prompt) + [1] * (len(tokens) - len(prompt))
    assert chat.decode(tokens[len(prompt) :]).strip() == said and tokens[-1] == chat.eos_token_id


def test_the_tokens_one_by_one() -> None:
    def turn(kind: str, template: str) -> list[str]:
        tokens, mask = chat_of(kind, template).encode_conversation([user("a"), assistant("Yo a")])
        return spoken(chat_of(kind, template), [token for token, bit in zip(tokens, mask, strict=True) if bit])

    # the prompt has the space already; after a control token some tokenizers put one
    assert turn("always", SPACED) == turn("prepend", SPACED) == ["Yo", "▁a", "</s>"]
    assert turn("first", PLAIN) == ["Yo", "▁a", "</s>"] and turn("always", PLAIN) == ["▁Yo", "▁a", "</s>"]
    assert spoken(chat_of("first", PLAIN), chat_of("first", PLAIN).encode_continuation([user("yo")])) == [
        "<|u|>",
        "yo",
        "<|a|>",
    ]
    assert turn("first", LLAMA2) == ["▁Yo", "▁a", "▁", "</s>"]


@pytest.mark.parametrize("kind", KINDS)
def test_turns_one_after_another_are_the_conversation_for_any_tokenizer(kind: str) -> None:
    chat = chat_of(kind, PLAIN)
    talk = [user("hi"), assistant("Yo"), user("yo a"), assistant("No"), user("a"), assistant("Yo yo")]
    tokens, mask = chat.encode_conversation(talk)
    first, second = (chat.encode_continuation([talk[index]]) for index in (2, 4))
    text = spoken(chat, tokens)
    joined = " ".join(text)
    for told in (first, second):
        assert " ".join(spoken(chat, told)) in joined
    assert sum(mask) + len(chat.encode_prompt(talk[:1])) + len(first) + len(second) == len(tokens)
