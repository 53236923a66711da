"""Successive halving over forks of one run (`rlpipe search`): what is tried, how far, who goes on.

Candidates share the run up to one iteration and have its seed, so they get the same prompts and
seeds: their scores are paired. What is decided after each rung is a document of the search, written
once: a search that was killed goes on after the last decision, and ends with the same winner. A
second strategy (rlpipe/extras/search/population.py) differs in one method, `forks`.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

from rlpipe.base.errors import StoreError, UserError
from rlpipe.base.manifests import Manifest
from rlpipe.config.pipeline import PipelineConfig, identity
from rlpipe.config.source import override_config
from rlpipe.report.curves import EVALUATION, evaluation_of
from rlpipe.store.backend import Store
from rlpipe.store.documents import read_document, sealed
from rlpipe.store.forks import check_committed, fixed_differences
from rlpipe.store.limits import reason_to_stop
from rlpipe.store.opening import open_existing, planned_fork
from rlpipe.store.progress import Progress
from rlpipe.store.run import AT_SFT, Run
from rlpipe.store.run_record import last_started, record_key, run_names

CANDIDATES_MAX = 256
FIXED = {"run", "store", "rl.num_iterations"}
CHANGES_METRICS = ("evaluation.", "data.", "rl.rewards")  # varied, evaluations may have other metrics than the run's


@dataclass(frozen=True)
class Candidate:
    """A fork that is tried: of which run, the newest iteration that it shares, its settings as in
    `--set`.
    """

    run: str
    at: int
    settings: list[str]

    @property
    def origin(self) -> str:
        return f"a fork of {self.run} at {'sft' if self.at == AT_SFT else self.at}"


@dataclass(frozen=True)
class Decision:
    """What was decided after a rung: the score of each candidate that was in it, None for one that
    could not be trained so far (the reason is in `why`); those that go on, the best first; new
    candidates by their names.
    """

    iterations: int
    scores: dict[str, float | None]
    kept: list[str]
    why: dict[str, str]
    forks: dict[str, Candidate] = field(default_factory=dict)


@dataclass(frozen=True)
class SearchOutcome:
    """The outcome of a search. `candidates`: all that were tried, by name; `winner`: the run that
    won, or the best so far; `lineage`: it, with its settings and what it was forked from;
    `stopped`: the budget that ended the search, or empty; `more`: the command that trains the
    winner on, by N iterations.
    """

    name: str
    run: str
    by: str
    candidates: dict[str, Candidate]
    decisions: list[Decision]
    winner: str
    lineage: str
    stopped: str
    more: str

    def lines(self) -> list[str]:
        """The winner, and how to go on; the tables were printed after each rung."""
        first = ["", f"search {self.name} was stopped: {self.stopped}"] if self.stopped else []
        which = "best so far" if self.stopped else "winner"
        return [*first, "", f"search {self.name}: the {which} is run {self.lineage}. For more iterations: {self.more}"]


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
    strategy: str = "halving"

    @property
    def candidates(self) -> dict[str, Candidate]:
        """Those that the search begins with, by name; the last field changes fastest."""
        chosen = [*itertools.product(*self.vary.values())]
        width = len(str(len(chosen) - 1))
        return {
            f"{self.name}-{number:0{width}d}": Candidate(
                self.run, self.at, [f"{name}={value}" for name, value in zip(self.vary, values, strict=True)]
            )
            for number, values in enumerate(chosen)
        }

    def tried(self, decided: Sequence[Decision]) -> dict[str, Candidate]:
        """All candidates so far, by name."""
        return self.candidates | {name: one for decision in decided for name, one in decision.forks.items()}

    def entrants(self, decided: Sequence[Decision]) -> list[str]:
        """The candidates of the next rung, the best so far first."""
        return [*decided[-1].kept, *decided[-1].forks] if decided else [*self.candidates]

    def check(self, parent: Run, together: int = 1) -> list[PipelineConfig]:
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
        if fixed := [name for name in self.vary if name in FIXED]:
            raise UserError(f"--vary {fixed[0]}: the search sets it itself; --rungs says how far candidates go")
        check_together(parent.config, together)
        configs = [self.config(parent, name, one, self.rungs[-1]) for name, one in self.candidates.items()]
        if len({json.dumps(identity(config)) for config in configs}) < len(configs):
            raise UserError(f"--vary: of {', '.join(self.vary)} two values, or combinations, compute the same")
        check_committed(parent, self.at, "")
        for config in configs:
            if differ := fixed_differences(config, parent.config, self.at):
                raise UserError(f"--vary: forks share what came before RL, so these cannot change: {'; '.join(differ)}")
        if not any(name.startswith(CHANGES_METRICS) for name in self.vary) and (known := evaluation_of(parent, 0)):
            self._value(known)
        standing = {*run_names(parent.store)}
        for config in configs:
            if config.run in standing:
                self.check_standing(parent, self.candidates[config.run], config)
        return configs

    def check_standing(self, parent: Run, candidate: Candidate, config: PipelineConfig) -> None:
        """UserError when the run that has the name of a candidate computes something else: its
        scores would be taken for those of the candidate.
        """
        try:
            planned_fork(open_existing(parent.store, candidate.run), candidate.at, config)
        except UserError as error:
            raise UserError(
                f"search {self.name}: the run {config.run} is there, and is not {candidate.origin} with"
                f" {', '.join(candidate.settings)}; choose another --name"
            ) from error

    def config(
        self, parent: Run, name: str, candidate: Candidate, iterations: int, sets: Sequence[str] = ()
    ) -> PipelineConfig:
        """The config of a candidate that is trained for so many iterations after the shared one,
        with further settings.
        """
        own = [f"run={json.dumps(name)}", f"store={json.dumps(parent.store.url)}"]
        own.append(f"rl.num_iterations={self.at + 1 + iterations}")
        return override_config(parent.config, [*candidate.settings, *own, *sets])

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

    def decide(
        self, parent: Run, decided: Sequence[Decision], scores: Mapping[str, float | None], why: dict[str, str]
    ) -> Decision:
        """Stores who goes on after the rung that follows `decided`: of n candidates the best
        ceil(n * keep), ties in the order of the candidates; after the last rung the best alone. A
        decision that stands is returned.
        """
        number, names = len(decided), [*self.tried(decided)]
        scored = {name: scores[name] or 0.0 for name in names if scores.get(name) is not None}
        if not scored:
            raise UserError(f"search {self.name}: no candidate came through {self.rungs[number]} iterations: {why}")
        ranked = sorted(scored, key=lambda name: -scored[name])
        is_last = number == len(self.rungs) - 1
        kept = ranked[: 1 if is_last else math.ceil(len(scores) * self.keep)]
        lost = [name for name in names if name in scores and name not in kept]
        forks = {} if is_last else self.forks(parent, decided, kept, lost)
        in_order = {name: scores[name] for name in names if name in scores}
        parent.store.create(self._key(number), sealed(Decision(self.rungs[number], in_order, kept, why, forks)))
        return read_document(parent.store, self._key(number), Decision)

    def forks(
        self, parent: Run, decided: Sequence[Decision], kept: Sequence[str], lost: Sequence[str]
    ) -> dict[str, Candidate]:
        """New candidates in place of those that lost a rung, by name: none."""
        return {}

    def ended(
        self, decided: Sequence[Decision], scores: Mapping[str, float | None], why: dict[str, str], reason: str
    ) -> Decision:
        """What stands where a budget ends the search in the rung that follows `decided`: the
        candidate with the best newest score. It is not stored: with a larger budget the search goes
        on. UserError where no candidate has a score.
        """
        entrants = self.entrants(decided)
        before = decided[-1].scores if decided else {}
        newest = {name: scores.get(name, before.get(name)) for name in entrants}
        scored = {name: score for name, score in newest.items() if score is not None}
        if not scored:
            raise UserError(f"search {self.name}: no candidate came through {self.rungs[0]} iterations: {reason}")
        best = max(scored, key=lambda name: scored[name])  # of equals the first: it was the better one before
        cut = {name: "not so far: the budget is spent" for name in entrants if name not in scores}
        return Decision(
            self.rungs[len(decided)], dict(scores), [best], why | cut | {best: "the best when the budget was spent"}
        )

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
        version = self.at + 1 + iterations
        evaluation = evaluation_of(open_existing(store, candidate), version)
        if evaluation is None:
            raise StoreError(f"run {candidate} has no evaluation of version {version}, and was trained so far")
        return self._value(evaluation)

    def _value(self, evaluation: Manifest) -> float:
        if (metric := self.by.removeprefix(EVALUATION)) not in evaluation.metrics:
            raise UserError(f"--by {self.by}: an evaluation has {', '.join(sorted(evaluation.metrics))}")
        return float(evaluation.metrics[metric])

    def outcome(self, store: Store, winner: str, lineage: str, stopped: str, more: str) -> SearchOutcome:
        """The report on a search that has ended."""
        decisions = [*self.decided(store)]
        tried = self.tried(decisions)
        return SearchOutcome(self.name, self.run, self.by, tried, decisions, winner, lineage, stopped, more)

    def reached(self, store: Store, candidate: str, iterations: int) -> bool:
        """True when a candidate is trained and evaluated so far."""
        if not store.exists(record_key(candidate)):
            return False
        run = open_existing(store, candidate)
        is_trained = run.iteration(self.at + iterations) is not None
        return is_trained and evaluation_of(run, self.at + 1 + iterations) is not None


def check_together(config: PipelineConfig, together: int) -> None:
    """UserError where so many candidates cannot be trained at once."""
    if together < 1:
        raise UserError(f"--together {together}: use a number of candidates from 1 on")
    places = {"trainer": config.trainer, "engines": config.engines}
    held = [name for name, part in places.items() if part.place == "process" and part.gpu_ids]
    if together > 1 and held:
        raise UserError(
            f"--together {together}: {held[0]}.gpu_ids={getattr(config, held[0]).gpu_ids} would be the GPUs of all of"
            f" them at once; leave it out, or start the run with {held[0]}.place = 'deployment', which starts services"
            " for each candidate"
        )
