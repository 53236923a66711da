"""# Config

Every field of a config, by section; `rlpipe fields` prints the same (`rlpipe fields rl.clip`: those
whose names begin so). This page is made from the code, by `make docs`.

A field has one name, `section.field`, everywhere:

| where | how `rl.group_size` is set |
|---|---|
| TOML | `group_size = 16` below `[rl]` |
| command line | `--set rl.group_size=16` (the value is TOML, or plain text; `none` is no value) |
| Prefect's UI | `{"rl.group_size": 16}` in `changes`, or the form |

A TOML file may begin with `extends = "tiny"`: its values are laid over those of a preset, or of
another file ([presets.md](presets.md#profiles-dev-staging-prod)).

A data set is a `[[data]]` table in TOML. Elsewhere its fields are `data.NAME.field`, with the
`name` of the data set; data sets of one name (one for `rl`, one for `evaluation`) are set together.

A field may *change* if a run of the same name can be started again with another value. The others
are fixed for a run, because they say what is computed; those of `rl` and `evaluation` can be
changed by `rlpipe fork`. `run` and `store` say which run it is: with other values it is another
run.
"""

# The docstring above is the introduction of docs/config.md, which this module generates from the
# fields; `rlpipe fields` prints them, too.

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

from pydantic.fields import FieldInfo
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import PydanticUndefined

from rlpipe.base.errors import UserError
from rlpipe.config.pipeline import OPERATIONAL, OPERATIONAL_FIELDS, PipelineConfig
from rlpipe.config.sections import DataConfig

UNITS = {"s": "s", "h": "hours", "tokens": "tokens"}
# keys of a JSON schema -> words; only a text that must not be empty has a minLength
BOUNDS = {
    "minimum": "from {}",
    "exclusiveMinimum": "above {}",
    "maximum": "at most {}",
    "exclusiveMaximum": "below {}",
    "minLength": "not empty",
    "maxLength": "at most {} characters",
    "pattern": "pattern {}",
}
TYPES = {"string": "text", "integer": "whole number", "number": "number", "boolean": "true or false", "null": "none"}


@dataclass(frozen=True)
class ConfigField:
    """One field of the config, in words.

    Example: ConfigField("rl.top_p", "number, above 0, to 1", "1.0", False, "Nucleus ...").
    """

    name: str
    value: str
    default: str
    changes: bool
    description: str

    @property
    def line(self) -> str:
        changes = "may change" if self.changes else "fixed for a run"
        default = f" = {self.default}" if self.default else " (required)"
        return f"{self.name}{default}: {self.description} [{self.value}; {changes}]"

    @property
    def row(self) -> str:
        """A row of a Markdown table."""
        cells = [f"`{self.name}`", self.value, f"`{self.default}`" if self.default else "required"]
        cells += ["yes" if self.changes else "", self.description]
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def config_fields() -> list[ConfigField]:
    return [field for fields in config_sections().values() for field in fields]


@cache
def config_sections() -> dict[str, list[ConfigField]]:
    """The fields of every section, in the order of the form; "" has the fields outside of
    sections.
    """
    schema = PipelineConfig.model_json_schema()
    sections: dict[str, list[ConfigField]] = {"": []}
    for name, info in PipelineConfig.model_fields.items():
        model: Any = DataConfig if name == "data" else info.annotation
        fields: dict[str, FieldInfo] | None = getattr(model, "model_fields", None)
        if fields is None:
            sections[""].append(_field(name, info, schema["properties"][name]))
            continue
        parts = schema["$defs"][model.__name__]["properties"]
        path = "data.NAME" if name == "data" else name
        order = sorted(fields, key=lambda part: parts[part]["position"])
        sections[name] = [_field(f"{path}.{part}", fields[part], parts[part]) for part in order]
    return sections


def _field(name: str, info: FieldInfo, schema: JsonSchemaValue) -> ConfigField:
    default = info.get_default(call_default_factory=True, validated_data={})
    changes = name in OPERATIONAL_FIELDS or name.split(".")[0] in OPERATIONAL
    value = ", ".join([_type(schema, name), *_bounds(schema)])
    return ConfigField(
        name, value, "" if default is PydanticUndefined else _toml(default), changes, info.description or ""
    )


