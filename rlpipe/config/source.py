"""Reads a preset or a TOML file with `--set a.b=c` overrides into a validated `PipelineConfig`."""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterable
from copy import deepcopy
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from rlpipe.base.errors import UserError
from rlpipe.base.values import JsonDict
from rlpipe.config.fields import config_fields, config_sections, did_you_mean, near_names
from rlpipe.config.pipeline import RETIRED, PipelineConfig
from rlpipe.config.secrecy import without_passwords

LINE_CHARS_MAX, FAULTS_MAX = 800, 20
DEPTH_MAX = 40  # parts of a field's name: those of arguments are the deepest
NAME_CHARS_MAX = 200  # of a name that is told
FILE_BYTES_MAX = 8 << 20
KEPT = ("run", "store", "scratch", "tracking")
# a field, its new value, and the user's form of the change, for errors
Change = tuple[str, Any, str]
Changes = dict[str, Any]  # of a flow run: a field's dotted name -> its new value
# the beginning of TOML: an array, a string or a table, but not a template such as `{answer}` or `{%
# if x = y %}`
AS_TOML = re.compile(r"""\s*([\["']|\{\s*[\w."'-]+\s*=)""")


def read_config(source: str, overrides: list[str], presets: Path) -> PipelineConfig:
    """Reads the config of a preset (a TOML file in `presets`) or of a file. UserError naming the
    field, the value and the fix.
    """
    return _changed(_read(source, presets), map(_override, overrides))


def _read(source: str, presets: Path) -> JsonDict:
    """The values of a preset or another file, laid over those of the one that it `extends`, and so
    on. UserError when one of them cannot be read.
    """
    path = _path(source, presets)
    layers = {path.resolve(): _content(path)}
    while (base := layers[path.resolve()].pop("extends", None)) is not None:
        origin = f"{path}: extends={base!r:.{NAME_CHARS_MAX}}"
        if not isinstance(base, str):
            raise UserError(f"{origin}: name one preset, or one file that ends in .toml")
        try:
            path = _path(str(path.parent / base) if base.endswith(".toml") else base, presets)
        except UserError as error:
            raise UserError(f"{origin}: {error}") from error
        except OSError as error:  # a name that no file can have
            raise UserError(f"{origin}: {error.strerror}") from error
        if path.resolve() in layers:
            circle = " -> ".join(file.name for file in [*layers, path])
            raise UserError(f"{origin}: makes a circle ({circle}); remove one `extends`")
        layers[path.resolve()] = _content(path)
    tree: JsonDict = {}
    for layer in reversed(layers.values()):
        _lay_over(tree, layer)
    return tree


def _path(source: str, presets: Path) -> Path:
    """The path of a preset or another file. UserError when there is none."""
    path = Path(source) if source.endswith(".toml") else presets / f"{source}.toml"
    if not path.is_file() and path.parent != presets:
        raise UserError(f"{source:.{NAME_CHARS_MAX}}: there is no such file")
    if not path.is_file():
        known = sorted(preset.stem for preset in presets.glob("*.toml"))
        near = did_you_mean(difflib.get_close_matches(source.removesuffix(".toml"), known, cutoff=0.5))
        raise UserError(
            f"{source!r:.{NAME_CHARS_MAX}} is neither a preset ({', '.join(known)}) nor a file that ends in .toml{near}"
        )
    return path


def _content(path: Path) -> JsonDict:
    """The content of a TOML file. UserError when it cannot be read."""
    try:
        if (size := path.stat().st_size) > FILE_BYTES_MAX:
            raise UserError(
                f"{path}: has {size:,} bytes, and a config at most {FILE_BYTES_MAX:,}; data belong into files of"
                " their own"
            )
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:  # also for too many digits or brackets
        raise UserError(f"{path}: not TOML ({error})") from error


def _lay_over(tree: JsonDict, layer: JsonDict) -> None:
    """Puts the values of `layer` into the tree: tables key by key, all else in place of what was
    there.
    """
    pending = [(tree, layer)]
    while pending:  # no recursion: a file may nest deeper than Python's stack
        below, above = pending.pop()
        for key, value in above.items():
            if isinstance(value, dict) and isinstance(below.get(key), dict):
                pending.append((below[key], value))
            else:
                below[key] = value


def check(tree: JsonDict, context: str | JsonDict = "") -> PipelineConfig:
    """Validates a JSON tree; returns the config. UserError with one line per fault.

    `context`: STORED for a run's record, else the tree before it was changed.

    Faults of other fields are found beside unknown fields, too: these are removed for a second
    check.
    """
    if name := _too_deep(tree):
        raise UserError(
            f"{name[:80]}...: has {DEPTH_MAX} names or more between dots, and no field has so many; `rlpipe"
            " fields` lists all fields"
        )
    try:
        return PipelineConfig.model_validate(tree, context=context)
    except ValidationError as error:
        faults = error.errors()
    # finding similar names takes some time
    named_faults = faults if len(faults) <= FAULTS_MAX else faults[:2]
    texts = [_fault_line(_dotted(tree, fault["loc"]), fault) for fault in named_faults]
    if len(faults) > len(named_faults):
        texts.append(f"and {len(faults) - len(named_faults):,} more faults")
    elif unknown := [fault["loc"] for fault in faults if fault["type"] == "extra_forbidden"]:
        try:
            check(_without(tree, unknown), context)
        except UserError as others:
            texts.append(str(others))
    raise UserError("\n".join(dict.fromkeys(_short(line) for text in texts for line in text.splitlines())))


