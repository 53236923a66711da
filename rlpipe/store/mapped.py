"""Records of a file that is read once on a machine: decoded into a file there, which the processes
of the machine map into memory and share. Pages are in memory only where a process reads them.
"""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import pyarrow as pa

from rlpipe.base.errors import StoreError
from rlpipe.base.references import ArtifactRef
from rlpipe.records.columns import decode_file, from_table, map_table
from rlpipe.store.artifacts import read_manifest
from rlpipe.store.backend import Store
from rlpipe.store.local_copy import fetch, made_once

Record = TypeVar("Record")
DECODED = "decoded.arrow"


def map_records(store: Store, ref: ArtifactRef, name: str, record: type[Record], folder: Path) -> list[Record]:
    """All records of one Parquet file of an artifact.

    StoreError when there is no such file, or its records are of another type. Their arrays are
    pages of a file in `folder`, which the first process makes. Once every process has its arrays,
    the file may be deleted: its pages stay as long as an array does.
    """
    file = read_manifest(store, ref.folder, ref.sha256).file(name)
    target = folder / f"{ref.sha256[:12]}-{name}"
    try:
        if not target.is_dir():
            with made_once(target) as partial:
                if not store.cache.link(file.sha256, partial / name):
                    fetch(store, ref.folder, [file], partial)
                    store.cache.add_file(file.sha256, partial / name)
                decode_file(partial / name, partial / DECODED, record)
                (partial / name).unlink()
        return from_table(map_table(target / DECODED), record)
    except (pa.ArrowException, KeyError, ValueError, TypeError, RecursionError) as error:
        address = f"{store.address(ref.folder)}/{file.name}"
        raise StoreError(f"{address} is no file of {record.__name__} records ({error})") from error


def map_records_if_any(store: Store, ref: ArtifactRef, name: str, record: type[Record], folder: Path) -> list[Record]:
    """As `map_records`; none where the artifact has no such file."""
    files = read_manifest(store, ref.folder, ref.sha256).files
    return map_records(store, ref, name, record, folder) if name in [file.plain_name for file in files] else []
