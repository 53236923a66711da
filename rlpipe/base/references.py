"""References to files and artifacts in a store, with their hashes."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from rlpipe.base.errors import UserError
from rlpipe.base.hashing import SHA256


def is_key(value: str) -> bool:
    """True when `value` can be a key in a store: a path that does not leave its root."""
    return "\0" not in value and not {"", ".", ".."} & set(value.split("/"))


@dataclass(frozen=True)
class FileRecord:
    """One file of an artifact.

    Example: FileRecord("1f0c9a/model.safetensors", 3315400, "9e1d...").
    """

    # relative to the artifact's folder; the first part is the id of the attempt that wrote it
    name: str
    bytes: int
    sha256: str

    @property
    def plain_name(self) -> str:
        """The name without the attempt, which the file has in a local copy."""
        return self.name.split("/", 1)[1]


@dataclass(frozen=True)
class ArtifactRef:
    """A committed artifact: its folder in the store and the sha256 of its manifest.

    Example: ArtifactRef("runs/a/rl/00012/policy", "5f2b...").
    """

    folder: str
    sha256: str

    def as_json(self) -> dict[str, str]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, value: Any) -> ArtifactRef:
        """Parses a reference from another process. UserError when it is invalid."""
        folder, sha256 = (value.get(name) if isinstance(value, dict) else None for name in ("folder", "sha256"))
        if (
            not isinstance(folder, str)
            or not is_key(folder)
            or not isinstance(sha256, str)
            or not SHA256.fullmatch(sha256)
        ):
            raise UserError(
                f"{value!r:.200} is not a reference to an artifact, which has the folder in the store, and the"
                " sha256 of its manifest"
            )
        return cls(folder, sha256)
