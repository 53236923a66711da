"""Scoring of finished groups while others are sampled."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from queue import SimpleQueue

from rlpipe.records.prompt import Prompt
from rlpipe.records.rollout import Group
from rlpipe.stages.scoring import Scores, rewarded
from rlpipe.stages.session import Session


@dataclass(frozen=True, eq=False)
class _Waiting:
    """A group that waits for its scores. `scored`: its rollouts with them."""

    prompt: Prompt
    group: Group
    scored: Future[Group] = field(default_factory=Future)


class ScoringAhead:
    """The scores of one sampling round's groups, each computed once its group has finished, in a thread of its own.

    The scorers are shared: groups that finish while others are scored are scored together, next. It is a cache for the stages that commit
    scores: they score what is not here, decide what becomes of a rollout that cannot be scored, and forget all of it where they fail.
    """

    def __init__(self, session: Session, key: tuple[int, int]) -> None:
        self.key = key  # iteration, round
        self._session = session
        self._scores: Scores = {}
        self._waiting: SimpleQueue[_Waiting] = SimpleQueue()
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="scoring")

    def add(self, prompt: Prompt, group: Group) -> Future[Group]:
        """The group with its scores, once they are there; returns at once."""
        waiting = _Waiting(prompt, group)
        self._waiting.put(waiting)
        self._worker.submit(self._score_waiting)
        return waiting.scored

    def scores(self) -> Scores:
        """Those of all groups that were added so far; waits for them."""
        return self._worker.submit(self._scores.copy).result()

    def _score_waiting(self) -> None:
        ready = [self._waiting.get() for _ in range(self._waiting.qsize())]
        if not ready:  # the call before has scored them too
            return
        rollouts = [rollout for entry in ready for rollout in entry.group]
        prompts = {entry.prompt.prompt_id: entry.prompt for entry in ready}
        try:
            scored = iter(rewarded(self._session, prompts, rollouts, self._scores, self._session.rewards))
        except Exception as error:
            for entry in ready:
                entry.scored.set_exception(error)
            return
        for entry in ready:  # not `grouped`: a group may be there twice, after a retry
            entry.scored.set_result([next(scored) for _ in entry.group])


def scoring_ahead(session: Session, sampling_round: tuple[int, int]) -> ScoringAhead:
    """That of this round (iteration, round), shared by its shards."""
    if session.ahead is None or session.ahead.key != sampling_round:
        session.ahead = ScoringAhead(session, sampling_round)
    return session.ahead
