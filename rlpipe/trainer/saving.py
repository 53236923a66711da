"""How the files of a policy get to the store: whole, or as differences to the policy before, whose files stay on this node for that."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path

from rlpipe.store.artifacts import write_bytes, write_file
from rlpipe.store.deltas import DELTA, FRAME_BYTES, SUFFIX, Delta, DeltaFile, write_difference
from rlpipe.store.documents import sealed
from rlpipe.store.local_copy import materialise, whole_files
from rlpipe.trainer.gang import Gang
from rlpipe.trainer.jobs import JobResult, SaveJob
from rlpipe.types import FileRecord, Metrics, StoreError, sha256_of

WEIGHTS = ".safetensors"


class PolicyWriter:
    """Writes the files of one policy, on rank 0. The caller makes the whole files of its weights in the folder `whole`, one after the other.

    A file is stored as its difference where the job names a base, and the base has a file of that name and size.
    """

    def __init__(self, gang: Gang, job: SaveJob, folder: str, scratch: Path) -> None:
        self.whole = scratch / "whole"
        self.whole.mkdir()
        self._gang, self._job, self._folder, self._scratch = gang, job, folder, scratch
        self._stored: list[FileRecord] = []
        self._files: list[DeltaFile] = []

    @cached_property
    def _base(self) -> dict[str, FileRecord]:
        """The whole files of the base by name; none without a base."""
        return whole_files(self._gang.store, self._job.base) if self._job.base else {}

    def weights(self, path: Path, width: int) -> None:
        """Writes one file of `whole`, most of whose numbers have `width` bytes, and deletes it where no later policy needs it."""
        base, size = self._base.get(path.name), path.stat().st_size
        if base is not None and base.bytes == size > 0:
            self._write_difference(base, path, width)
        else:
            self._add(write_file(self._gang.store, self._folder, self._job.attempt, path.name, path))
        if not self._job.is_base:
            path.unlink()

    def documents(self, documents: dict[str, bytes]) -> JobResult:
        """Writes the small files, and where there are differences what is stored of each file; the records of all files, and metrics."""
        gang, job = self._gang, self._job
        frames = [frame for file in self._files for frame in file.frames]
        base = self._base if frames else {}  # for the small files alone no policy is bound to another
        for name, data in documents.items():
            digest = hashlib.sha256(data).hexdigest()
            if name in base and (base[name].bytes, base[name].sha256) == (len(data), digest):
                self._files.append(DeltaFile(name, len(data), digest, "base"))
            else:
                self._add(write_bytes(gang.store, self._folder, job.attempt, name, data))
        metrics: Metrics = {"checkpoint/policy_bytes": sum(file.bytes for file in self._files)}
        if frames:
            assert job.base is not None, "a difference to nothing"
            document = sealed(Delta(job.base, self._files, FRAME_BYTES))
            self._stored.append(write_bytes(gang.store, self._folder, job.attempt, DELTA, document))
            numbers = sum(file.bytes / file.width for file in self._files if file.stored == "xor")
            metrics["checkpoint/changed_fraction"] = sum(frame.changed for frame in frames) / numbers
        metrics["checkpoint/stored_bytes"] = sum(record.bytes for record in self._stored)
        self._keep()
        return JobResult(metrics, policy=self._stored)

    def _add(self, record: FileRecord) -> None:
        self._stored.append(record)
        self._files.append(DeltaFile(record.plain_name, record.bytes, record.sha256, "whole"))

    def _write_difference(self, base: FileRecord, path: Path, width: int) -> None:
        target = self._scratch / f"{path.name}{SUFFIX}"
        for folder in self._base_folders(path.name, base.bytes):
            file, base_sha256 = write_difference(folder / path.name, path, target, width)
            if base_sha256 == base.sha256:
                break
        else:
            raise StoreError(f"{path.name} of {self._job.base} changed on this disk while it was read")
        self._files.append(file)
        self._stored.append(write_file(self._gang.store, self._folder, self._job.attempt, target.name, target))
        target.unlink()

    def _base_folders(self, name: str, size: int) -> Iterator[Path]:
        """Where the base's file is: kept since it was saved, else out of the store."""
        kept = self._kept(self._base.values()) / name
        if kept.is_file() and kept.stat().st_size == size:
            yield kept.parent
        assert self._job.base is not None
        yield materialise(self._gang.store, self._job.base, self._scratch)

    def _kept(self, files: Iterable[FileRecord | DeltaFile]) -> Path:
        """Where the weights of a policy with these files are kept on this node: a folder that is named by what it holds."""
        weights = [[file.name.rpartition("/")[2], file.sha256] for file in files if file.name.endswith(WEIGHTS)]
        return self._gang.scratch("kept") / sha256_of(sorted(weights))

    def _keep(self) -> None:
        """Keeps the files of this policy for the next one, in place of those of the one before."""
        for folder in self._gang.scratch("kept").iterdir():
            shutil.rmtree(folder)
        if self._job.is_base:
            self.whole.rename(self._kept(self._files))
