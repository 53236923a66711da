"""Tokens that only the files beside tokenizer.json add have the ids that transformers gives them,
or are refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from rlpipe.base.errors import UserError
from rlpipe.data.chat import ChatTokenizer
from tests.data.test_chat import CHATML, make, raw

NEXT = make(CHATML).vocab_size
PLAIN = {
    "content": "<tool>",
    "lstrip": False,
    "normalized": False,
    "rstrip": False,
    "single_word": False,
    "special": False,
}
THINK = PLAIN | {"content": "[THINK]", "special": True}
BASE = {
    "eos_token": "<|im_end|>",
    "pad_token": "<|pad|>",
    "chat_template": CHATML,
    "tokenizer_class": "PreTrainedTokenizerFast",
}
TALK = [
    {"role": "user", "content": "a <tool> b[THINK]c <mine> </tool>"},
    {"role": "assistant", "content": "[THINK]hm <tool>  x"},
]


def folder_with(folder: Path, files: dict[str, Any]) -> Path:
    make(CHATML)._tokenizer.save(str(folder / "tokenizer.json"))
    files = {"tokenizer_config.json": {}} | files
    for name, tree in files.items():
        (folder / name).write_text(json.dumps(tree | BASE if name == "tokenizer_config.json" else tree))
    return folder


CASES: dict[str, dict[str, Any]] = {
    "none": {},
    "decoder": {"tokenizer_config.json": {"added_tokens_decoder": {str(NEXT): PLAIN, str(NEXT + 1): THINK}}},
    "decoder that takes spaces": {
        "tokenizer_config.json": {"added_tokens_decoder": {str(NEXT): PLAIN | {"lstrip": True, "rstrip": True}}}
    },
    "decoder, and others that do not count": {
        "tokenizer_config.json": {"added_tokens_decoder": {str(NEXT): THINK}},
        "added_tokens.json": {"<tool>": NEXT + 1},
    },
    "added_tokens.json": {"added_tokens.json": {"[THINK]": NEXT + 1, "<tool>": NEXT}},
    "of which one is special": {
        "added_tokens.json": {"[THINK]": NEXT, "<tool>": NEXT + 1},
        "special_tokens_map.json": {"additional_special_tokens": ["[THINK]"]},
    },
    "map, a list": {"special_tokens_map.json": {"additional_special_tokens": ["[THINK]", "<mine>"]}},
    "map, records": {"special_tokens_map.json": {"unk_token": {"content": "[THINK]", "lstrip": True, "special": True}}},
    "config, a list": {"tokenizer_config.json": {"additional_special_tokens": ["[THINK]"]}},
    "config, a name": {"tokenizer_config.json": {"unk_token": "<mine>", "think_token": "[THINK]"}},
    "config, names": {"tokenizer_config.json": {"extra_special_tokens": {"think_token": "[THINK]"}}},
    "one that is a token of the model already": {
        "added_tokens.json": {"ĊĊ": make(CHATML)._tokenizer.token_to_id("ĊĊ")}
    },
    "other flags of a known one": {
        "tokenizer_config.json": {
            "added_tokens_decoder": {str(NEXT - 1): THINK | {"content": "<|system|>", "rstrip": True}}
        }
    },
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_ids_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    folder = folder_with(tmp_path, CASES[name])
    chat, other = ChatTokenizer.from_folder(folder, control_tokens="as_written"), AutoTokenizer.from_pretrained(folder)
    assert chat.vocab_size == len(other)
    assert chat.encode_conversation(TALK)[0] == other.apply_chat_template(TALK, return_dict=True)["input_ids"]
    text = "<tool> a[THINK]<mine>\n\n<|system|>  b"
    assert chat._encoder.encode(text) == other(text, add_special_tokens=False).input_ids
    for token in ("<tool>", "[THINK]", "<mine>"):
        assert (chat._tokenizer.token_to_id(token) is not None) == (token in other.get_vocab())


def test_one_with_another_id_is_refused_by_name(tmp_path: Path) -> None:
    folder_with(tmp_path, {"added_tokens.json": {"<tool>": NEXT + 5}})
    with pytest.raises(
        UserError, match=rf"added_tokens\.json says that '<tool>' is token {NEXT + 5}, but .* it is {NEXT}"
    ):
        ChatTokenizer.from_folder(tmp_path)
    folder_with(tmp_path, {"tokenizer_config.json": {"added_tokens_decoder": {"3": PLAIN}}})
    with pytest.raises(UserError, match=r"added_tokens_decoder says that '<tool>' is token 3"):
        ChatTokenizer.from_folder(tmp_path)


@pytest.mark.parametrize(
    "broken",
    [{"added_tokens_decoder": {"x": PLAIN}}, {"added_tokens_decoder": [1]}, {"added_tokens_decoder": {"9": 5}}],
)
def test_what_is_no_list_of_tokens_is_refused(broken: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="added_tokens_decoder is not understood"):
        ChatTokenizer.from_folder(folder_with(tmp_path, {"tokenizer_config.json": broken}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(BASE))
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<tool>": "many"}))
    with pytest.raises(UserError, match="'<tool>' has the id 'many'"):
        ChatTokenizer.from_folder(tmp_path)


def test_one_that_the_model_has_no_embedding_for_is_refused(tmp_path: Path) -> None:
    folder_with(tmp_path, CASES["decoder"])
    for config in ({"vocab_size": NEXT + 1}, {"text_config": {"vocab_size": NEXT + 1}}):
        (tmp_path / "config.json").write_text(json.dumps(config))
        with pytest.raises(
            UserError, match=rf"add '\[THINK\]' as token {NEXT + 1}, and the model has embeddings of {NEXT + 1} tokens"
        ):
            ChatTokenizer.from_folder(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": NEXT + 2}))
    assert ChatTokenizer.from_folder(tmp_path).vocab_size == NEXT + 2
    folder_with(
        tmp_path, {"tokenizer_config.json": {}}
    )  # a tokenizer.json with more tokens than the model has is the model's own
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 10}))
    assert ChatTokenizer.from_folder(tmp_path).vocab_size == NEXT


def test_added_tokens_are_trained_and_sampled_as_one(tmp_path: Path) -> None:
    chat = ChatTokenizer.from_folder(folder_with(tmp_path, CASES["decoder"]))
    tokens, mask = chat.encode_conversation(TALK)
    said = [token for token, bit in zip(tokens, mask, strict=True) if bit]
    assert raw(chat, said) == "[THINK]hm <tool>  x<|im_end|>" and said[0] == NEXT + 1 and NEXT in said
    assert Tokenizer.from_file(str(tmp_path / "tokenizer.json")).token_to_id("<tool>") is None
