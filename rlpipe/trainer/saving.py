"""Publishes the files of a policy: whole, or as a delta to the policy before, whose files are kept
on this node for that.
"""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

from pydantic import TypeAdapter

from rlpipe.base.errors import StoreError
from rlpipe.base.hashing import sha256_of
from rlpipe.base.references import FileRecord
from rlpipe.base.values import Metrics
from rlpipe.store.artifacts import Blocks
from rlpipe.store.deltas import DELTA, FRAME_BYTES, SUFFIX, Delta, DeltaFile, write_difference
from rlpipe.store.disk import link
from rlpipe.store.documents import sealed
from rlpipe.store.local_copy import materialise
from rlpipe.store.policy_files import stored_policy
from rlpipe.store.transfer import PART_BYTES
from rlpipe.trainer.jobs import JobResult, SaveJob
from rlpipe.trainer.publishing import publish_bytes, published_in_blocks
from rlpipe.trainer.ranks import Ranks

WEIGHTS = ".safetensors"


@dataclass(frozen=True)
class WrittenFiles:
    """The files of a policy that one rank wrote: as they are stored, as whole files, the file of
    each tensor, and the hashes of the parts of stored files by their names.
    """

    stored: list[FileRecord]
    files: list[DeltaFile]
    index: dict[str, str]
    parts: dict[str, Blocks]


WRITTEN: TypeAdapter[list[WrittenFiles]] = TypeAdapter(list[WrittenFiles])


class PolicyWriter:
    """Publishes the files of one policy, each on the node of the rank that wrote it.

    The caller writes whole files of weights into the folder `whole`, which the ranks of a node
    share.

    A file is stored as a delta where the job names a base that has a file of that name and size.
    """

    def __init__(self, ranks: Ranks, job: SaveJob, folder: str) -> None:
        self._ranks, self._job, self._folder = ranks, job, ranks.published / folder / job.attempt
        self.whole = ranks.scratch("saving") / job.attempt
        for needed in (self.whole, self._folder):
            needed.mkdir(parents=True, exist_ok=True)
        self._own = WrittenFiles([], [], {}, {})
        self.made_on: dict[str, int] = {}  # the node of each file that is not on the first node

    @cached_property
    def _base(self) -> dict[str, FileRecord]:
        """The whole files of the base by name; empty without a base."""
        return stored_policy(self._ranks.store, self._job.base).files if self._job.base else {}

    def weights(self, path: Path, tensors: Iterable[str], width: int) -> None:
        """Publishes the file `path` of the folder `whole`, and deletes it where no later policy
        needs it. `tensors`: the names of its tensors; `width`: bytes per number of most of them.
        """
        base, size = self._base.get(path.name), path.stat().st_size
        self._own.index.update(dict.fromkeys(tensors, path.name))
        if base is not None and base.bytes == size > 0:
            self._publish_difference(base, path, width)
        else:
            link(path, self._folder / path.name)
            self._add(self._published(self._folder / path.name))
        if not self._job.is_base:
            path.unlink()

    def together(self) -> dict[str, str]:
        """Gathers on all ranks what each one wrote; returns the file of each tensor. A
        collective.
        """
        written = WRITTEN.validate_python(self._ranks.gather(asdict(self._own)))
        made_by = {
            record.name: rank // self._ranks.node_ranks for rank, part in enumerate(written) for record in part.stored
        }
        self.made_on = {name: node for name, node in made_by.items() if node}
        self._own = WrittenFiles(
            sorted((record for part in written for record in part.stored), key=lambda record: record.name),
            sorted((file for part in written for file in part.files), key=lambda file: file.name),
            {name: file for part in written for name, file in part.index.items()},
            {name: parts for part in written for name, parts in part.parts.items()},
        )
        return self._own.index

    def documents(self, documents: dict[str, bytes]) -> JobResult:
        """Publishes the small files and, where a file is stored as a delta, the list of how each
        file is stored. Returns the records of all files, and metrics.
        """
        frames = [frame for file in self._own.files for frame in file.frames]
        # a policy does not depend on another one for its small files alone
        base = self._base if frames else {}
        for name, data in documents.items():
            digest = hashlib.sha256(data).hexdigest()
            if name in base and (base[name].bytes, base[name].sha256) == (len(data), digest):
                self._own.files.append(DeltaFile(name, len(data), digest, "base"))
            else:
                self._add(publish_bytes(self._folder, name, data))
        metrics: Metrics = {"checkpoint/policy_bytes": sum(file.bytes for file in self._own.files)}
        if frames:
            assert self._job.base is not None, "a difference to nothing"
            self._own.stored.append(
                publish_bytes(self._folder, DELTA, sealed(Delta(self._job.base, self._own.files, FRAME_BYTES)))
            )
            numbers = sum(file.bytes / file.width for file in self._own.files if file.stored == "xor")
            metrics["checkpoint/changed_fraction"] = sum(frame.changed for frame in frames) / numbers
        metrics["checkpoint/stored_bytes"] = sum(record.bytes for record in self._own.stored)
        return JobResult(metrics, policy=self._own.stored, made_on=self.made_on, parts=self._own.parts)

    def weights_alone(self) -> JobResult:
        """The result of a rank that publishes no small files: the records of the weights."""
        return JobResult(policy=self._own.stored, made_on=self.made_on)

    def _published(self, path: Path) -> FileRecord:
        """The record of a large file, the parts of which are hashed, too."""
        record, self._own.parts[f"{path.parent.name}/{path.name}"] = published_in_blocks(path, PART_BYTES)
        return record

    def _add(self, record: FileRecord) -> None:
        self._own.stored.append(record)
        self._own.files.append(DeltaFile(record.plain_name, record.bytes, record.sha256, "whole"))

    def _publish_difference(self, base: FileRecord, path: Path, width: int) -> None:
        target = self._folder / f"{path.name}{SUFFIX}"
        with tempfile.TemporaryDirectory(dir=self.whole.parent) as scratch:
            for folder in self._base_folders(base, Path(scratch)):
                file, base_sha256 = write_difference(folder / path.name, path, target, width)
                if base_sha256 == base.sha256:
                    break
            else:
                raise StoreError(f"{path.name} of {self._job.base} changed on this disk while it was read")
        self._own.files.append(file)
        self._own.stored.append(self._published(target))

    def _base_folders(self, base: FileRecord, scratch: Path) -> Iterator[Path]:
        """Yields folders that hold the base's file: the one kept since it was saved, then one
        rebuilt from the store.
        """
        kept = self._kept(self._base.values()) / base.plain_name
        if kept.is_file() and kept.stat().st_size == base.bytes:
            yield kept.parent
        assert self._job.base is not None
        yield materialise(self._ranks.store, self._job.base, scratch)

    def _kept(self, files: Iterable[FileRecord | DeltaFile]) -> Path:
        """The folder of this node in which the weights of a policy with these files are kept; its
        name is the hash of its content.
        """
        weights = [[file.name.rpartition("/")[2], file.sha256] for file in files if file.name.endswith(WEIGHTS)]
        return self._ranks.scratch("kept") / sha256_of(sorted(weights))

    def keep(self) -> None:
        """Keeps this node's files of this policy for the next policy, and deletes those of the
        policy before. To be called once per node, at the end.
        """
        for folder in self._ranks.scratch("kept").iterdir():
            shutil.rmtree(folder)
        if self._job.is_base:
            self.whole.rename(self._kept(self._own.files))
        else:
            self.whole.rmdir()
