"""All of `rl.rewards` together: functions and services score side by side, and each rollout gets one weighted sum or one fault."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Self

from rlpipe.child import ChildProcess
from rlpipe.rewards.arguments import built
from rlpipe.rewards.code import check_time
from rlpipe.rewards.http import remote
from rlpipe.rewards.judge import judge
from rlpipe.rewards.model import model
from rlpipe.rewards.process import ProcessScorer
from rlpipe.rewards.registry import can_be_refused, check_names, is_service
from rlpipe.rewards.score import Score, Scorer, combined
from rlpipe.types import EngineError, JsonDict

logger = logging.getLogger(__name__)


class RewardPool:
    """Every reward loaded, from here to `close`."""

    def __init__(
        self, rewards: dict[str, float], args: dict[str, JsonDict] | None = None, *, workers: int, timeout_s: float
    ) -> None:
        """`rewards` maps a name, or package.module:function, to its weight. UserError for a reward that cannot be loaded."""
        self.last_error: str | None = None  # the first fault of the newest `score`, for the log
        self._closed = False
        self._lock = threading.Lock()
        self._scorers = _scorers(rewards, args or {}, workers, timeout_s)
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            for scorer in self._scorers:
                scorer.start()
            undo.pop_all()  # all are ready: they stay

    def score(self, items: list[JsonDict]) -> list[Score]:
        """One Score per item, in order; threads take turns. EngineError when the pool is closed, before or meanwhile.

        An item is {"prompt": Prompt.as_json(), "completion": str, "rollout": {"num_tokens", "finish_reason", "environment"}}.
        """
        with self._lock:
            self._check_open()
            with ThreadPoolExecutor(len(self._scorers), thread_name_prefix="rewards") as threads:
                columns = list(threads.map(lambda scorer: scorer.score(items), self._scorers))
            self._check_open()  # what was not asked any more has faults, which are none
            scores = [combined(list(row)) for row in zip(*columns, strict=True)]
            faults = [score for score in scores if score.reason is not None]
            self.last_error = faults[0].message if faults else None
        if faults:
            logger.warning("%d of %d rollouts could not be scored; the first: %s", len(faults), len(items), faults[0].message)
        assert len(scores) == len(items)
        return scores

    def close(self) -> None:
        """Ends the processes; what is being scored ends soon, with an EngineError: a run that is stopped commits no faults."""
        self._closed = True
        for scorer in self._scorers:
            scorer.close()

    def _check_open(self) -> None:
        if self._closed:
            raise EngineError("rl.rewards: closed while there was something to score")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _scorers(rewards: dict[str, float], args: dict[str, JsonDict], workers: int, timeout_s: float) -> list[Scorer]:
    check_names(rewards, args)
    scorers: list[Scorer] = []
    functions = {name: weight for name, weight in rewards.items() if not is_service(name)}
    if functions:
        launch = partial(ChildProcess, "rl.rewards", "rlpipe.rewards.worker", {"rewards": functions, "args": args})
        scorers.append(ProcessScorer("+".join(functions), launch, timeout_s, workers=workers))
    for name, weight in rewards.items():
        if is_service(name):
            scorers.append(built(name, _service(name), args.get(name, {}), name, weight, timeout_s))
    return scorers


def _service(name: str) -> Callable[..., Scorer]:
    return model if name.startswith("hf:") else {"remote": remote, "judge": judge}[name]


def check_rewards(rewards: dict[str, float], args: dict[str, JsonDict], timeout_s: float) -> None:
    """UserError when a reward cannot be loaded, or cannot keep to `timeout_s`; functions are tried in a process of their own, so that this one imports none.

    Services are not called: one that is down when it is needed is a fault of the rollouts, `reward_unavailable`.
    """
    _scorers(rewards, args, workers=1, timeout_s=timeout_s)
    if "code" in rewards:
        check_time(args.get("code", {}), timeout_s)
    # loading the libraries of the others would take seconds
    tried = {name: weight for name, weight in rewards.items() if not is_service(name) and can_be_refused(name)}
    if tried:
        RewardPool(tried, {name: args[name] for name in tried if name in args}, workers=1, timeout_s=timeout_s).close()
