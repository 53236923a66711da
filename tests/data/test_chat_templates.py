"""Chat templates of real models: the text is transformers', and loss lies on the assistant's text
and its end-of-turn token only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from rlpipe.config.model import ModelConfig
from rlpipe.config.pipeline import PipelineConfig
from rlpipe.data.chat import ChatTokenizer
from tests.data.test_chat import CHATML, LLAMA3, QWEN3, make

# as it stands in the metadata of SmolLM2-135M-Instruct's GGUF file (Apache-2.0)
SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\n"
    "You are a helpful "
    "AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + "
    "message['content'] + '<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|im_start|>assistant\n' }}{% endif %}"
)
DEFAULT_SYSTEM = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
THINKING = QWEN3.replace(
    "{{- '<|im_start|>assistant\\n' }}{%- endif %}",
    "{{- '<|im_start|>assistant\\n' }}{%- if enable_thinking is defined and enable_thinking is false %}"
    "{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}{%- endif %}",
)
TOOLS = "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}" + CHATML
ENDS = {"chatml": "<|im_end|>", "llama3": "<|eot_id|>", "smollm2": "<|im_end|>"}
TEMPLATES = {"chatml": CHATML, "llama3": LLAMA3, "smollm2": SMOLLM2}

USER, ASSISTANT = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"}
SYSTEM = {"role": "system", "content": "Be brief."}
MULTI = [USER, ASSISTANT, {"role": "user", "content": "Why\n\nso?"}, {"role": "assistant", "content": "No.\n\nYes"}]

# the published formats, written out
CHATML_TEXT = (
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nYo<|im_end|>\n"
    "<|im_start|>user\nWhy\n\nso?<|im_end|>\n<|im_start|>assistant\nNo.\n\nYes<|im_end|>\n"
)
LLAMA3_TEXT = (
    "<|bos|><|start_header_id|>user<|end_header_id|>\n\n"
    "Hi<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\nYo<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nWhy\n\n"
    "so?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\nNo.\n\nYes<|eot_id|>"
)
TEXTS = {"chatml": CHATML_TEXT, "llama3": LLAMA3_TEXT, "smollm2": DEFAULT_SYSTEM + CHATML_TEXT}


def pieces(chat: ChatTokenizer, messages: list[dict[str, Any]]) -> list[list[str]]:
    """The token strings of each run of tokens that carry loss."""
    tokens, mask = chat.encode_conversation(messages)
    runs: list[list[str]] = []
    for index, (token, bit) in enumerate(zip(tokens, mask, strict=True)):
        if bit and not (index and mask[index - 1]):
            runs.append([])
        if bit:
            runs[-1].append(chat._tokenizer.id_to_token(token))
    return runs


def text_of(chat: ChatTokenizer, tokens: list[int]) -> str:
    return chat._tokenizer.decode(tokens, skip_special_tokens=False)


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_tokens_that_carry_loss_one_by_one(name: str) -> None:
    chat, end = make(TEMPLATES[name], ENDS[name]), ENDS[name]
    assert pieces(chat, [USER, ASSISTANT]) == [["Y", "o", end]]
    assert pieces(chat, [SYSTEM, USER, ASSISTANT]) == [["Y", "o", end]]
    assert pieces(chat, MULTI) == [["Y", "o", end], ["N", "o", ".", "ĊĊ", "Y", "e", "s", end]]
    tokens, _ = chat.encode_conversation(MULTI)
    assert text_of(chat, tokens) == TEXTS[name]
    assert tokens.count(chat._tokenizer.token_to_id(end)) == 4 + (name == "smollm2")
    assert tokens[-1] == chat._tokenizer.token_to_id(end) or text_of(chat, tokens[-2:]) == f"{end}\n"


@pytest.mark.parametrize("name", TEMPLATES)
def test_every_prompt_is_a_prefix_of_the_conversation_and_carries_no_loss(name: str) -> None:
    chat = make(TEMPLATES[name], ENDS[name])
    talk = [
        USER,
        {"role": "assistant", "content": "No"},
        *MULTI[2:3],
        ASSISTANT,
    ]  # a line break and "Y" would merge at the border
    for messages in (talk, [SYSTEM, *talk]):
        tokens, mask = chat.encode_conversation(messages)
        for index in [index for index, message in enumerate(messages) if message["role"] == "assistant"]:
            prompt = chat.encode_prompt(messages[:index])
            assert tokens[: len(prompt)] == prompt
            assert (mask[len(prompt) - 1], mask[len(prompt)]) == (0, 1)


def test_a_default_system_prompt_gives_way_and_never_carries_loss() -> None:
    chat = make(SMOLLM2)
    assert (
        text_of(chat, chat.encode_prompt([USER]))
        == f"{DEFAULT_SYSTEM}<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    given = text_of(chat, chat.encode_prompt([SYSTEM, USER]))
    assert given == "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    # the assistant speaks first, and says what stands in the default
    # system prompt or in a token's name
    for said in ("You", "AI", "im_end"):
        assert pieces(chat, [{"role": "assistant", "content": said}]) == [[*said, "<|im_end|>"]]


def test_thinking_is_kept_in_the_last_turn_and_an_argument_turns_it_off() -> None:
    talk = [USER, {"role": "assistant", "content": "<think>\nhm\n</think>\n\nYo"}]
    thought = pieces(make(THINKING), talk)
    assert thought == [["<", *"think>", "Ċ", "h", "m", "Ċ", "<", *"/think>", "ĊĊ", "Y", "o", "<|im_end|>"]]
    plain, off = make(THINKING), make_with(THINKING, {"enable_thinking": False})
    assert text_of(plain, plain.encode_prompt([USER])).endswith("<|im_start|>assistant\n")
    prompt = off.encode_prompt([USER])
    assert text_of(off, prompt).endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert pieces(off, [USER, ASSISTANT]) == [["Y", "o", "<|im_end|>"]]  # the empty block belongs to the prompt
    assert off.encode_conversation([USER, ASSISTANT])[0][: len(prompt)] == prompt


def make_with(template: str, variables: dict[str, Any]) -> ChatTokenizer:
    tokenizer = make(template)._tokenizer
    names = {"eos_token": "<|im_end|>", "bos_token": "<|bos|>", "pad_token": "<|pad|>"}
    return ChatTokenizer(tokenizer, template, names, variables)


TOOL = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"é": {"type": "number"}}}},
}


@pytest.mark.parametrize("system", [[], [SYSTEM]])
@pytest.mark.parametrize("prompt", [False, True])
@pytest.mark.parametrize(
    ("template", "variables"),
    [(CHATML, {}), (LLAMA3, {}), (SMOLLM2, {}), (QWEN3, {}), (THINKING, {"enable_thinking": False}),
     (TOOLS, {"tools": [TOOL]}),
     ("{{ documents | tojson }}{{ style }}" + CHATML, {"documents": [{"title": "a"}], "style": "x"})],
)  # fmt: skip
def test_the_text_is_that_of_transformers(
    template: str, variables: dict[str, Any], prompt: bool, system: list[dict[str, str]]
) -> None:
    chat = make_with(template, variables)
    other = PreTrainedTokenizerFast(
        tokenizer_object=chat._tokenizer, eos_token="<|im_end|>", bos_token="<|bos|>", pad_token="<|pad|>"
    )
    messages = [*system, *(MULTI[:3] if prompt else MULTI)]
    theirs = other.apply_chat_template(
        messages, chat_template=template, tokenize=False, add_generation_prompt=prompt, **variables
    )
    assert chat._template.render(messages, add_generation_prompt=prompt) == theirs
    if not prompt and "tools" not in variables and "documents" not in variables and variables:
        return  # a past turn without the block that the prompt had: refused, see docs/data.md
    tokens = chat.encode_prompt(messages) if prompt else chat.encode_conversation(messages)[0]
    assert text_of(chat, tokens) == theirs


NESTED = {
    "städte": [{"z": "Orléans", "a": None, "中": [1, -2.5, True, {}]}, []],
    "Zoë": {"b": {"10": 1, "9": "😀\u2028</s>"}, "a": "\"\\\n"}, "": 1e-7,
}  # fmt: skip


@pytest.mark.parametrize(
    "options",
    ["", "separators=(',', ':')", "separators=[', ', ' = ']", "sort_keys=True", "indent=2", "indent=0", "indent='\t'",
     "ensure_ascii=False", "ensure_ascii=true",
     "indent=2, sort_keys=true, separators=(',', ':')", "ensure_ascii=True, sort_keys=True, separators=(',', ':')",
     "true, 1, (';', ':'), true"],
)  # fmt: skip
def test_what_a_template_writes_as_json_is_what_transformers_writes(options: str) -> None:
    calls = (
        "{% for m in messages %}{% for call in m.tool_calls or [] %}"
        "{{ call.function.arguments | tojson(OPTIONS) }}{% endfor %}{% endfor %}"
    )
    template = ("{{ tools | tojson(OPTIONS) }}" + calls + CHATML).replace("OPTIONS", options)
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": NESTED}}
    talk = [USER, {**ASSISTANT, "tool_calls": [call]}, USER]
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": NESTED}}}
    chat = make_with(template, {})
    theirs = PreTrainedTokenizerFast(tokenizer_object=chat._tokenizer).apply_chat_template(
        talk, chat_template=template, tools=[tool], tokenize=False, add_generation_prompt=True
    )
    asked = chat.with_tools([tool])
    assert asked._template.render(talk, add_generation_prompt=True) == theirs
    assert text_of(asked, asked.encode_prompt(talk)) == theirs


def test_the_arguments_reach_the_tokenizer_of_a_folder(tmp_path: Path) -> None:
    make(CHATML)._tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>", "pad_token": "<|pad|>"}')
    chat = ChatTokenizer.from_folder(tmp_path, TOOLS, {"tools": [TOOL]})
    assert '"name": "add"' in text_of(chat, chat.encode_prompt([USER]))
    with pytest.raises(ValueError, match=r"model\.chat_template_args: rlpipe itself sets messages; remove it"):
        PipelineConfig(model=ModelConfig(chat_template_args={"messages": []}))
