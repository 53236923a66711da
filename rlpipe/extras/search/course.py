"""The course of a search, rung after rung: whom to train how far, and what came of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from rlpipe.config.pipeline import PipelineConfig
from rlpipe.extras.search.budget import SearchBudget
from rlpipe.extras.search.halving import Decision, Search
from rlpipe.extras.search.picture import draw_candidates
from rlpipe.extras.search.report import lineage, ranked, table
from rlpipe.report.curves import EVALUATION, metric_points
from rlpipe.store.opening import fork, open_existing
from rlpipe.store.run import Run
from rlpipe.store.run_record import record_key

REASON_CHARS_MAX = 200


@dataclass
class Course:
    """A search in progress. Candidates may be begun and judged in several threads.

    `scores`, `why`: of the rung in progress, as in its Decision. `over`: why the budget ends the
    search; empty while it does not.
    """

    search: Search
    parent: Run
    decided: list[Decision]
    budget: SearchBudget
    scores: dict[str, float | None] = field(default_factory=dict)
    why: dict[str, str] = field(default_factory=dict)
    over: str = ""

    @classmethod
    def begun(cls, search: Search, parent: Run) -> Course:
        """The course of a search by what is stored of it."""
        search.begin(parent.store)
        decided = [*search.decided(parent.store)]
        return cls(search, parent, decided, SearchBudget.of(parent, search.tried(decided)))

    @property
    def is_done(self) -> bool:
        return bool(self.over) or len(self.decided) == len(self.search.rungs)

    @property
    def iterations(self) -> int:
        """The iterations after the shared one up to which the rung in progress trains."""
        return self.search.rungs[len(self.decided)]

    def entrants(self) -> list[str]:
        """The candidates of the rung in progress, the best so far first."""
        return self.search.entrants(self.decided)

    def begin(self, name: str) -> PipelineConfig | None:
        """Forks a candidate; returns the config to train it with. None where it was trained so far
        before, and for all that are left once the budget is spent.
        """
        search, store = self.search, self.parent.store
        candidate = search.tried(self.decided)[name]
        if store.exists(record_key(name)):
            config = search.config(self.parent, name, candidate, self.iterations)
            search.check_standing(self.parent, candidate, config)
        if search.reached(store, name, self.iterations):
            self.scores[name] = search.score(store, name, self.iterations)
            return None
        sets, spent = self.budget.left_for(name)
        self.over = self.over or spent
        if self.over:
            return None
        config = search.config(self.parent, name, candidate, self.iterations, sets)
        fork(open_existing(store, candidate.run), candidate.at, config)
        return config

    def refuse(self, name: str, error: Exception) -> None:
        """Notes that a step would damage the policy of a candidate."""
        self.budget.look(name)
        self.scores[name], self.why[name] = None, str(error).splitlines()[0][:REASON_CHARS_MAX]

    def judge(self, name: str) -> None:
        """Notes the score of a candidate that was trained, or the rule or budget that ended it."""
        self.budget.look(name)
        reason = self.search.stopped(self.parent.store, name, self.iterations)
        if not reason:
            self.scores[name] = self.search.score(self.parent.store, name, self.iterations)
        elif reason.startswith("budget."):  # it had what the others have left of it
            self.over = self.over or self.budget.left_for(name)[1] or reason
        else:
            self.scores[name], self.why[name] = None, reason

    def decide(self) -> None:
        """Ends the rung: stores who goes on. Once the budget is spent the best so far stands, and
        nothing is stored.
        """
        search = self.search
        if self.over:
            self.decided.append(search.ended(self.decided, self.scores, self.why, self.over))
        else:
            self.decided.append(search.decide(self.parent, self.decided, self.scores, self.why))
        self.scores, self.why = {}, {}

    def report(self) -> list[str]:
        """The table of the search in Markdown."""
        return table(self.search, self.decided)

    def picture(self) -> bytes:
        """A PNG of the metric of all candidates over weight versions."""
        search, store, tried = self.search, self.parent.store, self.search.tried(self.decided)
        reached = [search.at + 1 + rung for rung in search.rungs[: len(self.decided)]]
        curves = {}
        for name in ranked(search, self.decided):
            if store.exists(record_key(name)):
                first = tried[name].at + 1
                versions = [first, *(version for version in reached if version > first)]
                curves[name] = metric_points(open_existing(store, name), search.by.removeprefix(EVALUATION), versions)
        return draw_candidates(curves, reached, search.by)

    def winner(self) -> tuple[str, str]:
        """(the run that won, or that is the best so far; its settings and what it was forked
        from).
        """
        name = self.decided[-1].kept[0]
        return name, lineage(self.search, name, self.decided)
