"""Small chat templates of the kinds that models with tools have, and a conversation with tools as
each of them writes it.

They follow the logic of Qwen2.5's, Qwen3's, Llama 3.1's, Mistral v0.3's, Hermes' and Kimi K2's.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import AddedToken

from tests.data.test_chat import CHATML, make

QWEN25 = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}{%- if messages[0]['role'] == 'system' %}{{- messages[0]['content'] }}{%- else %}{{- 'You are helpful.' }}{%- endif %}
    {{- "\\n\\n# Tools\\n\\n<tools>" }}
    {%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- else %}
    {%- if messages[0]['role'] == 'system' %}{{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}{%- endif %}
{%- endif %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) or (message.role == "assistant" and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>' + message.role }}
        {%- if message.content %}{{- '\\n' + message.content }}{%- endif %}
        {%- for tool_call in message.tool_calls %}
            {%- if tool_call.function is defined %}{%- set tool_call = tool_call.function %}{%- endif %}
            {{- '\\n<tool_call>\\n{"name": "' + tool_call.name + '", "arguments": ' }}{{- tool_call.arguments | tojson }}{{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if (loop.index0 == 0) or (messages[loop.index0 - 1].role != "tool") %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
# the same with marks around all that the assistant writes
MARKED = (
    QWEN25.replace(' or (message.role == "assistant" and not message.tool_calls)', "")
    .replace("""        {{- '<|im_start|>' + message.role }}
        {%- if message.content %}{{- '\\n' + message.content }}{%- endif %}
""", """        {{- '<|im_start|>assistant\\n' }}{%- generation %}{%- if message.content %}{{- message.content + ('\\n' if message.tool_calls else '') }}{%- endif %}
""")
    .replace("{{- '\\n<tool_call>", "{{- ('' if loop.first else '\\n') + '<tool_call>")
    .replace("""        {%- endfor %}
        {{- '<|im_end|>\\n' }}
""", """        {%- endfor %}
        {{- '<|im_end|>' }}{%- endgeneration %}{{- '\\n' }}
