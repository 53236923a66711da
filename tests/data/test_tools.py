"""Conversations with tools: read from every kind of source into one form, and written as
transformers writes them, with loss on the calls."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from transformers import AutoTokenizer

from rlpipe.base.errors import UserError
from rlpipe.config.sections import DataConfig
from rlpipe.data.chat import ChatTokenizer
from rlpipe.data.conversations import encode_asked, encode_talk, tokenise_conversations
from rlpipe.data.sources import load_conversations, load_prompts
from rlpipe.records.prompt import Talk
from tests.data.test_chat import CHATML, make
from tests.tool_templates import KINDS, MARKED, TOOL_LIST


def with_text_arguments(talk: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The conversation as OpenAI's clients have it: arguments are JSON text."""
    talk = json.loads(json.dumps(talk))
    for message in talk:
        for call in message.get("tool_calls") or []:
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"], separators=(",", ":"))
    return talk


def jsonl(folder: Path, rows: list[dict[str, Any]]) -> str:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder / "rows.jsonl")


def parquet(folder: Path, rows: list[dict[str, Any]]) -> str:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "rows.parquet")
    return str(folder / "rows.parquet")


def datasets_folder(folder: Path, rows: list[dict[str, Any]]) -> str:
    import datasets

    datasets.Dataset.from_list(rows).save_to_disk(str(folder / "saved"))
    return f"datasets:{folder / 'saved'}"


def read(source: str, use: str = "sft") -> list[Talk]:
    return load_conversations(DataConfig.model_validate({"name": "mine", "use": use, "source": source}), seed=0)


def turns(chat: ChatTokenizer, talk: Talk) -> tuple[str, list[str]]:
    """The whole text, and that of each run of tokens that carry loss."""
    tokens, mask = encode_talk(chat, talk)
    runs: list[list[int]] = []
    for index, (token, bit) in enumerate(zip(tokens, mask, strict=True)):
        if bit and not (index and mask[index - 1]):
            runs.append([])
        if bit:
            runs[-1].append(token)
    return chat.decode_raw(tokens), [chat.decode_raw(run) for run in runs]


@pytest.mark.parametrize("as_text", [False, True], ids=["objects", "text"])
@pytest.mark.parametrize("write", [jsonl, parquet, datasets_folder])
@pytest.mark.parametrize("name", KINDS)
def test_a_conversation_with_tools_is_that_of_transformers(
    name: str, write: Callable[[Path, list[dict[str, Any]]], str], as_text: bool, tmp_path: Path
) -> None:
    kind = KINDS[name]
    whole = kind.conversation()
    row = (
        {"messages": with_text_arguments(whole), "tools": json.dumps(TOOL_LIST)}
        if as_text
        else {"messages": whole, "tools": TOOL_LIST}
    )
    (talk,) = read(write(tmp_path, [row]))
    assert talk.tools == TOOL_LIST
    folder = kind.save(tmp_path / "model")
    text, written = turns(ChatTokenizer.from_folder(folder, variables=kind.variables), talk)
    other = AutoTokenizer.from_pretrained(folder)
    assert text == other.apply_chat_template(whole, tools=TOOL_LIST, tokenize=False, **kind.variables)
    assert written == kind.turns


@pytest.mark.parametrize("name", KINDS)
def test_what_was_said_before_the_last_question_carries_loss_too(name: str, tmp_path: Path) -> None:
    kind = KINDS[name]
    whole = [
        *kind.conversation(),
        {"role": "user", "content": "Again?"},
        {"role": "assistant", "content": "It is 21, and 42."},
    ]
    (talk,) = read(jsonl(tmp_path, [{"messages": whole, "tools": TOOL_LIST}]))
    folder = kind.save(tmp_path / "model")
    text, written = turns(ChatTokenizer.from_folder(folder, variables=kind.variables), talk)
    other = AutoTokenizer.from_pretrained(folder)
    assert text == other.apply_chat_template(whole, tools=TOOL_LIST, tokenize=False, **kind.variables)
    past = [turn.rpartition("</think>\n\n")[2] for turn in kind.turns]  # Qwen3 forgets its thoughts
    assert written == [*past, kind.turns[-1]]


