"""Conversations to rows: cuts and drops are counted."""

import logging

import pytest

from rlpipe.data.chat import ChatTokenizer
from rlpipe.data.conversations import tokenise_conversations
from rlpipe.data.new_tokenizer import build_tokenizer
from rlpipe.records.prompt import Talk


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    folder = tmp_path_factory.mktemp("tiny")
    build_tokenizer(["one", "two", "three"], folder)
    return ChatTokenizer.from_folder(folder)


def talk(prompt: str, completion: str) -> Talk:
    return Talk("rows.jsonl:1", [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}], [])


def test_rows_are_cut_dropped_and_counted(tokenizer: ChatTokenizer, caplog: pytest.LogCaptureFixture) -> None:
    # tokens: <|user|> p <|end|> <|assistant|> = 4 for a prompt of one letter
    conversations = [talk("p", "abcd"), talk("p", "abcdef"), talk("pppppp", "a"), talk("p", "b")]
    with caplog.at_level(logging.WARNING):
        rows, counts = tokenise_conversations(conversations, tokenizer, tokens_max=9)
    assert counts == {"truncated": 2, "dropped_empty_mask": 1}
    assert [len(row.tokens) for row in rows] == [9, 9, 6]
    assert [row.loss_mask.tolist() for row in rows] == [[0] * 4 + [1] * 5, [0] * 4 + [1] * 5, [0] * 4 + [1] * 2]
    assert rows[0].tokens[-1] == tokenizer.eos_token_id != rows[1].tokens[-1]
    assert "2 of 4" in caplog.text
    assert "model.context_tokens_max=9" in caplog.text


def test_nothing_to_warn_of(tokenizer: ChatTokenizer, caplog: pytest.LogCaptureFixture) -> None:
    rows, counts = tokenise_conversations([talk("p", "abcd")], tokenizer, tokens_max=9)
    assert (len(rows), counts, caplog.text) == (1, {"truncated": 0, "dropped_empty_mask": 0}, "")
