"""A chat template as text for a model's folder: chooses one of several, sets the values of its
variables, and writes the file that transformers reads.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rlpipe.base.values import plain_json

JINJA = "chat_template.jinja"  # the file that transformers prefers
STALE = "chat_template.json"  # the file of older processors
FOR_TOOLS = "tool_use"  # the name of the template that transformers uses with tools
RESERVED = {
    "true",
    "false",
    "none",
    "True",
    "False",
    "None",
    "and",
    "or",
    "not",
    "in",
    "is",
    "if",
    "else",
    "elif",
    "import",
    "recursive",
}
# transformers passes None for these if the caller passes nothing
NEVER_UNDEFINED = ("tools", "documents")


def one_of_several(templates: Mapping[str, str]) -> str:
    """A template that chooses among several by name: the one for tools if there are tools, else the
    default one. Empty without a default.
    """
    default, for_tools = templates.get("default", ""), templates.get(FOR_TOOLS)
    if not (default and for_tools):
        return default
    # Jinja removes the line break after a tag, and the last one of a template
    return f"{{% if tools is not none %}}\n{_bare(for_tools)}{{% else %}}\n{_bare(default)}{{% endif %}}\n"


def with_defaults(template: str, variables: Mapping[str, Any], special_tokens: Iterable[str]) -> str:
    """The template with default values for variables that its caller does not pass; unchanged if it
    begins with them.

    Callers always pass special tokens, so their values are always set.
    """
    lines = []
    for name, value in variables.items():
        if not name.isidentifier() or name in RESERVED:  # no template can use such a name
            continue
        missing = f"{name} is not defined" + (f" or {name} is none" if name in NEVER_UNDEFINED else "")
        setting = f"{{%- set {name} = {_literal(plain_json(value))} %}}"
        lines.append(setting if name in special_tokens else f"{{%- if {missing} %}}{setting}{{%- endif %}}")
    # Jinja removes the line break after a tag
    first = "".join(f"{line}\n" for line in lines)
    return template if template.startswith(first) else first + template


def write_template(folder: Path, template: str) -> None:
    """Writes the template of a model's folder into its own file, and removes all other templates of
    the folder.

    Files are replaced, never changed in place.
    """
    _replace(folder / JINJA, template)
    settings = folder / "tokenizer_config.json"
    if settings.is_file():
        known = json.loads(settings.read_text())
        if known.pop("chat_template", None) is not None:
            _replace(settings, json.dumps(known, indent=2, ensure_ascii=False))
    (folder / STALE).unlink(missing_ok=True)


def _bare(template: str) -> str:
    return template.removesuffix("\n")


def _literal(value: Any) -> str:
    """A JSON value as a Jinja literal: JSON, except for `none`.

    Text uses only escapes that both have.
    """
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_literal(name)}: {_literal(entry)}" for name, entry in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_literal, value)) + "]"
    return "none" if value is None else json.dumps(value, ensure_ascii=False)


def _replace(path: Path, text: str) -> None:
    partial = path.with_name(f".{path.name}.new")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)
