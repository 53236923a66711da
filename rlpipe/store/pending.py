"""Artifacts and records that a process has published but not committed yet.

Its run reads them as if they were committed.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rlpipe.base.manifests import IterationRecord, Manifest
from rlpipe.base.references import ArtifactRef


@dataclass(frozen=True)
class Pending:
    """Artifacts and records that this process has published and is about to commit.

    `artifacts`: by their folders; `records`: of iterations, by their keys.
    """

    artifacts: dict[str, tuple[ArtifactRef, Manifest]] = field(default_factory=dict)
    records: dict[str, IterationRecord] = field(default_factory=dict)
