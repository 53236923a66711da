"""Prompts made by `reasoning_gym`, with what its own verifier needs to score them."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, Any

from rlpipe.data.prompt import Prompt, plain_json
from rlpipe.types import JsonDict, UserError

if TYPE_CHECKING:
    from rlpipe.config import DataConfig


def generate_prompts(data: DataConfig, seed: int) -> list[Prompt]:
    """`rows_max` items of a `reasoning_gym:NAME` source, both parts of the split; UserError names the field to change."""
    import reasoning_gym

    name = data.source.removeprefix("reasoning_gym:")
    if data.rows_max < 1:
        raise UserError(f"data.{data.name}.rows_max={data.rows_max}: a generator has no end; say how many items to make")
    arguments = {"seed": seed, "size": data.rows_max} | data.args
    try:
        dataset = reasoning_gym.create_dataset(name, **arguments)
        entries: list[JsonDict] = list(dataset)
    except (ValueError, TypeError, AssertionError) as error:
        raise UserError(_advice(data, name, error)) from error
    literal = _is_literal(entries[0])
    return [_prompt(data, index, entry, arguments, literal) for index, entry in enumerate(entries)]


def _advice(data: DataConfig, name: str, error: Exception) -> str:
    import difflib

    from reasoning_gym.factory import DATASETS

    if name in DATASETS:
        return f"data.{data.name}.args={data.args}: reasoning_gym's {name} refuses them ({error})"
    close = difflib.get_close_matches(name, DATASETS, n=3) or sorted(DATASETS)[:3]
    return f"data.{data.name}.source={data.source}: reasoning_gym has no {name!r}; it has {', '.join(close)} and others"


def _is_literal(entry: Any) -> bool:
    """Whether Python's literal text brings the entry back: some verifiers need the tuples that JSON would lose."""
    try:
        return ast.literal_eval(repr(entry)) == entry
    except (ValueError, SyntaxError):
        return False


def _prompt(data: DataConfig, index: int, entry: JsonDict, arguments: JsonDict, literal: bool) -> Prompt:
    verifier = {
        "dataset": data.source.removeprefix("reasoning_gym:"),
        "args": arguments,
        "entry": repr(entry) if literal else plain_json(entry),
    }
    return Prompt(
        prompt_id=f"{data.name}/{index}",
        source=data.name,
        messages=[{"role": "user", "content": entry["question"]}],
        answer=None if entry["answer"] is None else str(entry["answer"]),
        metadata={"reasoning_gym": verifier},
    )
