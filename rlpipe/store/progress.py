"""The progress of a run: what of it is committed."""

from __future__ import annotations

import re
from bisect import bisect_left
from dataclasses import dataclass

from rlpipe.base.manifests import IterationRecord
from rlpipe.store.artifacts import MANIFEST
from rlpipe.store.run import Run

ITERATION = re.compile(r"(\d{5,6})/iteration\.json")


@dataclass(frozen=True)
class Progress:
    """What of a run is committed, looked up in the store anew for every answer; a count takes
    log2(total) look-ups.
    """

    run: Run

    def num_committed(self, phase: str, total: int) -> int:
        """The number of committed iterations (segments, for sft) among the first `total`.

        Commits form a prefix, so bisection finds it: log2(total) look-ups, at iteration 1,000 as at
        iteration 10.
        """
        return bisect_left(range(total), True, key=lambda iteration: not self._is_committed(phase, iteration))

    def num_done(self, phase: str) -> int:
        """The number of SFT segments, or RL iterations, that the config plans and that are
        committed now."""
        return self.num_committed(
            phase, self.run.config.sft.num_segments if phase == "sft" else self.run.config.rl.num_iterations
        )

    @property
    def num_iterations(self) -> int:
        """The number of committed RL iterations, also beyond those that the config plans."""
        return self.num_committed("rl", 100_000)  # no run is longer

    def iterations(self, count: int) -> list[IterationRecord]:
        """The records of the first `count` iterations, all of them committed."""
        return [self.run.record(iteration) for iteration in range(count)]

    def own_iterations(self) -> list[int]:
        """The numbers of the iterations whose records lie in this run's folder, by one listing."""
        places = (
            ITERATION.fullmatch(key.removeprefix(f"{self.run.root}/rl/"))
            for key in self.run.store.list(f"{self.run.root}/rl")
        )
        return sorted(int(place[1]) for place in places if place)

    def lost_iterations(self) -> list[int]:
        """The iterations that are not committed though later ones are.

        Iterations are committed in order, so the records of these were lost afterwards.
        """
        own = self.own_iterations()
        return sorted(set(range(self.run.fork_at + 1, own[-1] if own else 0)).difference(own))

    def _is_committed(self, phase: str, iteration: int) -> bool:
        if phase == "rl":
            return self.run.store.exists(self.run.iteration_key(iteration))
        return self.run.store.exists(f"{self.run.folder(phase, iteration, 'policy')}/{MANIFEST}")

    @property
    def sft_complete(self) -> bool:
        """True when no segment is missing, and, with validation, one of them is chosen."""
        if self.run.config.sft.validated:
            return self.run.artifact("data", 0, "selection") is not None
        return self.num_committed("sft", self.run.config.sft.num_segments) == self.run.config.sft.num_segments

    @property
    def starts_rl(self) -> bool:
        """True when all that RL starts from is committed."""
        return self.sft_complete and self.has_base and all(map(self.has_frozen, self.run.config.frozen_models))

    def has_frozen(self, stage: str) -> bool:
        """True when a frozen model is committed. `stage`: of `PipelineConfig.frozen_models`."""
        return self.run.artifact("base", 0, stage) is not None

    @property
    def has_base(self) -> bool:
        """True when tokenizer and base model are committed, and, for a copied base model, its
        probe.
        """
        last = "probe" if self.run.config.model.path else "policy"
        return self.run.artifact("base", 0, last) is not None