def test_the_mask_is_that_of_transformers_where_the_template_is_marked(tmp_path: Path) -> None:
    kind = KINDS["qwen2.5 marked"]
    (talk,) = read(jsonl(tmp_path, [{"messages": kind.conversation(), "tools": TOOL_LIST}]))
    folder = kind.save(tmp_path / "model")
    tokens, mask = encode_talk(ChatTokenizer.from_folder(folder), talk)
    other = AutoTokenizer.from_pretrained(folder).apply_chat_template(
        kind.conversation(), tools=TOOL_LIST, return_dict=True, return_assistant_tokens_mask=True
    )
    assert (tokens, mask) == (other["input_ids"], other["assistant_masks"])


CALL = {"function": {"name": "f", "arguments": {"a": "x"}}}
ASK, ANSWER = {"role": "user", "content": "?"}, {"role": "assistant", "content": "It is."}


def called(**call: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {}, **call}}]}


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (
            {"messages": [ASK, called(arguments="a=1")]},
            "message 2 of 'messages': tool call 1 ('f'): its 'arguments' must be a JSON object",
        ),
        ({"messages": [ASK, called(arguments="[1]")]}, "are '[1]'"),
        ({"messages": [ASK, called(arguments='"{}"')]}, "must be a JSON object"),
        ({"messages": [ASK, called(arguments='{"a": NaN}')]}, "must be a JSON object"),
        (
            {"messages": [ASK, called(arguments={"a": "\ud800"})]},
            "message 2 of 'messages': holds half a surrogate pair",
        ),
        ({"messages": [ASK, called(arguments='{"\\udc00": 1}')]}, "holds half a surrogate pair"),
        ({"messages": [ASK, {**ANSWER, "reasoning_content": "\ud800"}]}, "holds half a surrogate pair"),
        ({"messages": [ASK, {**ANSWER, "tool_calls": "f()"}]}, "'tool_calls' must be a list"),
        ({"messages": [ASK, {**ANSWER, "tool_calls": [{"id": "1"}]}]}, "tool call 1 must be"),
        ({"messages": [ASK, {"role": "assistant", "content": None}]}, "content null"),
        ({"messages": [{**ASK, "content": [{"type": "image_url"}]}, ANSWER]}, "only parts of type text"),
        ({"messages": [ASK, ANSWER], "tools": "f"}, "'tools' must be a list of tools"),
        ({"messages": [ASK, ANSWER], "tools": {"name": "f"}}, "'tools' must be a list of tools"),
        ({"messages": [ASK, ANSWER], "tools": ["f"]}, "'tools': tool 1 must be a JSON schema"),
        (
            {"messages": [ASK, ANSWER], "tools": [{"name": "f", "parameters": "no"}]},
            "'tools': tool 1: its 'parameters' must be an object",
        ),
        (
            {"messages": [ASK, ANSWER], "tools": [{"name": "f", "description": "\udfff"}]},
            "'tools': holds half a surrogate pair",
        ),
    ],
)
def test_tool_data_that_cannot_be_trained_on_is_named(row: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        read(jsonl(tmp_path, [row]))
    assert "rows.jsonl:1" in str(caught.value) and said in str(caught.value), caught.value


FIRST_ONLY = CHATML.replace(
    "<|im_end|>", "{% if m.tool_calls %}{{ m.tool_calls[0].function | tojson }}{% endif %}<|im_end|>", 1
)
AS_TEXT = CHATML.replace(
    "<|im_end|>",
    "{% for c in m.tool_calls or [] %}{{ c.function.name + c.function.arguments }}{% endfor %}<|im_end|>",
    1,
)


@pytest.mark.parametrize(
    ("template", "calls", "said"),
    [
        (CHATML, [CALL], "message 2, tool call 1 ('f'): the chat template does not write its name"),
        (CHATML + "{# no tool_calls here #}", [CALL], "does not write its name"),
        (FIRST_ONLY, [CALL, CALL], "message 2, tool call 2 ('f')"),
        (AS_TEXT.replace(" + c.function.arguments", ""), [CALL], "does not write its arguments"),
        (MARKED.replace("{%- generation %}", "").replace(
            "{{- '<|im_end|>' }}{%- endgeneration %}", "{%- generation %}{{- '<|im_end|>' }}{%- endgeneration %}"),
         [CALL], "does not write its name within {% generation %}"),
        (KINDS["kimi"].template, [{**CALL, "id": "call_1"}], "does not write its name"),
        (KINDS["llama3.1"].template, [CALL, CALL], "only supports single tool-calls"),
        (KINDS["mistral"].template, [CALL], "length 9"),
    ],
)  # fmt: skip
def test_a_template_that_loses_a_call_is_refused_by_row(
    template: str, calls: list[Any], said: str, tmp_path: Path
) -> None:
    (talk,) = read(jsonl(tmp_path, [{"messages": [ASK, {**ANSWER, "tool_calls": calls}]}]))
    with pytest.raises(UserError) as caught:
        encode_talk(make(template), talk)
    assert "rows.jsonl:1" in str(caught.value) and said in str(caught.value), caught.value


def test_a_template_that_takes_arguments_as_text_gets_them_so() -> None:
    talk = Talk("here", [ASK, {**ANSWER, "tool_calls": [CALL]}], [])
    for template in (
        AS_TEXT,
        AS_TEXT.replace("+ c.function.arguments", "~ c.function.arguments"),
    ):  # a dict would be Python's repr
        assert turns(make(template), talk)[1] == ['It is.f{"a": "x"}<|im_end|>']


def test_nulls_of_json_stay_and_those_of_arrow_go(tmp_path: Path) -> None:
    own = [called(arguments={"a": None, "deep": [{"b": None}]}), called(arguments={"c": 1})]
    tools = [{"name": "f", "parameters": {"properties": {"a": {"default": None}, "b": {"enum": ["x", None]}}}}]
    rows = [{"messages": [ASK, message], "tools": tools} for message in own]
    (kept, _), (gone, other) = read(jsonl(tmp_path, rows)), read(parquet(tmp_path, rows))
    assert kept.messages[1]["tool_calls"] == own[0]["tool_calls"] and kept.tools == tools
    assert gone.messages[1]["tool_calls"][0]["function"]["arguments"] == {"deep": [{}]}
    assert other.messages[1]["tool_calls"][0]["function"]["arguments"] == {"c": 1}
    assert gone.tools == [{"name": "f", "parameters": {"properties": {"a": {}, "b": {"enum": ["x", None]}}}}]
    text = [{"messages": [ASK, called(arguments='{"a": null}')], "tools": json.dumps(tools)}]
    (exact,) = read(parquet(tmp_path, text))
    assert exact.messages[1]["tool_calls"] == called(arguments={"a": None})["tool_calls"] and exact.tools == tools


def test_the_tools_of_a_prompt_reach_the_template_and_names_of_tools_stay_metadata(tmp_path: Path) -> None:
    rows = [
        {"prompt": "?", "tools": TOOL_LIST},
        {"prompt": "?", "tools": json.dumps(TOOL_LIST)},
        {"prompt": "?", "tools": ["add"]},
    ]
    data = DataConfig.model_validate({"name": "mine", "use": "rl", "source": jsonl(tmp_path, rows)})
    prompts = load_prompts(data, seed=0)
    assert [prompt.tools for prompt in prompts] == [TOOL_LIST, TOOL_LIST, None]
    assert [prompt.metadata["tools"] for prompt in prompts] == [row["tools"] for row in rows]
    chat = ChatTokenizer.from_folder(KINDS["qwen2.5"].save(tmp_path / "model"))
    asked = [chat.decode_raw(encode_asked(chat, row.prompt_id, row.messages, row.tools)) for row in prompts]
    assert ["get_weather" in text for text in asked] == [True, True, False] and asked[0] == asked[1]


def test_a_template_without_tools_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    talks = read(
        jsonl(tmp_path, [{"messages": [ASK, ANSWER], "tools": TOOL_LIST}, {"messages": [ASK, ANSWER], "tools": []}])
    )
    tokenise_conversations(talks, make(CHATML), 100)
    assert "1 of 2 conversations have tools, and the chat template writes none" in caplog.text


def test_reasoning_is_read_by_each_of_its_names(tmp_path: Path) -> None:
    kind = KINDS["qwen3"]
    chat = ChatTokenizer.from_folder(kind.save(tmp_path / "model"))
    for name in ("reasoning_content", "reasoning", "thinking"):
        (talk,) = read(jsonl(tmp_path, [{"messages": [ASK, {**ANSWER, name: "Hm."}]}]))
        assert turns(chat, talk)[1] == ["<think>\nHm.\n</think>\n\nIt is.<|im_end|>"]
