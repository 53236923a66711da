"""The JSON documents of a run (run.json, manifests, iteration.json, leases, services): written with
a seal, parsed in one place.

The seal is the sha256 of the rest: it shows that a document was cut, edited or damaged without any
other document that names it. Documents of older versions have none. A document with a valid seal
whose content does not fit its type is from a later version.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from rlpipe.base.errors import StoreError
from rlpipe.base.hashing import sha256_of
from rlpipe.store.backend import Store

Document = TypeVar("Document")
SEAL = "seal"


class LaterVersion(StoreError):
    """Raised for a document of a later version of rlpipe: its seal is valid, and this version does
    not know its content.
    """


def sealed(document: Any) -> bytes:
    """The bytes of a document, a dataclass, with a seal. Keys keep their order, since the order of
    filters and rewards in a config has a meaning; the seal does not depend on it.
    """
    tree = dataclasses.asdict(document)
    assert SEAL not in tree, f"{type(document).__name__} has a field of that name"
    data = json.dumps(tree | {SEAL: sha256_of(tree)}, separators=(",", ":"), allow_nan=False).encode()
    assert parse_document("memory", data, type(document)) is not None, "what is written can be read"
    return data


def read_document(store: Store, key: str, kind: type[Document]) -> Document:
    """The document of `key`; StoreError naming the file when it is missing or damaged, LaterVersion
    for content that this version does not know.
    """
    assert key.endswith(".json"), f"{key} is no document"
    return parse_document(store.address(key), store.read(key), kind)


def parse_document(
    address: str, data: bytes, kind: type[Document], check: Callable[[Document], object] = lambda _: None
) -> Document:
    """The document in `data`; StoreError naming its address and the fault, LaterVersion for a
    document of a later version. `check` raises ValueError for faults that the type alone does not
    show.
    """
    is_whole = False
    try:
        tree = json.loads(data)
        if not isinstance(tree, dict):
            raise ValueError(f"it holds {str(tree)[:40]!r}, not an object")
        seal = tree.pop(SEAL, None)
        if seal is not None and seal != sha256_of(tree):
            raise ValueError("it was changed after it was written")
        is_whole = seal is not None
        document = adapter_for(kind).validate_python(tree, extra="forbid")
        check(document)
        return document
    except (ValueError, RecursionError) as error:
        if is_whole:
            raise LaterVersion(
                f"{address} was written by a later version of rlpipe, or by hand: {_fault(error)}; it needs a newer"
                " rlpipe"
            ) from error
        raise StoreError(
            f"{address} is damaged, or of another version: {_fault(error)}; restore it from a copy, or use a newer"
            " rlpipe"
        ) from error


def is_sealed(data: bytes) -> bool:
    """True when `data` is a document that some version of rlpipe wrote, unchanged since."""
    try:
        tree = json.loads(data)
        return isinstance(tree, dict) and tree.pop(SEAL, None) == sha256_of(tree)
    except (ValueError, RecursionError):
        return False


@cache
def adapter_for(kind: Any) -> TypeAdapter[Any]:
    """What parses values of a type, made once."""
    return TypeAdapter(kind)


def _fault(error: Exception) -> str:
    if not isinstance(error, ValidationError):
        return str(error)
    first = error.errors()[0]
    what = "this version has no such field" if first["type"] == "unexpected_keyword_argument" else first["msg"]
    return f"{'.'.join(map(str, first['loc'])):.200}: {what}"
