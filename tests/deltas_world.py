"""Policies of any bytes in a store, written as the trainer writes
them: whole, or as differences."""

from __future__ import annotations

from pathlib import Path

from rlpipe.base.manifests import Manifest
from rlpipe.base.references import ArtifactRef
from rlpipe.store.artifacts import commit, new_attempt
from rlpipe.store.run import Run
from rlpipe.trainer.jobs import JobResult, SaveJob
from rlpipe.trainer.publishing import publication, upload
from rlpipe.trainer.ranks import Ranks
from rlpipe.trainer.saving import WEIGHTS, PolicyWriter

Files = dict[str, bytes]


def write(ranks: Ranks, folder: str, files: Files, base: ArtifactRef | None, is_base: bool = True) -> JobResult:
    """Writes the files of a policy; not committed."""
    job = SaveJob("somewhere", folder, None, new_attempt(), None, [0], 64, base, is_base)
    writer = PolicyWriter(ranks, job, folder)
    for name in sorted(files):
        if name.endswith(WEIGHTS):
            (writer.whole / name).write_bytes(files[name])
            writer.weights(writer.whole / name, [], 2)
    writer.together()
    result = writer.documents({name: data for name, data in files.items() if not name.endswith(WEIGHTS)})
    writer.keep()
    upload(ranks.store, ranks.published, publication(job, result))
    return result


def save(
    ranks: Ranks, run: Run, version: int, files: Files, base: ArtifactRef | None, is_base: bool = True
) -> ArtifactRef:
    """A committed policy of a run."""
    folder = f"{run.root}/rl/{version - 1:05d}/policy"
    written = write(ranks, folder, files, base, is_base)
    inputs = {"previous": base.sha256} if base else {}
    manifest = Manifest(
        run.name, "rl", version - 1, "policy", inputs, "0", {}, written.policy, written.metrics, version, "x", "t", "t"
    )
    return commit(run.store, folder, manifest)[0]


def changed(data: bytes, *positions: int) -> bytes:
    """The same with another byte at some positions."""
    array = bytearray(data)
    for position in positions:
        array[position] ^= 0xFF
    return bytes(array)


def read_folder(folder: Path) -> Files:
    return {path.name: path.read_bytes() for path in folder.iterdir()}
