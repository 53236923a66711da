"""Population-based training over forks of one run (`rlpipe search --explore`): after each rung but
the last those that lost go on as forks of a winner, with its settings disturbed.

A fork shares its winner's iterations and training state by reference. Which winner, and which
settings, follow from the seed of the run that is searched and from names: whoever decides again
decides the same. The rest is that of halving (rlpipe/extras/search/halving.py).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from rlpipe.base.errors import UserError
from rlpipe.base.seeds import uniform
from rlpipe.config.pipeline import PipelineConfig
from rlpipe.extras.search.halving import Candidate, Decision, Search
from rlpipe.store.forks import fixed_differences
from rlpipe.store.run import Run

FACTORS = (0.8, 1.25)
GENERATION = re.compile(r"-r\d+$")


@dataclass(frozen=True)
class Population(Search):
    """What is searched, by population-based training: as many candidates in every rung."""

    strategy: str = "population"

    def check(self, parent: Run, together: int = 1) -> list[PipelineConfig]:
        """As of a Search; UserError where no candidate could become a fork, too."""
        configs = super().check(parent, together)
        if len(self.rungs) < 2:
            raise UserError(f"--rungs {self.rungs}: --explore forks winners after all but the last; name two or more")
        longest, one = [*self.candidates.items()][-1]
        self.config(parent, f"{longest}-r{len(self.rungs)}", one, self.rungs[-1])  # its name is not too long
        return configs

    def forks(
        self, parent: Run, decided: Sequence[Decision], kept: Sequence[str], lost: Sequence[str]
    ) -> dict[str, Candidate]:
        """A fork of a winner in place of each candidate that lost the rung that follows `decided`:
        NAME-3-r1 in place of NAME-3 after the first.
        """
        tried, number = self.tried(decided), len(decided)
        forks = {}
        for name in lost:
            place = GENERATION.sub("", name)
            slot = [*self.candidates].index(place)
            winner = kept[int(uniform(parent.config.seed, "search", number, slot, "winner") * len(kept))]
            copied = Candidate(winner, self.at + self.rungs[number], tried[winner].settings)
            forks[f"{place}-r{number + 1}"] = self._disturbed(parent, copied, number, slot)
        return forks

    def _disturbed(self, parent: Run, candidate: Candidate, number: int, slot: int) -> Candidate:
        """The candidate with each setting disturbed where the result is a valid config that a fork
        may have.
        """
        before = self.config(parent, candidate.run, candidate, self.rungs[number])
        for index, (name, values) in enumerate(self.vary.items()):
            value = candidate.settings[index].partition("=")[2]
            draw = uniform(parent.config.seed, "search", number, slot, name)
            for text in disturbed(value, values, draw):
                settings = [*candidate.settings]
                settings[index] = f"{name}={text}"
                if self._is_allowed(parent, changed := replace(candidate, settings=settings), number, before):
                    candidate = changed
                    break
        return candidate

    def _is_allowed(self, parent: Run, candidate: Candidate, number: int, before: PipelineConfig) -> bool:
        try:
            config = self.config(parent, candidate.run, candidate, self.rungs[number])
        except UserError:  # beyond the bounds of the field, or against a rule
            return False
        return not fixed_differences(config, before, candidate.at)


def disturbed(value: str, values: Sequence[str], draw: float) -> Iterator[str]:
    """Yields what to set in place of a value, the first that is valid is taken: a number times 0.8
    or 1.25, for fields of whole numbers the next whole one that differs; of other values one of
    `values`. `draw`, in [0, 1), chooses.
    """
    number = _number(value)
    if number is None:
        yield values[int(draw * len(values))]
        return
    for factor in FACTORS if draw < 0.5 else FACTORS[::-1]:
        moved = number * factor
        yield f"{moved:.6g}"
        if number and number.is_integer():
            whole = round(moved)
            yield str(whole if whole != number else round(number + math.copysign(1, moved - number)))


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None
