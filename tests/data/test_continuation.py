"""What an environment says, as tokens that follow the policy's: the conversation of whole
turns has the very same tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlpipe.base.errors import UserError
from rlpipe.data.chat import ChatTokenizer
from rlpipe.data.new_tokenizer import CHAT_TEMPLATE, build_tokenizer
from tests.data.test_chat import CHATML, LLAMA3, MARKED, QWEN3, TEXT, make, raw

ENDS = {CHATML: "<|im_end|>", LLAMA3: "<|eot_id|>", CHAT_TEMPLATE: "<|end|>", MARKED: "<|im_end|>", QWEN3: "<|im_end|>"}
STRICT = (  # as many templates do: a user's turn and an assistant's turn, no other way
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>{% endif %}"
)
SILENT = "{% for m in messages if m.role != 'tool' %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
COUNTING = (
    "{% for m in messages %}<|im_start|>{{ loop.index }}{{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>{% endif %}"
)


def talk(texts: list[str]) -> list[dict[str, Any]]:
    """user, assistant, tool, assistant, tool, ..."""
    roles = ["user", *("assistant" if index % 2 == 0 else "tool" for index in range(len(texts) - 1))]
    return [{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)]


@given(st.lists(TEXT, min_size=4, max_size=8).filter(lambda texts: len(texts) % 2 == 0))
@pytest.mark.parametrize("template", [CHATML, LLAMA3, CHAT_TEMPLATE, MARKED])
def test_turns_one_after_another_are_the_conversation(template: str, texts: list[str]) -> None:
    tokenizer, messages = make(template, ENDS[template]), talk(texts)
    tokens, mask = tokenizer.encode_conversation(messages)
    mine = tokenizer.encode_prompt(messages[:1])
    my_mask = [0] * len(mine)
    for index in range(1, len(messages), 2):
        text = messages[index]["content"]
        said = tokenizer._encoder.encode((text.strip() if template == LLAMA3 else text) + ENDS[template])
        told = tokenizer.encode_continuation(messages[index + 1 : index + 2]) if index + 1 < len(messages) else []
        mine += said + told
        my_mask += [1] * len(said) + [0] * len(told)
    tail = len(tokens) - len(mine)  # line breaks after the last turn, which nobody sampled
    assert tokens[: len(mine)] == mine and mask[: len(mine)] == my_mask and not any(mask[len(mine) :]) and tail <= 1


@pytest.mark.parametrize(
    ("template", "text"),
    [
        (CHATML, "\n<|im_start|>tool\n148<|im_end|>\n<|im_start|>assistant\n"),
        (
            LLAMA3,
            (
                "<|start_header_id|>tool<|end_header_id|>\n\n"
                "148<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
            ),
        ),
        (QWEN3, "\n<|im_start|>tool\n148<|im_end|>\n<|im_start|>assistant\n"),
        (CHAT_TEMPLATE, "<|tool|>148<|end|><|assistant|>"),
        (MARKED, "[U]148\n[A]"),
    ],
)
def test_it_holds_what_the_template_writes_between_turns(template: str, text: str) -> None:
    tokenizer = make(template, ENDS[template])
    assert raw(tokenizer, tokenizer.encode_continuation([{"role": "tool", "content": "148"}])) == text


def test_several_messages_follow_one_another() -> None:
    tokenizer = make(CHAT_TEMPLATE, "<|end|>")
    messages = [{"role": "tool", "content": "148"}, {"role": "user", "content": "And?"}]
    assert (
        raw(tokenizer, tokenizer.encode_continuation(messages)) == "<|tool|>148<|end|><|user|>And?<|end|><|assistant|>"
    )


@pytest.mark.parametrize("template", [COUNTING, SILENT])
def test_templates_without_a_stable_continuation_are_refused(template: str) -> None:
    with pytest.raises(UserError, match=r"messages of role tool \(at '148'\).*use other roles"):
        make(template).encode_continuation([{"role": "tool", "content": "148"}])


def test_a_template_that_refuses_the_role_says_so() -> None:
    with pytest.raises(UserError, match="roles must alternate"):
        make(STRICT).encode_continuation([{"role": "tool", "content": "148"}, {"role": "tool", "content": "149"}])
    said = make(STRICT).encode_continuation([{"role": "user", "content": "148"}])
    assert raw(make(STRICT), said) == "<|im_start|>148<|im_end|><|im_start|>"


def test_a_tokenizer_that_composes_letters_takes_any_message(tmp_path: Path) -> None:
    build_tokenizer(["text"], tmp_path)
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"normalizer": {"type": "NFC"}}))
    tokenizer = ChatTokenizer.from_folder(tmp_path)
    for said in ("ok", "e\u0301", "\u212b", "\u2126 ohm"):
        assert tokenizer.encode_continuation([{"role": "user", "content": said}])
