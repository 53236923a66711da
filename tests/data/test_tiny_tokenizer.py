"""The tiny tokenizer: the instruction is a few tokens, the words are
spelled, transformers reads it too."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlpipe.data.chat import ChatTokenizer
from rlpipe.data.new_tokenizer import build_tokenizer

INSTRUCTION = "Spell this word backward (example: sun -> nus): "
WORDS = ["ammonia", "splat", "canroyer", "Brodiaea", "this", "excusing"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    build_tokenizer([INSTRUCTION + word for word in WORDS], path)
    return path


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> ChatTokenizer:
    return ChatTokenizer.from_folder(folder)


def prompt(word: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": INSTRUCTION + word}]


def test_sizes(tokenizer: ChatTokenizer) -> None:
    assert 256 < tokenizer.vocab_size < 300
    assert len(tokenizer.encode_prompt(prompt("canroyer"))) <= 24
    _, mask = tokenizer.encode_conversation(
        [*prompt("strawberry"), {"role": "assistant", "content": "<answer>yrrebwarts</answer>"}]
    )
    assert sum(mask) == 13
    assert tokenizer.eos_token_id != tokenizer.pad_token_id


def test_data_words_are_spelled_and_answers_survive_decoding(tokenizer: ChatTokenizer) -> None:
    empty = len(tokenizer.encode_prompt(prompt("")))
    assert len(tokenizer.encode_prompt(prompt("zebra"))) == empty + len("zebra")
    messages = [*prompt("sun"), {"role": "assistant", "content": "<answer>nus</answer>"}]
    tokens, mask = tokenizer.encode_conversation(messages)
    completion = [token for token, bit in zip(tokens, mask, strict=True) if bit]
    assert completion[-1] == tokenizer.eos_token_id
    assert tokenizer.decode(completion) == "<answer>nus</answer>"


@given(st.text().filter(lambda text: "<|" not in text))
def test_any_text_comes_back(tokenizer: ChatTokenizer, text: str) -> None:
    tokens, mask = tokenizer.encode_conversation(
        [{"role": "user", "content": "x"}, {"role": "assistant", "content": text}]
    )
    assert tokenizer.decode([token for token, bit in zip(tokens, mask, strict=True) if bit]) == text


def test_same_texts_same_files(folder: Path, tmp_path: Path) -> None:
    build_tokenizer([INSTRUCTION + word for word in reversed(WORDS)], tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / name).read_bytes() == (folder / name).read_bytes()


def test_transformers_agrees(folder: Path, tokenizer: ChatTokenizer, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(str(folder))
    text = loaded.apply_chat_template(prompt("splat"), add_generation_prompt=True, tokenize=False)
    assert loaded(text, add_special_tokens=False).input_ids == tokenizer.encode_prompt(prompt("splat"))
    assert (loaded.eos_token_id, loaded.pad_token_id, len(loaded)) == (
        tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.vocab_size,
    )  # fmt: skip
    loaded.save_pretrained(str(tmp_path))
    again = ChatTokenizer.from_folder(tmp_path)
    assert again.encode_prompt(prompt("splat")) == tokenizer.encode_prompt(prompt("splat"))
