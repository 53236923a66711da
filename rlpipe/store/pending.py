"""What a process has made and not committed yet: its run answers with it as if it were."""

from __future__ import annotations

from dataclasses import dataclass, field

from rlpipe.base.manifests import IterationRecord, Manifest
from rlpipe.base.references import ArtifactRef


@dataclass(frozen=True)
class Pending:
    """What this process has made and is about to commit: artifacts by their folders, and records of iterations by their keys."""

    artifacts: dict[str, tuple[ArtifactRef, Manifest]] = field(default_factory=dict)
    records: dict[str, IterationRecord] = field(default_factory=dict)