""")
)  # fmt: skip
QWEN3 = """{%- if tools %}
    {{- '<|im_start|>system\\n# Tools\\n\\n<tools>' }}{%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}{{- "\\n</tools><|im_end|>\\n" }}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string and not message.content.startswith('<tool_response>') %}
        {%- set ns.multi_step_tool = false %}{%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.content is string %}{%- set content = message.content %}{%- else %}{%- set content = '' %}{%- endif %}
    {%- if message.role == "user" %}
        {{- '<|im_start|>user\\n' + content + '<|im_end|>\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set reasoning_content = message.reasoning_content if message.reasoning_content is string else '' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > ns.last_query_index and (loop.last or reasoning_content) %}
            {{- '<think>\\n' + reasoning_content.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
        {%- else %}{{- content }}{%- endif %}
        {%- if message.tool_calls %}
            {%- for tool_call in message.tool_calls %}
                {%- if (loop.first and content) or (not loop.first) %}{{- '\\n' }}{%- endif %}
                {%- if tool_call.function %}{%- set tool_call = tool_call.function %}{%- endif %}
                {{- '<tool_call>\\n{"name": "' + tool_call.name + '", "arguments": ' }}
                {%- if tool_call.arguments is string %}{{- tool_call.arguments }}{%- else %}{{- tool_call.arguments | tojson }}{%- endif %}
                {{- '}\\n</tool_call>' }}
            {%- endfor %}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + content + '\\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
"""
LLAMA31 = """{{- bos_token }}
{%- if not tools_in_user_message is defined %}{%- set tools_in_user_message = true %}{%- endif %}
{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
{%- if messages[0]['role'] == 'system' %}{%- set system_message = messages[0]['content'] | trim %}{%- set messages = messages[1:] %}
{%- else %}{%- set system_message = "" %}{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none and not tools_in_user_message %}
    {{- "You have access to the following functions.\\n\\n" }}{%- for t in tools %}{{- t | tojson(indent=4) }}{{- "\\n\\n" }}{%- endfor %}
{%- endif %}
{{- system_message }}{{- "<|eot_id|>" }}
{%- if tools_in_user_message and not tools is none %}
    {%- if messages | length != 0 %}{%- set first_user_message = messages[0]['content'] | trim %}{%- set messages = messages[1:] %}
    {%- else %}{{- raise_exception("Cannot put tools in the first user message when there's no first user message!") }}{%- endif %}
    {{- '<|start_header_id|>user<|end_header_id|>\\n\\n' -}}{{- "Given the following functions, respond in JSON.\\n\\n" }}
    {%- for t in tools %}{{- t | tojson(indent=4) }}{{- "\\n\\n" }}{%- endfor %}
    {{- first_user_message + "<|eot_id|>" }}
{%- endif %}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls | length == 1 %}{{- raise_exception("This model only supports single tool-calls at once!") }}{%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}
        {{- '{"name": "' + tool_call.name + '", ' }}{{- '"parameters": ' }}{{- tool_call.arguments | tojson }}{{- "}" }}{{- "<|eot_id|>" }}
    {%- elif message.role == "tool" or message.role == "ipython" %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}
        {%- if message.content is mapping or message.content is iterable %}{{- message.content | tojson }}{%- else %}{{- message.content }}{%- endif %}
        {{- "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
"""
MISTRAL = """{{- bos_token }}
{%- set user_messages = messages | selectattr("role", "equalto", "user") | list %}
{%- for message in messages %}
    {%- if message["role"] == "user" %}
        {%- if tools is not none and (message == user_messages[-1]) %}
            {{- "[AVAILABLE_TOOLS] [" }}
            {%- for tool in tools %}
                {%- set tool = tool.function %}
                {{- '{"type": "function", "function": {' }}
                {%- for key, val in tool.items() if key != "return" %}
                    {%- if val is string %}{{- '"' + key + '": "' + val + '"' }}{%- else %}{{- '"' + key + '": ' + val | tojson }}{%- endif %}
                    {%- if not loop.last %}{{- ", " }}{%- endif %}
                {%- endfor %}
                {{- "}}" }}{%- if not loop.last %}{{- ", " }}{%- else %}{{- "]" }}{%- endif %}
            {%- endfor %}
            {{- "[/AVAILABLE_TOOLS]" }}
        {%- endif %}
        {{- "[INST] " + message["content"] + "[/INST]" }}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {{- "[TOOL_CALLS] [" }}
        {%- for tool_call in message.tool_calls %}
            {%- set out = tool_call.function | tojson %}{{- out[:-1] }}
            {%- if not tool_call.id is defined or tool_call.id | length != 9 %}
                {{- raise_exception("Tool call IDs should be alphanumeric strings with length 9!") }}
            {%- endif %}
            {{- ', "id": "' + tool_call.id + '"}' }}{%- if not loop.last %}{{- ", " }}{%- else %}{{- "]" + eos_token }}{%- endif %}
        {%- endfor %}
    {%- elif message["role"] == "assistant" %}
        {{- " " + message["content"] | trim + eos_token }}
    {%- elif message["role"] == "tool" %}
        {{- '[TOOL_RESULTS] {"content": ' + message.content | string + ", " }}
        {{- '"call_id": "' + message.tool_call_id + '"}[/TOOL_RESULTS]' }}
    {%- endif %}
{%- endfor %}
"""
HERMES_TOOLS = """{%- macro json_to_python_type(json_spec) %}{{- {"string": "str", "integer": "int"}[json_spec.type] }}{%- endmacro %}
{{- bos_token }}{{- '<|im_start|>system\\n' }}{{- "You are a function calling AI model. <tools> " }}
{%- for tool in tools %}
    {%- if tool.function is defined %}{%- set tool = tool.function %}{%- endif %}
    {{- '{"type": "function", "function": {"name": "' + tool.name + '", "description": "' + tool.name + '(' }}
    {%- for param_name, param_fields in tool.parameters.properties | items %}
        {{- param_name + ": " + json_to_python_type(param_fields) }}{%- if not loop.last %}{{- ", " }}{%- endif %}
    {%- endfor %}
    {{- ') - ' + tool.description + '", "parameters": ' }}{{- tool.parameters | tojson }}{{- "}}" }}{%- if not loop.last %}{{- "\\n" }}{%- endif %}
{%- endfor %}
{{- " </tools><|im_end|>\\n" }}
{%- for message in messages %}
    {%- if message.role == "user" or message.role == "system" or (message.role == "assistant" and message.tool_calls is not defined) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>' + message.role }}
        {%- for tool_call in message.tool_calls %}
            {{- '\\n<tool_call>\\n' }}
            {%- if tool_call.function is defined %}{%- set tool_call = tool_call.function %}{%- endif %}
            {{- '{"name": "' }}{{- tool_call.name }}{{- '", "arguments": ' }}{{- tool_call.arguments | tojson }}{{- '}' }}{{- '\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.previtem and loop.previtem.role != "tool" %}{{- '<|im_start|>tool\\n' }}{%- endif %}
        {{- '<tool_response>\\n' + message.content }}{%- if not loop.last %}{{- '\\n</tool_response>\\n' }}{%- else %}{{- '\\n</tool_response>' }}{%- endif %}
        {%- if not loop.last and loop.nextitem.role != "tool" %}{{- '<|im_end|>' }}{%- elif loop.last %}{{- '<|im_end|>' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
HERMES = [{"name": "default", "template": CHATML}, {"name": "tool_use", "template": HERMES_TOOLS}]
KIMI = """{% macro render_content(msg) -%}{%- set c = msg.get('content') -%}{%- if c is string -%}{{ c }}{%- elif c is not none -%}
    {% for content in c -%}{{ content['text'] }}{%- endfor -%}{%- endif -%}{%- endmacro %}
{% macro set_roles(message) -%}{%- set role_name = message.get('name') or message['role'] -%}
    {%- if message['role'] == 'user' -%}<|im_user|>{{ role_name }}<|im_middle|>
    {%- elif message['role'] == 'assistant' -%}<|im_assistant|>{{ role_name }}<|im_middle|>
    {%- else -%}<|im_system|>{{ role_name }}<|im_middle|>{%- endif -%}{%- endmacro -%}
{%- macro render_toolcalls(message) -%}<|tool_calls_section_begin|>
    {%- for tool_call in message['tool_calls'] -%}
        {%- set formatted_id = tool_call['id'] -%}<|tool_call_begin|>{{ formatted_id }}<|tool_call_argument_begin|>
        {%- if tool_call['function']['arguments'] is string -%}{{ tool_call['function']['arguments'] }}
        {%- else -%}{{ tool_call['function']['arguments'] | tojson }}{%- endif -%}<|tool_call_end|>
    {%- endfor -%}<|tool_calls_section_end|>{%- endmacro -%}
{%- if tools -%}<|im_system|>tool_declare<|im_middle|>{{ tools | tojson }}<|im_end|>{%- endif -%}
{% for message in messages %}
    {{- set_roles(message) -}}
    {%- if message['role'] == 'assistant' and message.get('tool_calls') -%}{{ render_content(message) }}{{ render_toolcalls(message) }}
    {%- elif message['role'] == 'tool' -%}{% set tool_call_id = message.tool_call_id %}## Return of {{ tool_call_id }}
{{ render_content(message) }}
    {%- else -%}{{ render_content(message) }}{%- endif -%}<|im_end|>
{%- endfor -%}
{%- if add_generation_prompt -%}<|im_assistant|>assistant<|im_middle|>{%- endif -%}
"""
TOKENS = [
    "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]",
    "<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>", "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>",
]  # fmt: skip


def tool(name: str, **properties: JsonSchema) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": [*properties]}
    return {"type": "function", "function": {"name": name, "description": f"Does {name}.", "parameters": parameters}}


JsonSchema = dict[str, Any]
TOOL_LIST = [
    tool("get_weather", city={"type": "string", "description": "The town"}),
    tool("add", a={"type": "integer"}, b={"type": "integer"}),
]
ARGUMENTS: list[tuple[str, dict[str, Any]]] = [("get_weather", {"city": "Orléans"}), ("add", {"a": 12, "b": 30})]
JSON_CALLS = [
    '{"name": "get_weather", "arguments": {"city": "Orléans"}}',
    '{"name": "add", "arguments": {"a": 12, "b": 30}}',
]
TAGGED = [f"<tool_call>\n{call}\n</tool_call><|im_end|>" for call in JSON_CALLS]
KIMI_CALLS = [
    f"<|tool_calls_section_begin|><|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>"
    f"{json.dumps(said, ensure_ascii=False)}<|tool_call_end|><|tool_calls_section_end|><|im_end|>"
    for index, (name, said) in enumerate(ARGUMENTS)
]


@dataclass(frozen=True)
class Kind:
    """A kind of template: what it takes, and what the assistant writes of
    the conversation, turn by turn."""

    template: Any
    turns: list[str]
    eos: str = "<|im_end|>"
    ids: tuple[str, str] = ("call00001", "call00002")
    variables: dict[str, Any] = field(default_factory=dict)

    def conversation(self) -> list[dict[str, Any]]:
        """Two calls, one after the other, and the answer; as OpenAI
        gives it, but for the arguments."""
        talk: list[dict[str, Any]] = [{"role": "user", "content": "How warm is it, and what is 12 + 30?"}]
        for call_id, (name, arguments), result in zip(self.ids, ARGUMENTS, ("21", "42"), strict=True):
            call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
            talk += [
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "tool_call_id": call_id, "content": result},
            ]
        return [*talk, {"role": "assistant", "content": "It is 21, and 42."}]

    def save(self, folder: Path) -> Path:
        """A tokenizer with this template, as a model's folder has it."""
        tokenizer = make(CHATML)._tokenizer
        tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in TOKENS])
        folder.mkdir(parents=True, exist_ok=True)
        tokenizer.save(str(folder / "tokenizer.json"))
        named = {"eos_token": self.eos, "bos_token": "<|bos|>", "pad_token": "<|pad|>"}
        settings = {**named, "tokenizer_class": "PreTrainedTokenizerFast", "chat_template": self.template}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
        return folder


LLAMA_TURNS = [call.replace('"arguments"', '"parameters"') + "<|eot_id|>" for call in JSON_CALLS] + [
    "It is 21, and 42.<|eot_id|>"
]
KINDS = {
    "qwen2.5": Kind(QWEN25, [*TAGGED, "It is 21, and 42.<|im_end|>"]),
    "qwen2.5 marked": Kind(MARKED, [*TAGGED, "It is 21, and 42.<|im_end|>"]),
    "qwen3": Kind(QWEN3, [*TAGGED, "<think>\n\n</think>\n\nIt is 21, and 42.<|im_end|>"]),
    "llama3.1": Kind(LLAMA31, LLAMA_TURNS, eos="<|eot_id|>"),
    "llama3.1 system": Kind(LLAMA31, LLAMA_TURNS, eos="<|eot_id|>", variables={"tools_in_user_message": False}),
    "mistral": Kind(
        MISTRAL,
        [f'[TOOL_CALLS] [{call[:-1]}, "id": "call0000{number}"}}]</s>' for number,
         call in enumerate(JSON_CALLS, start=1)]
        + [" It is 21, and 42.</s>"],
        eos="</s>",
    ),
    "hermes": Kind(HERMES, [*TAGGED, "It is 21, and 42.<|im_end|>"]),
    "kimi": Kind(KIMI, [*KIMI_CALLS, "It is 21, and 42.<|im_end|>"],
                 ids=("functions.get_weather:0", "functions.add:1")),
}  # fmt: skip
