"""The reads of pages from a store, few and small: records, manifests, and the columns of a Parquet
file that a page shows.

Committed files never change, so records and tables are kept in memory. Files are not hashed here:
`rlpipe verify` does that.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from rlpipe.base.errors import StoreError
from rlpipe.base.manifests import IterationRecord, Manifest
from rlpipe.base.references import ArtifactRef
from rlpipe.records.columns import from_table, schema_of, typed
from rlpipe.records.kinds import Int32, Text
from rlpipe.report.curves import EVALUATION, evaluation_of, sft_points
from rlpipe.store.as_files import file_system, path_of
from rlpipe.store.backend import Store
from rlpipe.store.opening import open_existing
from rlpipe.store.progress import Progress
from rlpipe.store.run import BEFORE_SFT, Run

TABLES_BYTES_MAX = 256 << 20
READERS = 16  # documents and files that are read at the same time
Record = TypeVar("Record")


class CommittedFile(NamedTuple):
    """A data file that a manifest names."""

    key: str
    bytes: int

    @classmethod
    def of(cls, artifact: tuple[ArtifactRef, Manifest], name: str) -> CommittedFile:
        """The file called `name` of an artifact; StoreError when it has none."""
        record = artifact[1].file(name)
        return cls(f"{artifact[0].folder}/{record.name}", record.bytes)


def rows_with(table: pa.Table, column: str, value: str | int) -> pa.Table:
    """The rows of a table whose column has the value."""
    return table.filter(pc.call_function("equal", [table[column], pa.scalar(value, table.schema.field(column).type)]))


@dataclass(frozen=True)
class InGroup:
    """The group of a rollout."""

    group_index: Int32


@dataclass(frozen=True)
class AskedInGroup(InGroup):
    """And its prompt."""

    prompt_id: Text


Points = list[tuple[int, float]]
# metric -> its points over iterations, weight versions (evaluation/...) or SFT steps (sft/...)
RunCurves = dict[str, Points]


class Library:
    """A store, and the data that was read from it. Its methods may be called from several
    threads.
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        self._records: dict[str, list[IterationRecord]] = {}
        self._tables: OrderedDict[tuple[str, type[Any]], pa.Table] = OrderedDict()
        self._lock = threading.Lock()

    def run(self, name: str) -> Run:
        """The run of that name; UserError listing the runs when there is none."""
        return open_existing(self.store, name)

    def records(self, run: Run) -> list[IterationRecord]:
        """The records of all committed iterations.

        Records that were read before are not read again, unless the run was replaced meanwhile.
        """
        count, known = Progress(run).num_iterations, self._records.get(run.name, [])
        if len(known) > count or (known and run.record(len(known) - 1) != known[-1]):
            known = []
        with ThreadPoolExecutor(READERS, "reading") as threads:
            records = [*known, *threads.map(run.record, range(len(known), count))]
        self._records[run.name] = records
        return records

    def curves(self, run: Run) -> RunCurves:
        """Every metric of a run: of its committed iterations, of SFT, and of the evaluations that
        are known without a listing of the store: those of iterations, of the start of SFT and RL
        and of the newest version, also where `rlpipe evaluate` made them.
        """
        records = self.records(run)
        curves = defaultdict[str, Points](list)
        for record in records:
            for name in record.metrics.keys() - {f"{EVALUATION}{name}" for name in record.evaluation}:
                curves[name].append((record.iteration, record.metrics[name]))
        evaluated = {record.weight_version: record.evaluation for record in records if record.evaluation}
        beside = {*([BEFORE_SFT] if run.config.sft.num_segments else []), 0, len(records)} - evaluated.keys()
        evaluated |= {version: manifest.metrics for version in beside if (manifest := evaluation_of(run, version))}
        for version, metrics in sorted(evaluated.items()):
            for name, value in metrics.items():
                curves[f"{EVALUATION}{name}"].append((version, value))
        progress = Progress(run)
        segments = run.sft_result()[1] if progress.sft_complete else progress.num_done("sft")
        with ThreadPoolExecutor(READERS, "reading") as threads:
            read = threads.map(lambda segment: sft_points(run, segment), range(segments))
            trained = [point for points in read for point in points]
        for point in trained:
            for name, value in point.metrics.items():
                curves[name].append((point.step, value))
        return curves

    def table(self, file: CommittedFile, record: type[Any]) -> pa.Table:
        """The columns of a record in a Parquet file; StoreError, which names it, when it lacks one.
        They are kept in memory.
        """
        key = file.key, record
        with self._lock:
            if key in self._tables:
                self._tables.move_to_end(key)
                return self._tables[key]
        table = self.read(file, record)
        with self._lock:
            self._tables[key] = table
            while len(self._tables) > 1 and sum(kept.nbytes for kept in self._tables.values()) > TABLES_BYTES_MAX:
                self._tables.popitem(last=False)
        return table

    def read(self, file: CommittedFile, record: type[Any]) -> pa.Table:
        """As `table`, but not kept in memory: for files that are read once."""
        system, address = file_system(self.store, {file.key: file.bytes}), self.store.address(file.key)
        try:
            with system.open_input_file(path_of(self.store, file.key)) as source:
                # in this thread alone: see read_table of records/columns.py
                parquet = pq.ParquetFile(source, pre_buffer=False)
                names = [name for name in schema_of(record).names if name in parquet.schema_arrow.names]
                return typed(parquet.read(names, use_threads=False), record)
        except FileNotFoundError as error:
            raise StoreError(f"{address} is missing from the store") from error
        except (pa.ArrowException, ValueError, OSError) as error:
            raise StoreError(
                f"{address} cannot be read ({error}); `rlpipe verify RUN` names what is damaged"
            ) from error

    def rows(self, file: CommittedFile, record: type[Record], group_index: int | None = None) -> list[Record]:
        """The rows of a Parquet file as records, of all groups or of one; only the record's columns
        are read.
        """
        table = self.table(file, record)
        return self.parsed(file, table if group_index is None else rows_with(table, "group_index", group_index), record)

    def parsed(self, file: CommittedFile, rows: pa.Table, record: type[Record]) -> list[Record]:
        """Some rows of a file as records; StoreError where their JSON is not valid."""
        try:
            return from_table(rows, record)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise StoreError(
                f"{self.store.address(file.key)} is no file of {record.__name__} records ({error})"
            ) from error
