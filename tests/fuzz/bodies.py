"""JSON bodies with one thing wrong: every place of a good body with every odd
value, and bytes that are no JSON."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any, NamedTuple

ODD: dict[str, str] = {  # as JSON text: some of it no parser of ours may take
    "null": "null", "true": "true", "minus one": "-1", "a fraction": "1.5",
    "a huge number": "1" + "0" * 400, "beyond floats": "1e999",
    "NaN": "NaN", "empty text": '""', "text": '"x"', "long text": '"' + "x" * 100_000 + '"',
    "a zero byte": '"a\\u0000b"',
    "half a character": '"\\ud800"', "a path upward": '"../../x"', "an empty list": "[]",
    "a list of null": "[null]", "lists": "[[[[]]]]",
    "an empty object": "{}", "an object": '{"a": {"b": null}}', "a deep list": "[" * 300 + "]" * 300,
}  # fmt: skip
NO_JSON: dict[str, bytes] = {
    "nothing": b"", "an open brace": b"{", "brackets": b"[" * 100_000, "bytes": b"\xff\xfe", "text": b'"x"',
    "null": b"null", "a list": b"[]",
    "a number": b"1" * 5000, "an empty object": b"{}", "unknown fields": b'{"a": 1}', "NaN": b"NaN", "XML": b"<a/>",
    "a form": b"a=1&b=2", "zeros": b"\0" * 100,
}  # fmt: skip


class Body(NamedTuple):
    """What is sent, and what is wrong with it."""

    path: str
    name: str
    data: bytes


def bodies(path: str, good: dict[str, Any]) -> Iterator[Body]:
    """All of one route. `good`: a body that it takes."""
    yield from (Body(path, name, data) for name, data in NO_JSON.items())
    for place in places(good):
        label = ".".join(map(str, place))
        yield Body(path, f"{label} is away", json.dumps(_changed(good, place, ...)).encode())
        for name, text in ODD.items():
            body = json.dumps(_changed(good, place, "@here@")).replace('"@here@"', text)
            yield Body(path, f"{label} is {name}", body.encode())
    yield Body(path, "one more field", json.dumps({**good, "no_such": 1}).encode())


def places(tree: Any, before: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Where a value stands: of a list the first entry only."""
    entries = tree.items() if isinstance(tree, dict) else [(0, tree[0])] if isinstance(tree, list) and tree else []
    for key, value in entries:
        yield (*before, key)
        yield from places(value, (*before, key))


def _changed(good: Any, place: tuple[str | int, ...], value: Any) -> Any:
    tree = copy.deepcopy(good)
    *outer, last = place
    node = tree
    for key in outer:
        node = node[key]
    if value is ...:
        del node[last]
    else:
        node[last] = value
    return tree
