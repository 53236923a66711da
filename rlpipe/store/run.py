"""A run in the store: `run.json`, where each artifact lives, and how far the run has come.

A run is a prefix of immutable artifacts. A fork shares its parent's prefix by reference: iterations 0..at are looked up there.
A fork that redoes a stage of iteration `at` shares 0..at-1, and of `at` itself what comes before that stage.
"""

from __future__ import annotations

import json
import platform
import subprocess
from bisect import bisect_left
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path

from pydantic import ValidationError

from rlpipe.config import PipelineConfig, identity
from rlpipe.store.artifacts import MANIFEST, find
from rlpipe.store.backend import Store, check_access, open_store
from rlpipe.types import ArtifactRef, JsonDict, Manifest, StoreError, UserError, canonical_json

SHARED_BY_REDO = {  # the redone stage -> what its iteration shares with the parent's
    "score": ("prompts", "rollouts"),
    "filter": ("prompts", "rollouts", "scores"),
    "train": ("prompts", "rollouts", "scores", "batch"),
}
LIBRARIES = ("torch", "transformers", "prefect", "mlflow", "reasoning-gym", "tokenizers", "pyarrow")


@dataclass(frozen=True)
class Run:
    """One run of a store, with the config it is worked on with now."""

    store: Store
    config: PipelineConfig
    parent: Run | None = None
    fork_at: int = -1  # the newest RL iteration that is wholly the parent's
    redo: str = ""  # the stage that iteration fork_at + 1 redoes; empty: the iteration is all its own

    @property
    def name(self) -> str:
        return self.config.run

    @property
    def root(self) -> str:
        return f"runs/{self.name}"

    def owner(self, phase: str, iteration: int, stage: str = "") -> Run:
        """The run that computed a stage of this iteration: this one, or the ancestor it was forked from.

        Without a stage: the run that trained the iteration and committed it.
        """
        if self.parent is not None and (phase != "rl" or iteration <= self.fork_at or self._shares(iteration, stage)):
            return self.parent.owner(phase, iteration, stage)
        return self

    def _shares(self, iteration: int, stage: str) -> bool:
        return self.redoes(iteration) and stage.split("/", 1)[0] in SHARED_BY_REDO[self.redo]

    def redoes(self, iteration: int) -> bool:
        """Whether this is the iteration that is redone from what the parent stored of it."""
        return bool(self.redo) and iteration == self.fork_at + 1

    def folder(self, phase: str, iteration: int, stage: str) -> str:
        """The store folder of a stage's artifact. Example: runs/a/rl/00012/policy."""
        root = self.owner(phase, iteration, stage).root
        if phase in ("base", "data"):
            return f"{root}/{'base' if phase == 'base' else 'sft'}/{stage}"
        return f"{root}/{phase}/{iteration:05d}/{stage}"

    def artifact(self, phase: str, iteration: int, stage: str) -> tuple[ArtifactRef, Manifest] | None:
        """The committed artifact, or None."""
        return find(self.store, self.folder(phase, iteration, stage))

    def committed(self, phase: str, iteration: int, stage: str) -> tuple[ArtifactRef, Manifest]:
        """The committed artifact; StoreError when it is missing."""
        found = self.artifact(phase, iteration, stage)
        if found is None:
            raise StoreError(f"{self.store.address(self.folder(phase, iteration, stage))}/{MANIFEST} is missing from the store")
        return found

    def iteration_key(self, iteration: int) -> str:
        return f"{self.owner('rl', iteration).root}/rl/{iteration:05d}/iteration.json"

    def iteration_record(self, iteration: int) -> JsonDict | None:
        """What the commit of an iteration says, or None when it is not committed."""
        key = self.iteration_key(iteration)
        return json.loads(self.store.read(key)) if self.store.exists(key) else None

    def num_committed(self, phase: str, total: int) -> int:
        """How many of the first `total` iterations (segments, for sft) are committed.

        Commits form a prefix, so bisection finds it: log2(total) look-ups, at iteration 1,000 as at iteration 10.
        """
        return bisect_left(range(total), True, key=lambda iteration: not self._is_committed(phase, iteration))

    def _is_committed(self, phase: str, iteration: int) -> bool:
        if phase == "rl":
            return self.store.exists(self.iteration_key(iteration))
        return self.store.exists(f"{self.folder(phase, iteration, 'policy')}/{MANIFEST}")

    @property
    def num_segments(self) -> int:
        """SFT segments that are planned; out of patience, fewer are trained."""
        sft = self.config.sft
        return -(-sft.num_steps // sft.segment_steps)

    @property
    def sft_complete(self) -> bool:
        """Whether no segment is missing, and the choice among them is made where they are validated."""
        if self.config.sft.validated:
            return self.artifact("data", 0, "selection") is not None
        return self.num_committed("sft", self.num_segments) == self.num_segments

    def sft_result(self) -> tuple[int, int]:
        """(the segment whose policy RL starts from, how many were trained), once SFT is complete; (-1, 0) without SFT."""
        if self.config.sft.validated:
            chosen = self.committed("data", 0, "selection")[1].metrics
            return chosen["segment"], chosen["num_segments"]
        return self.num_segments - 1, self.num_segments

    def start_policy(self) -> tuple[ArtifactRef, Manifest]:
        """What RL starts from, weight version 0: the policy of the last SFT segment (validated: of the best), or the base model."""
        segment, _ = self.sft_result()
        return self.committed("sft", segment, "policy") if segment >= 0 else self.committed("base", 0, "policy")

    def policy(self, version: int) -> tuple[ArtifactRef, Manifest]:
        """The policy of a weight version: iteration k makes version k + 1."""
        return self.start_policy() if version == 0 else self.committed("rl", version - 1, "policy")


@cache
def code_version() -> str:
    """The commit this code is at, or the installed version."""
    here = Path(__file__).parent
    try:
        told = subprocess.run(
            ["git", "-C", str(here), "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return version("rlpipe")
    return told.stdout.strip() if told.returncode == 0 else version("rlpipe")


def create_or_continue(config: PipelineConfig) -> Run:
    """The run of this name: created, or continued when the config computes the same thing; else UserError."""
    assert config.run, "the command line or the flow names the run"
    store = open_store(config.store)
    check_access(store)
    if find_run(store, config) is None:
        store.create(f"runs/{config.run}/run.json", canonical_json(_run_record(config, None)))
    found = find_run(store, config)
    assert found is not None, "a run was created and is not there"
    return found


def find_run(store: Store, config: PipelineConfig) -> Run | None:
    """The run of this name if there is one; UserError when it was created to compute something else. Writes nothing."""
    key = f"runs/{config.run}/run.json"
    if not store.exists(key):
        return None
    record = json.loads(store.read(key))
    differ = _differences(identity(config), identity(_recorded_config(store, key, record)))
    if differ:
        raise UserError(
            f"run {config.run} was created with other settings ({'; '.join(differ)}). Two ways out: run it again with the old ones, "
            f"or keep what it has and branch off: rlpipe fork {config.run} --at K --run NEW --set ..."
        )
    return _with_parent(store, config, record)


def open_existing(store: Store, name: str) -> Run:
    """A run with the config it was created with; UserError listing the runs when there is none of that name."""
    key = f"runs/{name}/run.json"
    if not store.exists(key):
        known = ", ".join(run_names(store)) or "none"
        raise UserError(f"no run {name!r} in {store.url} (runs: {known})")
    record = json.loads(store.read(key))
    return _with_parent(store, _recorded_config(store, key, record), record)


def run_names(store: Store) -> list[str]:
    return [name for name in store.folders("runs") if store.exists(f"runs/{name}/run.json")]


def planned_fork(run: Run, at: int, config: PipelineConfig, redo: str = "") -> Run:
    """What `fork` would create, or continue; UserError when that cannot be. Writes nothing."""
    assert redo in ("", *SHARED_BY_REDO), redo
    check_committed(run, at)
    key, forked = f"runs/{config.run}/run.json", _forked(run, at, redo)
    if run.store.exists(key):  # the same fork again continues it
        found = find_run(run.store, config) if json.loads(run.store.read(key))["fork"] == forked else None
        if found is None:
            raise UserError(f"--run {config.run}: that run exists; choose another name")
        return found
    differ = [
        line for line in _differences(identity(config), identity(run.config)) if not line.startswith(("rl.", "evaluation."))
    ]
    if differ:
        raise UserError(f"a fork shares what came before RL, so these cannot change: {'; '.join(differ)}")
    return Run(run.store, config, run, at - 1 if redo else at, redo)


def fork(run: Run, at: int, config: PipelineConfig, redo: str = "") -> Run:
    """A new run that shares `run`'s iterations 0..at and goes on with `config`; UserError when that cannot be.

    With `redo` ("score", "filter" or "train") iteration `at` is redone from that stage on; what is before it is shared.
    """
    planned_fork(run, at, config, redo)
    run.store.create(f"runs/{config.run}/run.json", canonical_json(_run_record(config, _forked(run, at, redo))))
    return planned_fork(run, at, config, redo)  # refused when another process was first, with another fork


def _forked(run: Run, at: int, redo: str) -> JsonDict:
    return {"run": run.name, "at": at} | ({"redo": redo} if redo else {})


def check_committed(run: Run, at: int) -> None:
    """UserError when there is no iteration `at` to fork at."""
    if at >= 0 and run.iteration_record(at) is not None:
        return
    count = run.num_committed("rl", 100_000)
    has = f"iterations 0 to {count - 1}" if count else "none"
    ways = [f"choose K from 0 to {count - 1}"] if count else []
    ways += [f"let `rlpipe run ... --run {run.name}` get there first"] if at >= 0 else []
    raise UserError(
        f"--at {at}: iteration {at} of run {run.name} is not committed (committed: {has}); "
        f"{', or '.join(ways) or 'there is none below 0'}"
    )


def _with_parent(store: Store, config: PipelineConfig, record: JsonDict) -> Run:
    if record["fork"] is None:
        return Run(store, config)
    at, redo = record["fork"]["at"], record["fork"].get("redo", "")
    return Run(store, config, open_existing(store, record["fork"]["run"]), at - 1 if redo else at, redo)


def _run_record(config: PipelineConfig, forked: JsonDict | None) -> JsonDict:
    return {
        "schema_version": 1,
        "config": config.model_dump(mode="json"),
        "fork": forked,
        "code_version": code_version(),
        "libraries": {name: version(name) for name in LIBRARIES} | {"python": platform.python_version()},
    }


def _differences(new: JsonDict, old: JsonDict) -> list[str]:
    return [f"{key}: {old.get(key)!r} -> {new.get(key)!r}" for key in sorted({*new, *old}) if new.get(key) != old.get(key)]


def _recorded_config(store: Store, key: str, record: JsonDict) -> PipelineConfig:
    try:
        return PipelineConfig.model_validate(record["config"])
    except ValidationError as error:
        wrong = ", ".join(".".join(map(str, fault["loc"])) for fault in error.errors())
        raise UserError(
            f"{store.address(key)} was written by rlpipe {record['code_version']}; this version does not know {wrong}"
        ) from error