def _too_deep(tree: JsonDict) -> str:
    """The name of a value that is nested too deep; empty without one."""
    pending: list[tuple[Any, str, int]] = [(tree, "", 0)]
    while pending:
        node, name, depth = pending.pop()
        if depth >= DEPTH_MAX:
            return name
        entries = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
        pending += [(entry, f"{name}.{key}".lstrip("."), depth + 1) for key, entry in entries]
    return ""


def _without(tree: JsonDict, fields: list[tuple[int | str, ...]]) -> JsonDict:
    """A copy of the tree without these fields."""
    copy = deepcopy(tree)
    for *parents, name in fields:
        node: Any = copy
        for parent in parents:
            node = node[parent]
        del node[name]
    return copy


def _short(line: str) -> str:
    """Shortens a line in the middle of a long value: the field and the fault are at its ends."""
    return line if len(line) <= LINE_CHARS_MAX else f"{line[: LINE_CHARS_MAX // 4]} ... {line[-LINE_CHARS_MAX // 2 :]}"


def _fault_line(name: str, fault: ErrorDetails) -> str:
    """Describes a fault: the field, its value, the error, and similar names."""
    message = fault["msg"].removeprefix("Value error, ")
    if not fault["loc"]:  # a fault of the whole config, whose message begins with the field
        return message
    section, is_table = name.split(".", 1)[0], isinstance(fault["input"], dict)
    listed = f"`rlpipe fields {section if section in config_sections() else ''}".rstrip() + "` lists them"
    retired = {f"{of}.{field}": value for of, fields in RETIRED.items() for field, value in fields.items()}
    if fault["type"] == "extra_forbidden" and name in retired:
        message = f"this field no longer exists, its value is always {retired[name]}; remove it"
    elif fault["type"] == "extra_forbidden":
        kind = "section" if "." not in name and is_table else "field"
        message = f"no such {kind}{did_you_mean(near_names(name)) or f' ({listed})'}"
    elif fault["type"] == "model_type":
        message = f"this is a section; give a value to one of its fields ({listed})"
    elif fault["type"] == "string_pattern_mismatch":  # which says little to a person
        message += "".join(f" ({field.description})" for field in config_fields() if field.name == name)
    return f"{name}: {message}" if is_table else f"{name}={without_passwords(repr(fault['input']))}: {message}"


def _dotted(tree: JsonDict, location: tuple[int | str, ...]) -> str:
    """The name of a field as in `--set`: with the name of a data set, not its index."""
    parts = [str(part) for part in location]
    if parts[:1] == ["data"] and len(parts) > 1 and isinstance(entry := tree["data"][int(parts[1])], dict):
        parts[1] = str(entry.get("name", parts[1]))
    return ".".join(parts)


def _override(override: str) -> Change:
    """Parses the change `a.b=c`. c is TOML, or plain text such as `{answer}`. UserError when it
    begins like TOML and is invalid.
    """
    key, equals, text = override.partition("=")
    if not equals or not key.strip():
        raise UserError(f"--set {override}: write it as section.field=value")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError) as error:
        if AS_TOML.match(text):
            raise UserError(f"--set {override}: the value is not TOML ({error})") from error
        value = None if text == "none" else text
    return key.strip(), value, f"--set {override}"


def _changed(tree: JsonDict, changes: Iterable[Change], before: JsonDict | None = None) -> PipelineConfig:
    """The config with these changes. `before`: the earlier values, if they are of a run.

    `data.NAME.field` changes every data set of that name.
    """
    for change in changes:
        _change(tree, *change)
    return check(tree, before or "")


def _change(tree: JsonDict, key: str, value: Any, origin: str) -> None:
    """Sets `a.b` in the tree."""
    *sections, field = key.split(".", DEPTH_MAX)
    nodes: list[Any] = [tree]
    for section in sections:
        nodes = [child for node in nodes for child in _descend(node, section, origin)]
    for node in nodes:
        if isinstance(node, list):
            raise UserError(
                f"{origin}: {'.'.join(sections)} is a list; write {'.'.join(sections)}.NAME.{field} ({_names(node)})"
            )
        if not isinstance(node, dict):
            raise UserError(f"{origin}: {'.'.join(sections)} is no section")
        node[field] = value


def _descend(node: Any, section: str, origin: str) -> list[Any]:
    if isinstance(node, list):
        matches = [entry for entry in node if isinstance(entry, dict) and entry.get("name") == section]
        if not matches:
            raise UserError(f"{origin}: no data set named {section!r} ({_names(node)})")
        return matches
    if not isinstance(node, dict):
        raise UserError(f"{origin}: {section} is no section")
    return [node.setdefault(section, {})]


def _names(entries: list[Any]) -> str:
    names = dict.fromkeys(str(entry.get("name")) for entry in entries if isinstance(entry, dict))
    return f"there are: {', '.join(names) or 'none'}"


def override_config(config: PipelineConfig, overrides: list[str]) -> PipelineConfig:
    """The config with `a.b=c` overrides. UserError as `read_config`."""
    tree = config.model_dump(mode="json")
    return _changed(tree, map(_override, overrides), deepcopy(tree))


def change_config(config: PipelineConfig, changes: Changes, presets: Path | None = None) -> PipelineConfig:
    """The config with changes `{"a.b": value}`. UserError as `read_config`.

    With `presets`, `{"preset": NAME}` replaces the config by that preset, as `rlpipe run NAME`
    does; only the places of the config (KEPT) stay, unless the preset sets them.
    """
    before, changes = config.model_dump(mode="json"), dict(changes)
    tree = deepcopy(before)
    if presets is not None and "preset" in changes:
        tree = {name: tree[name] for name in KEPT} | _read(str(changes.pop("preset")), presets)
    return _changed(tree, [(key, value, f"changes: {key} = {value!r}") for key, value in changes.items()], before)
