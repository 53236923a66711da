"""A run in the store: the places of its artifacts and of the records of its iterations.

A run is a prefix of immutable artifacts. A fork shares its parent's prefix by reference: iterations
0..at are looked up there. A fork that redoes a stage of iteration `at` shares 0..at-1, and of `at`
itself the stages before that one. One at AT_SFT shares the base model and SFT, and evaluates weight
version 0 itself.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rlpipe.base.errors import StoreError
from rlpipe.base.manifests import IterationRecord, Manifest
from rlpipe.base.references import ArtifactRef, is_key
from rlpipe.config.pipeline import SET_TEACHER, PipelineConfig
from rlpipe.store.artifacts import find, read_artifact, read_manifest
from rlpipe.store.backend import Store
from rlpipe.store.commits import Uncommitted
from rlpipe.store.documents import read_document
from rlpipe.store.lease import Lease
from rlpipe.store.run_record import SHARED_BY_REDO

AT_SFT = -1  # in place of an iteration: where a fork branches off that shares the base model and SFT, and no RL
BEFORE_SFT = -1  # in place of a weight version: the base model, where SFT makes version 0 of it


@dataclass(frozen=True)
class Run:
    """One run of a store, with the config that is used for it now.

    Artifacts that are `uncommitted` are read as if they were committed. `lease`: of its holder.
    """

    store: Store
    config: PipelineConfig
    parent: Run | None = None
    fork_at: int = AT_SFT  # the newest RL iteration that is wholly the parent's
    # the stage that iteration fork_at + 1 redoes; empty: the iteration is all its own
    redo: str = ""
    uncommitted: Uncommitted = field(default_factory=Uncommitted, compare=False, repr=False)
    lease: Lease | None = field(default=None, compare=False, repr=False)

    @property
    def name(self) -> str:
        return self.config.run

    @property
    def root(self) -> str:
        return f"runs/{self.name}"

    def owner(self, phase: str, iteration: int, stage: str = "") -> Run:
        """The run that computed a stage of this iteration: this one, or the ancestor that it was
        forked from.

        Without a stage: the run that trained the iteration and committed it.
        """
        if self.parent is not None and self._shares(phase, iteration, stage):
            return self.parent.owner(phase, iteration, stage)
        return self

    def _shares(self, phase: str, iteration: int, stage: str) -> bool:
        if stage in ("reference", "teacher") or stage.startswith(SET_TEACHER):  # a fork may name others
            assert self.parent is not None
            then, now = (run.config.frozen_models.get(stage) for run in (self.parent, self))
            return (then and then.name) == (now and now.name)
        if phase != "rl":  # one that was forked at SFT evaluates weight version 0 itself
            return stage != "evaluation" or self.fork_at != AT_SFT or bool(self.redo)
        redone_from = self.redoes(iteration) and stage.split("/", 1)[0] in SHARED_BY_REDO[self.redo]
        return iteration <= self.fork_at or redone_from

    def redoes(self, iteration: int) -> bool:
        """True when this iteration is redone from the parent's stored artifacts."""
        return bool(self.redo) and iteration == self.fork_at + 1

    def sampled_by(self, iteration: int) -> int:
        """The weight version that samples an iteration, by the run that samples it: for a redo, the
        parent.
        """
        return self.owner("rl", iteration, "rollouts").config.rl.sampled_by(iteration)

    def folder(self, phase: str, iteration: int, stage: str) -> str:
        """The store folder of a stage's artifact. Example: runs/a/rl/00012/policy."""
        root = self.owner(phase, iteration, stage).root
        if phase in ("base", "data"):
            return f"{root}/{'base' if phase == 'base' else 'sft'}/{stage}"
        return f"{root}/{phase}/{iteration:05d}/{stage}"

    def artifact(self, phase: str, iteration: int, stage: str) -> tuple[ArtifactRef, Manifest] | None:
        """The committed artifact, or None."""
        folder = self.folder(phase, iteration, stage)
        return self.uncommitted.artifacts.get(folder) or find(self.store, folder)

    def committed(self, phase: str, iteration: int, stage: str) -> tuple[ArtifactRef, Manifest]:
        """The committed artifact; StoreError when it is missing."""
        folder = self.folder(phase, iteration, stage)
        return self.uncommitted.artifacts.get(folder) or read_artifact(self.store, folder)

    def manifest(self, ref: ArtifactRef) -> Manifest:
        """The manifest of an artifact; StoreError when it is missing, or another one."""
        published = self.uncommitted.artifacts.get(ref.folder)
        return published[1] if published and published[0] == ref else read_manifest(self.store, ref.folder, ref.sha256)

    def iteration_key(self, iteration: int) -> str:
        return record_of(self.owner("rl", iteration).name, iteration)

    def iteration(self, iteration: int) -> IterationRecord | None:
        """The record of an iteration; None when the iteration is not committed.

        StoreError when the record is damaged, or is that of another iteration or run.
        """
        key = self.iteration_key(iteration)
        if published := self.uncommitted.records.get(key):
            return published
        if not self.store.exists(key):
            return None
        record = read_iteration(self.store, self.owner("rl", iteration).name, iteration)
        if not all(is_key(ref.folder) for ref in record.artifacts.values()):
            raise StoreError(f"{self.store.address(key)} is damaged: it names artifacts outside of the store")
        if record.weight_version != iteration + 1 or not -1 <= record.state_iteration <= iteration:
            raise StoreError(
                f"{self.store.address(key)} is damaged: its weight version or its state is that of another iteration"
            )
        return record

    def record(self, iteration: int) -> IterationRecord:
        """The record of an iteration that was committed; StoreError when it is missing."""
        if (record := self.iteration(iteration)) is None:
            raise StoreError(f"{self.store.address(self.iteration_key(iteration))} is missing from the store")
        return record

    def sft_result(self) -> tuple[int, int]:
        """(the segment whose policy RL starts from, how many were trained), once SFT is complete;
        (-1, 0) without SFT.
        """
        if self.config.sft.validated:
            chosen = self.committed("data", 0, "selection")[1].metrics
            return chosen["segment"], chosen["num_segments"]
        num_segments = self.config.sft.num_segments
        return num_segments - 1, num_segments

    def policy_place(self, version: int) -> tuple[str, int]:
        """(phase, iteration) of a weight version's policy, beside which its evaluation is stored:
        iteration k makes version k + 1.

        Version 0, what RL starts from, is the policy of the last SFT segment (with validation: of
        the best), or the base model; BEFORE_SFT is always the base model.
        """
        assert version >= BEFORE_SFT, version
        if version > 0:
            return "rl", version - 1
        segment = self.sft_result()[0] if version == 0 else -1
        return ("sft", segment) if segment >= 0 else ("base", 0)

    def policy(self, version: int) -> tuple[ArtifactRef, Manifest]:
        """The policy of a weight version."""
        return self.committed(*self.policy_place(version), "policy")


def record_of(run: str, iteration: int) -> str:
    """The key of an iteration's record."""
    return f"runs/{run}/rl/{iteration:05d}/iteration.json"


def read_iteration(store: Store, run: str, iteration: int) -> IterationRecord:
    """The record of an iteration that a run committed; StoreError when it is that of another."""
    record = read_document(store, key := record_of(run, iteration), IterationRecord)
    if (record.run, record.iteration) != (run, iteration):
        raise StoreError(f"{store.address(key)} is the record of iteration {record.iteration} of run {record.run}")
    return record
