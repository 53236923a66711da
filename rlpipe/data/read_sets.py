"""Data sets that the preflight of a run has read, for the session that the same process opens
afterwards: none is read, or generated, twice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from rlpipe.base.seeds import data_seed
from rlpipe.config.pipeline import PipelineConfig
from rlpipe.config.sections import DataConfig
from rlpipe.processes.memory import lasting_objects
from rlpipe.records.prompt import Prompt, Talk

Entry = TypeVar("Entry", Prompt, Talk)
Load = Callable[[DataConfig, int], list[Entry]]  # (data set, its seed) -> all rows of its part
_handed: dict[tuple[str, str], ReadSets] = {}  # by store and run; one at most


class ReadSets:
    """The sets of a run that are in memory. A set that was taken is not kept any more."""

    def __init__(self, seed: int) -> None:
        self._seed = seed  # of the run
        self._rows: dict[str, Any] = {}  # by all fields of the data set

    def read(self, data: DataConfig, load: Load[Entry]) -> list[Entry]:
        """The rows of a set, which are kept until they are taken."""
        rows = self._rows[data.model_dump_json()] = self.take(data, load)
        return rows

    def take(self, data: DataConfig, load: Load[Entry]) -> list[Entry]:
        """The rows of a set, as they were read before where they are kept."""
        if (rows := self._rows.pop(data.model_dump_json(), None)) is not None:
            return rows
        with lasting_objects():
            return load(data, data_seed(self._seed, data.name))

    def forget(self, data: DataConfig) -> None:
        """Drops the rows of a set, if they are kept."""
        self._rows.pop(data.model_dump_json(), None)


def hand_over(config: PipelineConfig, sets: ReadSets) -> None:
    """Keeps the sets for the session of the config's run, and none for any other."""
    _handed.clear()
    _handed[config.store, config.run] = sets


def handed_over(config: PipelineConfig) -> ReadSets:
    """The sets for the session of the config's run, once; no set where the preflight was not in
    this process, or was one of another run.
    """
    sets = _handed.pop((config.store, config.run), None)
    _handed.clear()
    return ReadSets(config.seed) if sets is None else sets
