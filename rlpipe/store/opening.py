"""Runs of a store: created, continued, opened, forked."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from rlpipe.base.errors import StoreError, UserError
from rlpipe.config.pipeline import PipelineConfig, as_begun
from rlpipe.store.backend import Store, check_access, open_store
from rlpipe.store.forks import (
    check_committed,
    differences,
    fixed_differences,
    forked_from,
    way_to_change,
    way_to_resume,
)
from rlpipe.store.progress import Progress
from rlpipe.store.run import Run
from rlpipe.store.run_record import SHARED_BY_REDO, ForkRecord, create_record, read_record, record_key, run_names


class OtherSettings(UserError):
    """Raised when the run of this name was created to compute something else; the message says what
    can be done.
    """


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
    if lost := Progress(run).lost_iterations():
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
        if standing.parent is None or forked_from(standing) != forked_from(planned):
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
