"""The budget of a search: that of the run whose forks are compared, for all candidates together."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from rlpipe.base.values import Metrics
from rlpipe.config.pipeline import PipelineConfig
from rlpipe.store.backend import Store
from rlpipe.store.forks import way_to_resume
from rlpipe.store.limits import COST, GPU_SECONDS, HOUR_S, SECONDS, TOKENS, cost, over_budget, spent_before
from rlpipe.store.opening import open_existing
from rlpipe.store.progress import Progress
from rlpipe.store.run import Run
from rlpipe.store.run_record import last_started, record_key


@dataclass
class SearchBudget:
    """The budget, and what each candidate has spent of it after the iterations that it shares.

    `config`: of the last start of the run that is forked, as its budget may be raised.
    """

    store: Store
    config: PipelineConfig
    spent: dict[str, Metrics] = field(default_factory=dict)

    @classmethod
    def of(cls, parent: Run, candidates: Iterable[str]) -> SearchBudget:
        """The budget of a search in progress."""
        budget = cls(parent.store, last_started(parent.store, parent.name))
        for name in candidates:
            budget.look(name)
        return budget

    def look(self, name: str) -> None:
        """Reads what a candidate has spent by now; nothing where there is no budget."""
        if any(limit for _, limit in self.config.budget) and self.store.exists(record_key(name)):
            run = replace(open_existing(self.store, name), config=last_started(self.store, name))
            self.spent[name] = spent_before(run, Progress(run).num_done("rl"))

    def left_for(self, name: str) -> tuple[list[str], str]:
        """(what is left for a candidate, as its own settings; why nothing is left for any, empty
        where something is).
        """
        spent = dict(self.spent)  # others may be at work
        if reason := over_budget(self.config, _total(spent.values())):
            used_up, limit = reason.partition(";")[0], reason.partition("=")[0]
            way = f"{way_to_resume(self.config)} --set {limit}=..."
            return [], f"{used_up} by all candidates together; `{way}` raises it, and the same search goes on"
        others, budget = _total(own for other, own in spent.items() if other != name), self.config.budget
        left = {
            "wall_clock_h": budget.wall_clock_h - others[SECONDS] / HOUR_S,
            "rollout_tokens": budget.rollout_tokens - int(others[TOKENS]),
            "gpu_h": budget.gpu_h - others[GPU_SECONDS] / HOUR_S,
            "cost": budget.cost - cost(self.config, others).get(COST, 0.0),
        }
        return [f"budget.{limit}={rest if getattr(budget, limit) else 0!r}" for limit, rest in left.items()], ""


def _total(spent: Iterable[Metrics]) -> Metrics:
    entries = [*spent]
    return {name: sum(entry[name] for entry in entries) for name in (SECONDS, TOKENS, GPU_SECONDS)}
