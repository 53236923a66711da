"""The sources of the views of `rlpipe sql`: small tables made from documents, and the Parquet files
of a kind of artifact as one dataset.

A file has labels (run, iteration, round): a file whose labels a query excludes is not opened.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, TypeAlias

import pyarrow as pa
import pyarrow.dataset as ds

from rlpipe.base.errors import StoreError
from rlpipe.base.hashing import canonical_json
from rlpipe.base.manifests import moment_of
from rlpipe.base.printable import printable
from rlpipe.extras.queries.catalogue import Catalogue, StoredArtifact
from rlpipe.records.columns import schema_of
from rlpipe.records.prompt import Prompt
from rlpipe.records.rollout import SCORES, Rollout
from rlpipe.store.as_files import file_system, path_of

Source: TypeAlias = "pa.Table | ds.Dataset"
Row = Mapping[str, object]  # by column
Labels = dict[str, str | int | bool | None]  # of all rows of a file, by column
File = tuple[str, int, Labels]  # key, bytes, labels
MOMENT = pa.timestamp("us")  # in UTC
PLACED = {"run": pa.string(), "iteration": pa.int32(), "round": pa.int32()}
NUMBERS, TEXTS = pa.map_(pa.string(), pa.float64()), pa.map_(pa.string(), pa.string())
FILES = pa.list_(pa.struct([("name", pa.string()), ("bytes", pa.int64()), ("sha256", pa.string())]))
RUNS = {
    "run": pa.string(), "forked_from": pa.string(), "fork_at": pa.int32(),
    "redo": pa.string(), "num_segments": pa.int32(),
    "num_iterations": pa.int32(), "iterations_planned": pa.int32(), "reward_mean": pa.float64(), "ended_at": MOMENT,
    "code_version": pa.string(), "config": pa.string(),
}  # fmt: skip
ITERATIONS = {
    "run": pa.string(), "iteration": pa.int32(), "made_by": pa.string(), "weight_version": pa.int32(),
    "state_iteration": pa.int32(),
    "reward_mean": pa.float64(), "ended_at": MOMENT, "metrics": NUMBERS,
}  # fmt: skip
ARTIFACTS = {
    "run": pa.string(), "phase": pa.string(), "iteration": pa.int32(), "stage": pa.string(), "kind": pa.string(),
    "weight_version": pa.int32(), "num_files": pa.int32(), "bytes": pa.int64(),
    "pruned": pa.bool_(), "started_at": MOMENT,
    "ended_at": MOMENT, "folder": pa.string(), "sha256": pa.string(), "files": FILES,
    "inputs": TEXTS, "metrics": pa.string(),
    "code_version": pa.string(),
}  # fmt: skip
EVALUATIONS = {
    "run": pa.string(), "weight_version": pa.int32(), "metric": pa.string(), "value": pa.float64(), "ended_at": MOMENT,
}  # fmt: skip
DROPPED = {"run": pa.string(), "iteration": pa.int32(), "group_index": pa.int32(), "reason": pa.string()}


class Tables:
    """The sources of a store's views, each made when it is asked for."""

    def __init__(self, catalogue: Catalogue) -> None:
        self._catalogue = catalogue
        self._made: dict[str, Source] = {}

    def source(self, name: str) -> Source:
        """The source of this name, which the method of this name makes: a table, or a dataset of
        files.
        """
        if name not in self._made:
            self._made[name] = getattr(self, name)()
        return self._made[name]

    def _runs(self) -> Source:
        newest = dict(sorted(self._catalogue.iterations(), key=lambda entry: entry[1].iteration))
        rows = []
        for run in self._catalogue.runs:
            record, fork = newest.get(run.name), run.record.fork
            planned = run.record.config.get("rl", {}).get("num_iterations")
            segments = [place for place in run.places.values() if (place.phase, place.kind) == ("sft", "policy")]
            rows.append(
                {
                    "run": run.name,
                    "forked_from": fork.run if fork else None,
                    "fork_at": run.first_own - 1 if fork else None,
                    "redo": fork.redo or None if fork else None,
                    "num_segments": len(segments),
                    "num_iterations": record.iteration + 1 if record else 0,
                    "iterations_planned": planned,
                    "reward_mean": record.metrics.get("rollout/reward_mean") if record else None,
                    "ended_at": _moment(record.ended_at) if record else None,
                    "code_version": run.record.code_version,
                    "config": canonical_json(run.record.config).decode(),
                }
            )
        return _table(rows, RUNS)

    def _iterations(self) -> Source:
        rows = [
            {
                "run": name,
                "iteration": record.iteration,
                "made_by": record.run,
                "weight_version": record.weight_version,
                "state_iteration": record.state_iteration,
                "reward_mean": record.metrics.get("rollout/reward_mean"),
                "ended_at": _moment(record.ended_at),
                "metrics": [(printable(name), value) for name, value in record.metrics.items()],
            }
            for name, record in self._catalogue.iterations()
        ]
        return _table(rows, ITERATIONS)

    def _artifacts(self) -> Source:
        return _table([self._artifact_row(artifact) for artifact in self._catalogue.artifacts()], ARTIFACTS)

    def _artifact_row(self, artifact: StoredArtifact) -> Row:
        manifest, place = artifact.manifest, artifact.place
        return {
            **vars(place),  # run, phase, iteration, stage
            "kind": place.kind,
            "weight_version": manifest.weight_version,
            "num_files": len(manifest.files),
            "bytes": sum(file.bytes for file in manifest.files),
            "pruned": self._catalogue.is_pruned(artifact),
            "started_at": _moment(manifest.started_at),
            "ended_at": _moment(manifest.ended_at),
            "folder": artifact.folder,
            "sha256": artifact.sha256,
            "files": [vars(file) for file in manifest.files],
            "inputs": list(manifest.inputs.items()),
            "metrics": canonical_json(manifest.metrics).decode(),
            "code_version": manifest.code_version,
        }

    def _evaluations(self) -> Source:
        rows = [
            {
                "run": artifact.run,
                "weight_version": artifact.manifest.weight_version,
                "metric": metric,
                "value": value,
                "ended_at": _moment(artifact.manifest.ended_at),
            }
            for artifact in self._catalogue.artifacts("evaluation")
            for metric, value in artifact.manifest.metrics.items()
        ]
        return _table(rows, EVALUATIONS)

    def _prompts(self) -> Source:
        return self._dataset(
            self._files(self._catalogue.artifacts("prompts"), "prompts.parquet", _placed), schema_of(Prompt), PLACED
        )

    def _rollouts(self) -> Source:
        """The rollouts of each sampling round as they were scored, or as they were sampled while
        the round is not scored."""
        catalogue = self._catalogue
        scores = catalogue.artifacts("scores")
        rounds = {(artifact.run, artifact.place.iteration, artifact.place.round_index) for artifact in scores}
        shards = [
            artifact
            for artifact in catalogue.artifacts("rollouts")
            if (artifact.run, artifact.place.iteration, artifact.place.round_index) not in rounds
        ]
        filtered = {(artifact.run, artifact.place.iteration) for artifact in self._batches()}

        def labels(artifact: StoredArtifact) -> Labels:
            maker = catalogue.maker(artifact, "rollouts")
            return {
                **_placed(artifact),
                "made_by": maker,
                "filtered": (artifact.run, artifact.place.iteration) in filtered,
            }

        files = [*self._files(scores, "scores.parquet", labels), *self._files(shards, "rollouts.parquet", labels)]
        return self._dataset(
            files, schema_of(Rollout, SCORES), PLACED | {"made_by": pa.string(), "filtered": pa.bool_()}
        )

    def _batches(self) -> list[StoredArtifact]:
        """The batch of each iteration: its last one, which is of all sampling rounds."""
        batches = self._catalogue.artifacts("batch")
        batches.sort(key=lambda artifact: artifact.place.round_index)
        return list({(artifact.run, artifact.place.iteration): artifact for artifact in batches}.values())

    def _batch(self) -> Source:
        files = self._files(self._batches(), "batch.parquet", _placed)
        return self._dataset(files, schema_of(Rollout, ["group_index", "rollout_index", "advantage"]), PLACED)

    def _gaps(self) -> Source:
        labels = {"run": pa.string(), "iteration": pa.int32()}

        def labelled(artifact: StoredArtifact) -> Labels:
            return {"run": artifact.run, "iteration": artifact.place.iteration}

        files = self._files(self._catalogue.artifacts("gap"), "gap.parquet", labelled)
        # DuckDB takes no float16 from Arrow
        schema = pa.schema(
            [("group_index", pa.int32()), ("rollout_index", pa.int32()), ("gap", pa.list_(pa.float32()))]
        )
        return self._dataset(files, schema, labels)

    def _dropped(self) -> Source:
        rows = [
            {"run": artifact.run, "iteration": artifact.place.iteration, "group_index": int(group), "reason": reason}
            for artifact in self._batches()
            for group, reason in artifact.manifest.metrics.get("dropped", {}).items()
        ]
        return _table(rows, DROPPED)

    def _evaluation_rollouts(self) -> Source:
        labels = {"run": pa.string(), "evaluated_version": pa.int32()}

        def labelled(artifact: StoredArtifact) -> Labels:
            return {"run": artifact.run, "evaluated_version": artifact.manifest.weight_version}

        files = self._files(self._catalogue.artifacts("evaluation"), "evaluation.parquet", labelled)
        return self._dataset(files, schema_of(Rollout, SCORES), labels)

    def _files(
        self, artifacts: Iterable[StoredArtifact], plain_name: str, labels: Callable[[StoredArtifact], Labels]
    ) -> list[File]:
        entries = [(self._catalogue.file(artifact, plain_name), artifact) for artifact in artifacts]
        return [(*file, labels(artifact)) for file, artifact in entries if file]

    def _dataset(self, files: Sequence[File], schema: pa.Schema, labels: dict[str, pa.DataType]) -> Source:
        """The files as one dataset; a column that a file lacks is null in it."""
        store = self._catalogue.store
        whole = pa.schema([*labels.items(), *schema])
        kind, system = ds.ParquetFileFormat(), file_system(store, {key: size for key, size, _ in files})
        fragments = []
        for key, _, values in files:
            known: Any = None
            for name, value in values.items():
                equal = ds.field(name) == pa.scalar(value, labels[name])
                known = equal if known is None else known & equal
            fragments.append(kind.make_fragment(path_of(store, key), system, partition_expression=known))
        return ds.FileSystemDataset(fragments, whole, kind, system)


def _placed(artifact: StoredArtifact) -> Labels:
    place = artifact.place
    return {"run": artifact.run, "iteration": place.iteration, "round": place.round_index}


def _moment(text: str) -> datetime | None:
    """A time in UTC; None for text that is not a time."""
    try:
        return moment_of(text, "a document").astimezone(UTC).replace(tzinfo=None)
    except StoreError:
        return None


def _table(rows: Sequence[Row], columns: dict[str, pa.DataType]) -> pa.Table:
    plain = [
        {name: printable(value) if isinstance(value, str) else value for name, value in row.items()} for row in rows
    ]
    return pa.Table.from_pylist(plain, schema=pa.schema(list(columns.items())))
