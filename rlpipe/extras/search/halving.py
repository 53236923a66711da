"""Successive halving over forks of one run (`rlpipe search`): what is tried, how far, who goes on.

Candidates share the run up to one iteration and have its seed, so they get the same prompts and
seeds: their scores are paired. What is decided after each rung is a document of the search, written
once: a search that was killed goes on after the last decision, and ends with the same winner.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from rlpipe.base.errors import StoreError, UserError
from rlpipe.config.pipeline import PipelineConfig, identity
from rlpipe.config.source import override_config
from rlpipe.report.curves import EVALUATION, evaluation_of
from rlpipe.store.backend import Store
from rlpipe.store.documents import read_document, sealed
from rlpipe.store.forks import check_committed
from rlpipe.store.limits import reason_to_stop
from rlpipe.store.opening import open_existing
from rlpipe.store.progress import Progress
from rlpipe.store.run import Run
from rlpipe.store.run_record import last_started

CANDIDATES_MAX = 256
FIXED = {"run", "store", "rl.num_iterations"}


@dataclass(frozen=True)
class Decision:
    """What was decided after a rung: the score of each candidate that was in it, None for one that
    could not be trained so far (the reason is in `why`); those that go on, the best first.
    """

    iterations: int
    scores: dict[str, float | None]
    kept: list[str]
    why: dict[str, str]


@dataclass(frozen=True)
class SearchReport:
    """The outcome of a search. `candidates`: name of a fork -> its settings; `more`: the command
    that trains the winner on, by N iterations.
    """

    name: str
    run: str
    by: str
    candidates: dict[str, list[str]]
    decisions: list[Decision]
    winner: str
    more: str

    def lines(self) -> list[str]:
        """The winner, and how to go on; the tables were printed after each rung."""
        settings = ", ".join(self.candidates[self.winner])
        return [
            "",
            f"search {self.name}: the winner is run {self.winner} ({settings}). For more iterations: {self.more}",
        ]


@dataclass(frozen=True)
class Search:
    """What is searched: as a document, searches/NAME/search.json.

    `vary`: field -> the values to try, as in `--set`. `rungs`: iterations after the shared one,
    `at`, at which candidates are compared. `keep`: the share that goes on. `by`: the metric.
    """

    name: str
    run: str
    at: int
    vary: dict[str, list[str]]
    rungs: list[int]
    keep: float
    by: str

    @property
    def candidates(self) -> dict[str, list[str]]:
        """Name of a fork -> its settings; the last field changes fastest."""
        chosen = [*itertools.product(*self.vary.values())]
        width = len(str(len(chosen) - 1))
        return {
            f"{self.name}-{number:0{width}d}": [
                f"{field}={value}" for field, value in zip(self.vary, values, strict=True)
            ]
            for number, values in enumerate(chosen)
        }

    def check(self, parent: Run) -> list[PipelineConfig]:
        """The configs of all candidates; UserError naming what makes no sense: an option, or a
        field of a candidate.
        """
        count = math.prod(map(len, self.vary.values()))
        if not 2 <= count <= CANDIDATES_MAX:
            raise UserError(f"--vary: {count} candidates; name fields with values, 2 to {CANDIDATES_MAX} in all")
        if not self.rungs or sorted({*self.rungs}) != self.rungs or self.rungs[0] < 1:
            raise UserError(f"--rungs {self.rungs}: use iterations in rising order from 1 on, such as 5,10,20")
        if not 0 < self.keep < 1:
            raise UserError(f"--keep {self.keep:g}: use a share between 0 and 1, such as 0.5")
        if not self.by.startswith(EVALUATION) or not parent.config.sets("evaluation"):
            raise UserError(
                f"--by {self.by}: use a metric of evaluations, such as {EVALUATION}words_pass_at_1, of a run that has a"
                " data set of use = 'evaluation'"
            )
        if fixed := [field for field in self.vary if field in FIXED]:
            raise UserError(f"--vary {fixed[0]}: the search sets it itself; --rungs says how far candidates go")
        configs = [self.config(parent, name, self.rungs[-1]) for name in self.candidates]
        if len({json.dumps(identity(config)) for config in configs}) < len(configs):
            raise UserError(f"--vary: of {', '.join(self.vary)} two values, or combinations, are the same")
        check_committed(parent, self.at, "")
        return configs

    def config(self, parent: Run, candidate: str, iterations: int) -> PipelineConfig:
        """The config of a candidate that is trained for so many iterations after the shared one."""
        own = [f"run={json.dumps(candidate)}", f"store={json.dumps(parent.store.url)}"]
        own.append(f"rl.num_iterations={self.at + 1 + iterations}")
        return override_config(parent.config, [*self.candidates[candidate], *own])

    def begin(self, store: Store) -> None:
        """Stores what is searched; UserError when a search of this name was begun otherwise."""
        key = f"searches/{self.name}/search.json"
        if store.create(key, sealed(self)):
            return
        before, now = asdict(read_document(store, key, Search)), asdict(self)
        if differ := [f"{name} {before[name]!r} -> {now[name]!r}" for name in now if before[name] != now[name]]:
            raise UserError(f"search {self.name} was begun otherwise ({'; '.join(differ)}): choose another --name")

    def decided(self, store: Store) -> Iterator[Decision]:
        """Yields what was decided so far, rung by rung."""
        for number in range(len(self.rungs)):
            if not store.exists(self._key(number)):
                return
            yield read_document(store, self._key(number), Decision)

    def decide(self, store: Store, number: int, scores: Mapping[str, float | None], why: dict[str, str]) -> Decision:
        """Stores who goes on after a rung: of n candidates the best ceil(n * keep), ties in the
        order of the candidates; after the last rung the best alone. A decision that stands is
        returned.
        """
        scored = {name: scores[name] or 0.0 for name in self.candidates if scores.get(name) is not None}
        if not scored:
            raise UserError(f"search {self.name}: no candidate came through {self.rungs[number]} iterations: {why}")
        ranked = sorted(scored, key=lambda name: -scored[name])
        is_last = number == len(self.rungs) - 1
        kept = ranked[: 1 if is_last else math.ceil(len(scores) * self.keep)]
        store.create(self._key(number), sealed(Decision(self.rungs[number], dict(scores), kept, why)))
        return read_document(store, self._key(number), Decision)

    def _key(self, number: int) -> str:
        return f"searches/{self.name}/rung-{number}.json"

    def stopped(self, store: Store, candidate: str, iterations: int) -> str:
        """The rule or budget that ended a candidate before so many iterations; empty where none
        did.
        """
        run = replace(open_existing(store, candidate), config=last_started(store, candidate))
        done = Progress(run).num_done("rl")
        return reason_to_stop(run, "rl", done) if done < self.at + 1 + iterations else ""

    def score(self, store: Store, candidate: str, iterations: int) -> float:
        """The metric of a candidate's evaluation after so many iterations; UserError naming the
        metrics that there are when it is none of them.
        """
        version, metric = self.at + 1 + iterations, self.by.removeprefix(EVALUATION)
        evaluation = evaluation_of(open_existing(store, candidate), version)
        if evaluation is None:
            raise StoreError(f"run {candidate} has no evaluation of version {version}, and was trained so far")
        if metric not in evaluation.metrics:
            raise UserError(f"--by {self.by}: an evaluation has {', '.join(sorted(evaluation.metrics))}")
        return float(evaluation.metrics[metric])

    def outcome(self, store: Store, more: str) -> SearchReport:
        """The report on a search that has decided all its rungs."""
        decisions = [*self.decided(store)]
        winner = decisions[-1].kept[0]
        return SearchReport(self.name, self.run, self.by, self.candidates, decisions, winner, more)

    def report(self, decided: Sequence[Decision]) -> list[str]:
        """A table in Markdown: a line a candidate, a column a rung; who came furthest first."""
        rungs = [f"after {rung}" for rung in self.rungs]
        lines = [f"| candidate | {' | '.join([*self.vary, *rungs])} | |"]
        lines.append("|---" * (len(self.vary) + len(rungs) + 2) + "|")
        came = {name: [one.scores[name] for one in decided if name in one.scores] for name in self.candidates}
        for name in sorted(came, key=lambda name: (-len(came[name]), -((came[name] or [None])[-1] or -math.inf))):
            values = [entry.partition("=")[2] for entry in self.candidates[name]]
            scores = ["-" if score is None else f"{score:.3f}" for score in came[name]]
            cells = [*values, *scores, *[""] * (len(rungs) - len(scores))]
            is_in = bool(decided) and name in decided[-1].kept
            why = next((one.why[name] for one in decided if name in one.why), "")
            end = why or ("the winner" if is_in and len(decided) == len(rungs) else "goes on" if is_in else "")
            lines.append(f"| {name} | {' | '.join(cells)} | {end} |")
        return lines
