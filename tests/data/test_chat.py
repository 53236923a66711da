"""Chat templates: the mask covers exactly what the assistant wrote, token by token."""

import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from rlpipe.base.errors import UserError
from rlpipe.data.chat import ChatTokenizer
from rlpipe.data.conversations import tokenise_conversations
from rlpipe.data.new_tokenizer import CHAT_TEMPLATE
from rlpipe.records.prompt import Talk

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{{ m.content | trim }}<|eot_id|>{% endfor %}{% if add_generation_prompt %}"
    "<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
QWEN3 = """{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}
{%- for m in messages %}
    {%- if m.role == 'assistant' %}
        {%- set reasoning = m.content.split('</think>')[0].split('<think>')[-1].strip('\\n') if '</think>' in m.content else '' %}
        {%- set content = m.content.split('</think>')[-1].lstrip('\\n') %}
        {%- if loop.index0 > ns.last %}
            {{- '<|im_start|>assistant\\n<think>\\n' + reasoning + '\\n</think>\\n\\n' + content }}
        {%- else %}
            {{- '<|im_start|>assistant\\n' + content }}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>' + '\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""  # noqa: E501
MARKED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}[A]{% generation %}{{ m.content }}<|im_end|>"
    "{% endgeneration %}\n"
    "{% else %}[U]{{ m.content }}\n{% endif %}{% endfor %}{% if add_generation_prompt %}[A]{% endif %}"
)
REWRITING = (
    "{% for m in messages %}{{ loop.revindex }}{{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}>{% endif %}"
)
SPECIALS = ["<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>",
            "<|eot_id|>", "<|bos|>", "<|pad|>", "<|end|>",
            "<|user|>", "<|assistant|>", "<|system|>"]  # fmt: skip

SINGLE = [{"role": "user", "content": "Hi there"}, {"role": "assistant", "content": "Yo man"}]
MULTI = [
    {"role": "system", "content": "Be brief."},
    *SINGLE,
    {"role": "user", "content": "Yo man"},
    {"role": "assistant", "content": "No"},
]


def make(template: str, eos: str = "<|im_end|>") -> ChatTokenizer:
    # "ĊĊ" and "ĊY" are merges a careless encoding would put across the border of the mask
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "ĊĊ", "ĊY", "ĠĠ"]
    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[("Ċ", "Ċ"), ("Ċ", "Y"), ("Ġ", "Ġ")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIALS])
    tokenizer.post_processor = processors.TemplateProcessing(
        "<|bos|> $A", special_tokens=[("<|bos|>", tokenizer.token_to_id("<|bos|>"))]
    )
    return ChatTokenizer(tokenizer, template, {"eos_token": eos, "bos_token": "<|bos|>", "pad_token": "<|pad|>"})


def raw(tokenizer: ChatTokenizer, tokens: list[int]) -> str:
    return tokenizer._tokenizer.decode(tokens, skip_special_tokens=False)


def masked(tokenizer: ChatTokenizer, messages: list[dict[str, str]]) -> list[str]:
    """The text of each run of masked tokens."""
    tokens, mask = tokenizer.encode_conversation(messages)
    assert len(tokens) == len(mask)
    assert raw(tokenizer, tokens) == tokenizer._template.render(messages)
    runs: list[list[int]] = []
    for position, (token, bit) in enumerate(zip(tokens, mask, strict=True)):
        if bit and (position == 0 or not mask[position - 1]):
            runs.append([])
        if bit:
            runs[-1].append(token)
    return [raw(tokenizer, run) for run in runs]


@pytest.mark.parametrize(
    ("template", "end"),
    [(CHATML, "<|im_end|>"), (LLAMA3, "<|eot_id|>"), (CHAT_TEMPLATE, "<|end|>"), (MARKED, "<|im_end|>")],
)
def test_mask_is_the_turns_and_their_ends(template: str, end: str) -> None:
    tokenizer = make(template, end)
    assert masked(tokenizer, SINGLE) == [f"Yo man{end}"]
    assert masked(tokenizer, MULTI) == [f"Yo man{end}", f"No{end}"]


@pytest.mark.parametrize("template", [CHATML, LLAMA3, CHAT_TEMPLATE, MARKED, QWEN3])
def test_prompt_has_the_tokens_it_has_in_the_conversation(template: str) -> None:
    tokenizer = make(template)
    prompt = tokenizer.encode_prompt(SINGLE[:1])
    tokens, mask = tokenizer.encode_conversation(SINGLE)
    assert tokens[: len(prompt)] == prompt
    assert mask[: len(prompt)] == [0] * len(prompt)
    assert mask[len(prompt)] == 1
    assert raw(tokenizer, tokens).count("<|bos|>") == (template == LLAMA3)


TEXT = st.text(st.characters(exclude_categories=("Cs",)), min_size=1).filter(
    lambda text: text.strip() and "<" not in text
)


@given(st.lists(TEXT, min_size=2, max_size=6))
@pytest.mark.parametrize("template", [CHATML, LLAMA3, CHAT_TEMPLATE, MARKED])
def test_mask_for_any_text(template: str, texts: list[str]) -> None:
    tokenizer = make(template)
    messages = [{"role": "assistant" if index % 2 else "user", "content": text} for index, text in enumerate(texts)]
    end = {CHATML: "<|im_end|>", LLAMA3: "<|eot_id|>", CHAT_TEMPLATE: "<|end|>", MARKED: "<|im_end|>"}[template]
    wanted = [(text.strip() if template == LLAMA3 else text) + end for text in texts[1::2]]
    assert masked(tokenizer, messages) == wanted


def test_text_that_looks_like_a_mark_is_text() -> None:
    talk = [{"role": "user", "content": "[generation 0]"}, {"role": "assistant", "content": "[generation 1]"}]
    assert masked(make(MARKED), talk) == ["[generation 1]<|im_end|>"]


def test_reasoning_that_the_template_removes_is_not_missed() -> None:
    first = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nYo man"}
    last = {"role": "assistant", "content": "<think>\nwell\n</think>\n\nNo"}
    found = masked(make(QWEN3), [MULTI[1], first, MULTI[3], last])
    assert found == ["Yo man<|im_end|>", "<think>\nwell\n</think>\n\nNo<|im_end|>"]
    assert masked(make(QWEN3), MULTI) == ["Yo man<|im_end|>", "<think>\n\n</think>\n\nNo<|im_end|>"]


def test_assistant_may_speak_first_and_twice() -> None:
    messages = [SINGLE[1], SINGLE[0], SINGLE[1], {"role": "assistant", "content": "More"}]
    assert masked(make(CHATML), messages) == ["Yo man<|im_end|>", "Yo man<|im_end|>", "More<|im_end|>"]


def test_template_without_an_end_token_masks_the_whole_turn() -> None:
    plain = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}"
        "assistant: {% endif %}"
    )
    assert masked(make(plain), SINGLE) == ["Yo man\n"]


def test_a_tokenizer_that_puts_a_space_before_every_text() -> None:
    tokens = ["<unk>", "▁", *"abcdefghijklmnopqrstuvwxyz:"]
    tokenizer = Tokenizer(
        models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=[], unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always", split=False)
    tokenizer.add_special_tokens(["</s>"])
    template = (
        "{% for m in messages %}{{ m.role }}:{{ m.content }}{% if m.role == 'assistant' %}</s>{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
    )
    chat = ChatTokenizer(tokenizer, template, {"eos_token": "</s>"})
    assert masked(chat, [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]) == ["yo</s>"]
    assert chat.pad_token_id == chat.eos_token_id


def test_template_that_rewrites_turns_is_refused_with_the_way_out() -> None:
    with pytest.raises(UserError, match=r"generation %.*model.chat_template"):
        make(REWRITING).encode_conversation(MULTI)


def test_template_errors_are_the_users() -> None:
    with pytest.raises(UserError, match="not a Jinja template"):
        make("{% for %}")
    with pytest.raises(UserError, match="no system here"):
        make("{% if messages[0].role == 'system' %}{{ raise_exception('no system here') }}{% endif %}").encode_prompt(
            MULTI
        )


def test_today_is_always_the_same_day() -> None:
    tokenizer = make("{{ strftime_now('%d %b %Y') }}{% for m in messages %}{{ m | tojson }}{% endfor %}")
    assert (
        tokenizer.decode(tokenizer.encode_prompt([{"role": "user", "content": "é<"}]))
        == '26 Jul 2024{"role": "user", "content": "é<"}'
    )


def write(folder: Path, settings: dict[str, object]) -> Path:
    make(CHATML)._tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def test_folder_with_named_tokens_and_templates(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": CHATML}]
    write(
        tmp_path, {"eos_token": {"content": "<|im_end|>", "lstrip": False}, "pad_token": None, "chat_template": named}
    )
    tokenizer = ChatTokenizer.from_folder(tmp_path)
    assert raw(tokenizer, [tokenizer.eos_token_id, tokenizer.pad_token_id]) == "<|im_end|><|im_end|>"
    assert masked(tokenizer, SINGLE) == ["Yo man<|im_end|>"]
    assert tokenizer.encode_prompt(SINGLE[:1]) == make(CHATML).encode_prompt(SINGLE[:1])
    assert masked(ChatTokenizer.from_folder(tmp_path, LLAMA3), SINGLE) == ["Yo man<|eot_id|>"]
    (tmp_path / "chat_template.jinja").write_text(MARKED)
    assert ChatTokenizer.from_folder(tmp_path)._template.has_marks


def test_folder_that_is_no_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no tokenizer\.json"):
        ChatTokenizer.from_folder(tmp_path)
    write(tmp_path, {"eos_token": "<|im_end|>"})
    with pytest.raises(UserError, match=r"model\.chat_template"):
        ChatTokenizer.from_folder(tmp_path)
    write(tmp_path, {"eos_token": "<|nope|>", "chat_template": CHATML})
    with pytest.raises(UserError, match=re.escape("eos_token='<|nope|>'")):
        ChatTokenizer.from_folder(tmp_path)
    for text, said in (("{}", "not a tokenizer"), ('{"model":', "not JSON")):
        (tmp_path / "tokenizer.json").write_text(text)
        with pytest.raises(UserError, match=said):
            ChatTokenizer.from_folder(tmp_path)


@pytest.mark.parametrize(
    ("template", "eos", "stops"),
    [
        (CHATML, "<|im_end|>", {"<|im_end|>"}),
        (CHATML, "<|end|>", {"<|end|>", "<|im_end|>"}),  # a base model: its text ends otherwise than its turns
        (LLAMA3, "<|end|>", {"<|end|>", "<|eot_id|>"}),
        (QWEN3, "<|end|>", {"<|end|>", "<|im_end|>"}),
        (MARKED, "<|end|>", {"<|end|>", "<|im_end|>"}),
        (CHAT_TEMPLATE, "<|end|>", {"<|end|>"}),
        # no token ends a turn
        ("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}", "<|end|>", {"<|end|>"}),
        ("{% if messages|length != 1 %}{{ raise_exception('one') }}{% endif %}{{ messages[0].content }}",
         "<|end|>", {"<|end|>"}),
    ],
)  # fmt: skip
def test_sampling_stops_at_the_end_of_a_turn_and_of_a_text(template: str, eos: str, stops: set[str]) -> None:
    tokenizer = make(template, eos)
    assert tokenizer.stop_token_ids == sorted(tokenizer._tokenizer.token_to_id(token) for token in stops)


def test_a_policy_that_never_learns_to_stop_is_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    plain = "{% for m in messages %}[{{ m.role }}]{% generation %}{{ m.content }}{% endgeneration %}\n{% endfor %}"
    for template, warns in ((plain, True), (CHATML, False)):
        caplog.clear()
        tokenise_conversations([Talk("rows.jsonl:1", SINGLE, [])], make(template, "<|end|>"), 100)
        assert ("no turn of the assistant ends with a token that stops" in caplog.text) == warns
