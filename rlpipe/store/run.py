"""A run in the store: `run.json`, the places of its artifacts, and its progress.

A run is a prefix of immutable artifacts. A fork shares its parent's prefix by reference: iterations
0..at are looked up there. A fork that redoes a stage of iteration `at` shares 0..at-1, and of `at`
itself the stages before that one. One at AT_SFT shares the base model and SFT, and evaluates weight
version 0 itself.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from dataclasses import dataclass, field, replace
from pathlib import Path

from rlpipe.base.errors import StoreError, UserError
from rlpipe.base.manifests import IterationRecord, Manifest
from rlpipe.base.references import ArtifactRef, is_key
from rlpipe.config.pipeline import PipelineConfig, as_begun
from rlpipe.store.artifacts import MANIFEST, find, read_artifact, read_manifest
from rlpipe.store.backend import Store, check_access, open_store
from rlpipe.store.commits import Uncommitted
from rlpipe.store.documents import read_document
from rlpipe.store.forks import AT_SFT, check_committed, differences, fixed_differences, way_to_change, way_to_resume
from rlpipe.store.lease import Lease
from rlpipe.store.run_record import SHARED_BY_REDO, ForkRecord, create_record, read_record, record_key, run_names

BEFORE_SFT = -1  # in place of a weight version: the base model, where SFT makes version 0 of it
ITERATION = re.compile(r"(\d{5,6})/iteration\.json")


class OtherSettings(UserError):
    """Raised when the run of this name was created to compute something else; the message says what
    can be done.
    """


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
        if stage == "reference":  # rl.reference may change in a fork
            assert self.parent is not None
            return self.parent.config.rl.reference == self.config.rl.reference
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
        return f"{self.owner('rl', iteration).root}/rl/{iteration:05d}/iteration.json"

    def iteration(self, iteration: int) -> IterationRecord | None:
        """The record of an iteration; None when the iteration is not committed.

        StoreError when the record is damaged, or is that of another iteration or run.
        """
        key = self.iteration_key(iteration)
        if published := self.uncommitted.records.get(key):
            return published
        if not self.store.exists(key):
            return None
        record = read_document(self.store, key, IterationRecord)
        if (record.run, record.iteration) != (self.owner("rl", iteration).name, iteration):
            raise StoreError(
                f"{self.store.address(key)} is the record of iteration {record.iteration} of run {record.run}"
            )
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

    def iterations(self, count: int) -> list[IterationRecord]:
        """The records of the first `count` iterations, all of them committed."""
        return [self.record(iteration) for iteration in range(count)]

    def num_committed(self, phase: str, total: int) -> int:
        """The number of committed iterations (segments, for sft) among the first `total`.

        Commits form a prefix, so bisection finds it: log2(total) look-ups, at iteration 1,000 as at
        iteration 10.
        """
        return bisect_left(range(total), True, key=lambda iteration: not self._is_committed(phase, iteration))

    def num_done(self, phase: str) -> int:
        """The number of SFT segments, or RL iterations, that the config plans and that are
        committed now."""
        return self.num_committed(phase, self.num_segments if phase == "sft" else self.config.rl.num_iterations)

    @property
    def num_iterations(self) -> int:
        """The number of committed RL iterations, also beyond those that the config plans."""
        return self.num_committed("rl", 100_000)  # no run is longer

    def own_iterations(self) -> list[int]:
        """The numbers of the iterations whose records lie in this run's folder, by one listing."""
        places = (
            ITERATION.fullmatch(key.removeprefix(f"{self.root}/rl/")) for key in self.store.list(f"{self.root}/rl")
        )
        return sorted(int(place[1]) for place in places if place)

    def lost_iterations(self) -> list[int]:
        """The iterations that are not committed though later ones are.

        Iterations are committed in order, so the records of these were lost afterwards.
        """
        own = self.own_iterations()
        return sorted(set(range(self.fork_at + 1, own[-1] if own else 0)).difference(own))

    def _is_committed(self, phase: str, iteration: int) -> bool:
        if phase == "rl":
            return self.store.exists(self.iteration_key(iteration))
        return self.store.exists(f"{self.folder(phase, iteration, 'policy')}/{MANIFEST}")

    @property
    def num_segments(self) -> int:
        """The number of planned SFT segments; fewer are trained when `sft.patience` ends SFT."""
        sft = self.config.sft
        return -(-sft.num_steps // sft.segment_steps)

    @property
    def sft_complete(self) -> bool:
        """True when no segment is missing, and, with validation, one of them is chosen."""
        if self.config.sft.validated:
            return self.artifact("data", 0, "selection") is not None
        return self.num_committed("sft", self.num_segments) == self.num_segments

    @property
    def starts_rl(self) -> bool:
        """True when all that RL starts from is committed."""
        return self.sft_complete and self.has_base and self.has_reference

    @property
    def has_reference(self) -> bool:
        """True when the reference of the KL term is committed, or is not a model of its own."""
        return not self.config.rl.reference or self.artifact("base", 0, "reference") is not None

    @property
    def has_base(self) -> bool:
        """True when tokenizer and base model are committed, and, for a copied base model, its
        probe.
        """
        last = "probe" if self.config.model.path else "policy"
        return self.artifact("base", 0, last) is not None

    @property
    def forked_from(self) -> str:
        """Text on what a fork shares. Examples: `a at 5`, `a at sft`, `a at 4, redoes train of
        5`.
        """
        assert self.parent is not None, "only of a fork"
        at = "sft" if self.fork_at < 0 else self.fork_at
        return f"{self.parent.name} at {at}" + (f", redoes {self.redo} of {self.fork_at + 1}" if self.redo else "")

    def sft_result(self) -> tuple[int, int]:
        """(the segment whose policy RL starts from, how many were trained), once SFT is complete;
        (-1, 0) without SFT.
        """
        if self.config.sft.validated:
            chosen = self.committed("data", 0, "selection")[1].metrics
            return chosen["segment"], chosen["num_segments"]
        return self.num_segments - 1, self.num_segments

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


def create_or_continue(config: PipelineConfig, cache: Path | None = None) -> Run:
    """The run of this name: created, or continued when the config computes the same thing; else
    UserError. `cache`: see `Store`.
    """
    assert config.run, "the command line or the flow names the run"
    store = open_store(config.store, cache)
    check_access(store)
    if not store.exists(record_key(config.run)):
        create_record(store, config, None)
    return _continued(store, config)


def find_run(store: Store, config: PipelineConfig) -> Run | None:
    """The run of this name if there is one; OtherSettings when it was created to compute something
    else. Writes nothing.
    """
    return _continued(store, config) if store.exists(record_key(config.run)) else None


def _continued(store: Store, config: PipelineConfig) -> Run:
    run = open_existing(store, config.run)
    config = as_begun(config, run.config)
    if lost := run.lost_iterations():
        raise StoreError(
            f"{store.address(run.iteration_key(lost[0]))} is missing, and later iterations are committed; restore it"
            " from a copy"
        )
    if differ := differences(config, run.config):
        raise OtherSettings(
            f"run {config.run} was created with other settings (stored -> given: {'; '.join(differ)}). Two ways out: go"
            f" on with the stored ones, {way_to_resume(config)}; or {way_to_change(run, config)}"
        )
    return replace(run, config=config)


def open_existing(store: Store, name: str, forks: tuple[str, ...] = ()) -> Run:
    """A run with the config that it was created with; UserError listing the runs when there is none
    of that name.

    `forks`: the runs that were opened before it, from fork to parent.
    """
    if name in forks or (forks and not store.exists(record_key(name))):
        raise StoreError(
            f"{store.address(record_key(forks[-1]))} is damaged: the run that it was forked from, {name}, is not there,"
            " or its own fork"
        )
    if not store.exists(record_key(name)):
        known = ", ".join(run_names(store)) or "none"
        raise UserError(f"no run {name!r} in {store.url} (runs: {known})")
    config, shared = read_record(store, name)
    if shared is None:
        return Run(store, config)
    return _fork_of(open_existing(store, shared.run, (*forks, name)), shared.at, config, shared.redo)


def planned_fork(run: Run, at: int, config: PipelineConfig, redo: str = "") -> Run:
    """The run that `fork` would create or continue; UserError when it cannot. Writes nothing."""
    assert redo in ("", *SHARED_BY_REDO), redo
    check_committed(run, at, redo)
    planned = _fork_of(run, at, config, redo)
    if run.store.exists(record_key(config.run)):  # the same fork again continues it
        standing = open_existing(run.store, config.run)
        if standing.parent is None or standing.forked_from != planned.forked_from:
            raise UserError(f"--run {config.run}: that run exists; choose another name")
        return _continued(run.store, config)
    if differ := fixed_differences(config, run.config, at):
        raise UserError(f"a fork shares what came before RL, so these cannot change: {'; '.join(differ)}")
    return planned


def fork(run: Run, at: int, config: PipelineConfig, redo: str = "") -> Run:
    """A new run that shares `run`'s iterations 0..at and goes on with `config`; UserError when that
    is not possible.

    AT_SFT shares its SFT only. With `redo` ("score", "filter" or "train") iteration `at` is redone
    from that stage on; the stages before it are shared.
    """
    planned_fork(run, at, config, redo)
    create_record(run.store, config, ForkRecord(run.name, at, redo))
    # refused when another process was first, with another fork
    return planned_fork(run, at, config, redo)


def _fork_of(parent: Run, at: int, config: PipelineConfig, redo: str) -> Run:
    return Run(parent.store, config, parent, at - 1 if redo else at, redo)
