"""From a preset's name or a TOML file, and `--set a.b=c` overrides, to a checked `PipelineConfig`."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from rlpipe.config import PipelineConfig
from rlpipe.secrecy import without_passwords
from rlpipe.types import JsonDict, UserError


def read_config(source: str, overrides: list[str], presets: Path) -> PipelineConfig:
    """The config of a preset (a TOML file in `presets`) or file; UserError names the field, the value and the fix."""
    path = Path(source) if source.endswith(".toml") else presets / f"{source}.toml"
    if not path.is_file():
        known = ", ".join(sorted(p.stem for p in presets.glob("*.toml")))
        raise UserError(f"{source!r} is neither a preset ({known}) nor a TOML file")
    try:
        tree = tomllib.loads(path.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not TOML ({error})") from error
    return _overridden(tree, overrides)


def check(tree: JsonDict) -> PipelineConfig:
    """The config of a JSON tree; UserError with one line per fault."""
    try:
        return PipelineConfig.model_validate(tree)
    except ValidationError as error:
        lines = []
        for fault in error.errors():
            name = ".".join(str(part) for part in fault["loc"]) or "config"
            hint = " (no such field)" if fault["type"] == "extra_forbidden" else ""
            lines.append(f"{name}={_short(fault['input'])}: {fault['msg'].removeprefix('Value error, ')}{hint}")
        raise UserError("\n".join(lines)) from error


def _short(value: Any) -> str:
    return (
        "{...}" if isinstance(value, (dict, BaseException)) or hasattr(value, "model_dump") else without_passwords(repr(value))
    )


def _overridden(tree: JsonDict, overrides: list[str]) -> PipelineConfig:
    """Sets each `a.b=c` in the tree; c is TOML, or a plain string. `data.NAME.field` reaches every data set of that name."""
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not key:
            raise UserError(f"--set {override}: write it as section.field=value")
        _change(tree, key.strip(), _value(text), f"--set {override}")
    return check(tree)


def _change(tree: JsonDict, key: str, value: Any, told: str) -> None:
    """Sets `a.b` in the tree. `told`: how the change was asked for, for errors."""
    *sections, field = key.split(".")
    nodes: list[Any] = [tree]
    for section in sections:
        nodes = [child for node in nodes for child in _descend(node, section, told)]
    for node in nodes:
        if not isinstance(node, dict):
            raise UserError(f"{told}: {'.'.join(sections)} is no section")
        node[field] = value


def _descend(node: Any, section: str, told: str) -> list[Any]:
    if isinstance(node, list):
        matches = [entry for entry in node if entry.get("name") == section]
        if not matches:
            names = ", ".join(str(entry.get("name")) for entry in node)
            raise UserError(f"{told}: no data set named {section!r} (there are: {names})")
        return matches
    if not isinstance(node, dict):
        raise UserError(f"{told}: {section} is no section")
    return [node.setdefault(section, {})]


def _value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return None if text == "none" else text


def override_config(config: PipelineConfig, overrides: list[str]) -> PipelineConfig:
    """The config with `a.b=c` overrides; UserError as `read_config`."""
    return _overridden(config.model_dump(mode="json"), overrides)


def change_config(config: PipelineConfig, changes: JsonDict) -> PipelineConfig:
    """The config with other values, `{"a.b": value}`; UserError as `read_config`."""
    tree = config.model_dump(mode="json")
    for key, value in changes.items():
        _change(tree, key, value, f"changes: {key} = {value!r}")
    return check(tree)
