"""`run.json`: the config a run was created with, the code version, and the run that it was forked
from; `start.json`: the same of its last start. And the name of a run, which is its folder.
"""

from __future__ import annotations

import contextlib
import platform
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from rlpipe.base.errors import StoreError, UserError
from rlpipe.base.values import JsonDict
from rlpipe.config.pipeline import STORED, PipelineConfig, from_stored, stored_tree
from rlpipe.config.rules import is_run_name
from rlpipe.config.source import check
from rlpipe.store.backend import Store
from rlpipe.store.code_version import code_version
from rlpipe.store.documents import read_document, sealed

LIBRARIES = ("torch", "transformers", "prefect", "mlflow", "reasoning-gym", "tokenizers", "pyarrow")


class ConfigRefused(UserError):
    """Raised when this version does not accept the config of a run's record."""


SHARED_BY_REDO = {  # the redone stage -> what its iteration shares with the parent's
    "score": ("prompts", "rollouts"),
    "filter": ("prompts", "rollouts", "scores"),
    "train": ("prompts", "rollouts", "scores", "batch", "teacher_logprobs"),
}


def _of_a_run(config: JsonDict) -> JsonDict:
    if not isinstance(config.get("run"), str):
        raise ValueError("it names no run")
    return config


Config = Annotated[JsonDict, AfterValidator(_of_a_run)]


@dataclass(frozen=True)
class ForkRecord:
    """The part of `run` that a fork shares: its iterations 0 to `at`.

    With `redo`: the iterations before `at`, and of `at` what comes before that stage.
    """

    run: str
    at: Annotated[int, Field(ge=-1)]
    redo: Annotated[str, Field(pattern=f"^({'|'.join(SHARED_BY_REDO)}|)$")] = ""


@dataclass(frozen=True)
class RunRecord:
    """The content of run.json."""

    config: Config
    fork: ForkRecord | None
    code_version: str
    libraries: dict[str, str]
    schema_version: Literal[1] = 1  # of another, the document is refused


@dataclass(frozen=True)
class StartRecord:
    """The content of start.json: the last start's values of the settings that a start may
    change.
    """

    config: Config
    code_version: str
    libraries: dict[str, str]
    schema_version: Literal[1] = 1


def run_names(store: Store) -> list[str]:
    return [name for name in store.folders("runs") if store.exists(f"runs/{name}/run.json")]


def record_key(name: str) -> str:
    """The key of a run's run.json; UserError for an invalid name, which could lead to another
    folder.
    """
    if not is_run_name(name):
        raise UserError(
            f"run {name!r:.200}: a run name is a folder name: letters, digits, '.', '_' and '-', and no slash"
        )
    return f"runs/{name}/run.json"


def start_key(name: str) -> str:
    return f"{record_key(name).removesuffix('run.json')}start.json"


def create_record(store: Store, config: PipelineConfig, fork: ForkRecord | None) -> None:
    """Writes run.json, unless another process was first."""
    assert config.run, "a run without a name has no folder"
    store.create(record_key(config.run), sealed(RunRecord(stored_tree(config), fork, code_version(), _libraries())))


def record_start(store: Store, config: PipelineConfig) -> None:
    """Writes start.json in place of the previous one. The caller holds the run."""
    store.put(start_key(config.run), sealed(StartRecord(stored_tree(config), code_version(), _libraries())))


def _libraries() -> dict[str, str]:
    """The versions of installed libraries, by name: without tracking a run needs no MLflow."""
    installed = {}
    for name in LIBRARIES:
        with contextlib.suppress(PackageNotFoundError):
            installed[name] = version(name)
    return installed | {"python": platform.python_version()}


def read_record(store: Store, name: str) -> tuple[PipelineConfig, ForkRecord | None]:
    """The config of run.json, and for a fork the part that it shares.

    StoreError when it is damaged, or from another run or a later version; ConfigRefused when this
    version does not accept the config.
    """
    record = read_document(store, record_key(name), RunRecord)
    return _config_of(store, record_key(name), name, record), record.fork


def had_steps(store: Store, name: str) -> bool:
    """True when the run began with `rl.overlap = "steps"`, which reads as "none" today."""
    rl = read_document(store, record_key(name), RunRecord).config.get("rl")
    return isinstance(rl, dict) and rl.get("overlap") == "steps"


def last_started(store: Store, name: str) -> PipelineConfig:
    """The config of a run's last start, or the one that it was created with where there is no
    start.json yet; errors as `read_record`.
    """
    key = start_key(name)
    return (
        _config_of(store, key, name, read_document(store, key, StartRecord))
        if store.exists(key)
        else read_record(store, name)[0]
    )


def _config_of(store: Store, key: str, name: str, record: RunRecord | StartRecord) -> PipelineConfig:
    if record.config["run"] != name:  # else another run would be read, and deleted from
        raise StoreError(
            f"{store.address(key)} is the record of run {record.config['run']!r:.100}, so this folder is a copy, or was"
            " renamed; give it that name again in a store of its own"
        )
    try:
        return check(from_stored(record.config), STORED)
    except UserError as error:
        raise ConfigRefused(
            f"{store.address(key)} was written by rlpipe {record.code_version}; this version refuses {error}; that one"
            " reads it, or a newer rlpipe"
        ) from error