def _type(schema: JsonSchemaValue, name: str = "") -> str:
    """A JSON schema in words, with the unit from the end of the field's name."""
    if choices := schema.get("enum", [schema["const"]] if "const" in schema else []):
        return " or ".join(json.dumps(choice) for choice in choices)
    if "anyOf" in schema:
        return " or ".join(", ".join([_type(choice, name), *_bounds(choice)]) for choice in reversed(schema["anyOf"]))
    if schema["type"] == "array":
        return f"list of: {_type(schema['items'])}"
    if schema["type"] == "object":
        entries = schema["additionalProperties"]
        return "table" + (f" of: {_type(entries)}" if entries is not True and "type" in entries else "")
    words = name.rsplit(".", 1)[-1].split("_")
    unit = next((UNITS[word] for word in reversed(words) if word in UNITS and "per" not in words), "")
    return TYPES[schema["type"]] + (f" ({unit})" if unit and schema["type"] in ("integer", "number") else "")


def _bounds(schema: JsonSchemaValue) -> list[str]:
    return [text.format(schema[key]) for key, text in BOUNDS.items() if key in schema]


def _toml(value: Any) -> str:
    """A default in TOML syntax."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {_toml(entry)}" for key, entry in value.items()) + "}"
    return "none" if value is None else json.dumps(value)


def field_lines(prefix: str = "") -> list[str]:
    """One line for each field whose name begins with `prefix`. UserError with similar names when
    there is none.
    """
    beginning = re.sub(r"^data\.[^.]+\.", "data.NAME.", prefix)
    lines = [field.line for field in config_fields() if field.name.startswith(beginning)]
    if not lines:
        raise UserError(
            f"no field begins with {prefix!r} (`rlpipe fields` lists all){did_you_mean(near_names(prefix))}"
        )
    return lines


def near_names(name: str) -> list[str]:
    """The fields and sections that a misspelt name may mean, at most three, the most similar first.

    A correct field in a wrong section counts as very similar; `data.words.weigth` gives
    `data.words.weight`.
    """
    *path, last = name.split(".")
    data_set = path[1] if path[:1] == ["data"] and len(path) > 1 else "NAME"
    known = [field.name.replace("NAME", data_set) for field in config_fields()]
    closeness = {
        candidate: _closeness(path, last, candidate) for candidate in [*known, *filter(None, config_sections())]
    }
    near = sorted(
        (candidate for candidate in closeness if closeness[candidate] >= 0.75), key=lambda near: -closeness[near]
    )
    return [candidate for candidate in near if closeness[candidate] > closeness[near[0]] - 0.2][:3]


def _closeness(path: list[str], last: str, candidate: str) -> float:
    """The similarity of the last parts of two names, from 0 to 1 (`lr` is short for learning_rate),
    plus 0.1 in the same section.
    """
    *candidate_path, candidate_last = candidate.split(".")
    initials = "".join(word[:1] for word in candidate_last.split("_"))
    short = candidate_last.startswith(f"{last}_") or (last == initials and len(last) > 1)
    alike = 1.0 if short else difflib.SequenceMatcher(None, last, candidate_last).ratio()
    return alike + 0.1 * (path[:1] == candidate_path[:1])


def did_you_mean(names: Iterable[str]) -> str:
    """The end of an error message with similar names; empty without names."""
    text = " or ".join(names)
    return f"; did you mean {text}?" if text else ""


def markdown() -> str:
    """The text of docs/config.md."""
    texts = [str(__doc__)]
    for section, fields in config_sections().items():
        info = PipelineConfig.model_fields.get(section)
        title = (
            f"`{'[[data]]' if section == 'data' else f'[{section}]'}`: {info.description}" if info else "In no section"
        )
        header = "| field | value | default | may change | what it is |\n|---|---|---|---|---|"
        texts.append("\n".join([f"## {title}\n", header, *(field.row for field in fields)]) + "\n")
    return "\n".join(texts)


if __name__ == "__main__":
    print(markdown(), end="")
