"""All of `rl.rewards` together: functions and services score at the same time, and each rollout
gets one weighted sum or one fault.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import NamedTuple, Self

from rlpipe.base.errors import EngineError, UserError
from rlpipe.base.values import JsonDict
from rlpipe.config.extras import REWARDS
from rlpipe.config.secrecy import Secrets, named_variables, with_variables
from rlpipe.config.training import RlConfig
from rlpipe.processes.pool import WorkerPool, code_environment
from rlpipe.records.prompt import Prompt, RewardPrompt
from rlpipe.rewards.http import HttpScorer, Judge, RewardService
from rlpipe.rewards.process import ProcessScorer, model, try_model
from rlpipe.rewards.registry import RewardArgs, built, can_be_refused, check_names, extra_reward, is_service
from rlpipe.rewards.score import Item, RolloutFacts, Score, combined, unsampled_facts

ROWS_MAX = 4  # of a data set, on which rewards are tried before a run starts
# after this time no other row of a set is tried: a reward that hangs on one hangs on the next
TRIAL_S = 5.0
# a data set's label -> prompts of it, as a reward gets them
TrialRows = dict[str, list[RewardPrompt]]
logger = logging.getLogger(__name__)


class RewardPool:
    """All rewards, loaded; `close` ends their processes."""

    def __init__(
        self,
        rewards: dict[str, float],
        args: RewardArgs | None = None,
        *,
        workers: int,
        timeout_s: float,
        secrets: Secrets = Secrets(),  # noqa: B008
    ) -> None:
        """`rewards` maps a name, or package.module:function, to its weight; `secrets` are variables
        that functions do not see, except those that their own arguments name. UserError for a
        reward that cannot be loaded.
        """
        self.last_error: str | None = None  # the first fault of the newest `score`, for the log
        self._closed = False
        self._lock = threading.Lock()
        self._scorers = _scorers(rewards, args or {}, workers, timeout_s, secrets)
        self._threads = ThreadPoolExecutor(max(1, len(self._scorers)), thread_name_prefix="rewards")
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            for scorer in self._scorers:
                scorer.start()
            undo.pop_all()  # all are loaded: they stay

    def score(self, items: list[Item], *, quiet: bool = False) -> list[Score]:
        """One Score per item, in order; threads take turns.

        EngineError when the pool is closed, before or meanwhile.

        Faults are logged, unless `quiet`.
        """
        with self._lock:
            try:
                calls = [self._threads.submit(scorer.score, items) for scorer in self._scorers]
                wait(calls)
                columns = [call.result() for call in calls]
            finally:
                if self._closed:  # such failures are not the rollouts' faults
                    raise EngineError("rl.rewards: closed while there was something to score")
            # without rewards (distillation alone) each score is 0
            scores = [combined([column[index] for column in columns]) for index in range(len(items))]
            faults = [score for score in scores if score.reason is not None]
            self.last_error = faults[0].message if faults else None
        if faults and not quiet:
            logger.warning(
                "%d of %d rollouts could not be scored; the first: %s", len(faults), len(items), faults[0].message
            )
        assert len(scores) == len(items)
        return scores

    def close(self) -> None:
        """Ends the processes; calls in progress end soon, with an EngineError: a run that is
        stopped commits no faults.
        """
        self._closed = True
        for scorer in self._scorers:
            scorer.close()
        self._threads.shutdown(wait=False)

    @classmethod
    def of(cls, rl: RlConfig, rewards: dict[str, float], args: RewardArgs) -> Self:
        """A pool with the processes, the time and the secrets that `rl` has."""
        return cls(rewards, args, workers=rl.reward_workers, timeout_s=rl.reward_timeout_s, secrets=rl.secrets)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def score(
    rewards: dict[str, float], rows: list[JsonDict], args: RewardArgs | None = None, *, timeout_s: float = 10.0
) -> list[Score]:
    """Scores rows outside of a run, with the code and the faults of a run: for notebooks and tests
    of rewards.

    A row has `prompt` (text, or messages) and `completion`; where the reward reads them also
    `answer`, `metadata` (a dict) and `rollout` ({"num_tokens", "finish_reason", "environment",
    "turns"}). UserError for a reward that cannot be loaded.

    Example: score({"exact": 1.0}, [{"prompt": "2 + 2?", "answer": "4", "completion":
    "<answer>4</answer>"}])[0].reward == 1.0
    """
    items: list[Item] = []
    for index, row in enumerate(rows):
        content = row["prompt"]
        messages = [{"role": "user", "content": content}] if isinstance(content, str) else content
        prompt = Prompt(f"rows/{index}", "rows", messages, row.get("answer"), row.get("metadata", {}))
        facts: RolloutFacts = unsampled_facts(row["completion"]) | row.get("rollout", {})
        items.append({"prompt": prompt.for_reward(), "completion": row["completion"], "rollout": facts})
    with RewardPool(rewards, args, workers=1, timeout_s=timeout_s) as pool:
        return pool.score(items)


def _scorers(
    rewards: dict[str, float], args: RewardArgs, workers: int, timeout_s: float, secrets: Secrets
) -> list[ProcessScorer | HttpScorer]:
    check_names(rewards, args)
    args = with_variables(args)
    scorers: list[ProcessScorer | HttpScorer] = []
    functions = {name: weight for name, weight in rewards.items() if not is_service(name)}
    if functions:
        own = named_variables({name: args[name] for name in functions if name in args})
        environment = code_environment(
            Secrets({*secrets.passed, *own.intersection(os.environ)}, {*secrets.withheld, *named_variables(args)})
        )
        # the sandbox of `code` does, which functions may call
        hello = {"rewards": functions, "args": args, "may_mount": True}
        processes = WorkerPool(
            f"rl.rewards={[*functions]}", "rlpipe.rewards.worker", hello, workers=workers, environment=environment
        )
        scorers.append(ProcessScorer("+".join(functions), processes, timeout_s))
    for name, weight in rewards.items():
        if name.startswith("hf:"):
            scorers.append(built(name, model, args.get(name, {}), name, weight, timeout_s))
        elif is_service(name):
            service = built(name, Judge if name == "judge" else RewardService, args.get(name, {}))
            scorers.append(HttpScorer(name, weight, timeout_s, service))
    return scorers


def check_rewards(
    rewards: dict[str, float],
    args: RewardArgs,
    timeout_s: float,
    prompts: TrialRows | None = None,
    written: Sequence[str] = (),
    passing: float = -math.inf,
    heard: Mapping[str, str] | None = None,
    secrets: Secrets = Secrets(),  # noqa: B008
) -> float | None:
    """The best reward of the trial rollouts, which are tried until one has `passing`; None where
    there are none, or they say nothing: for services, which are not called, and for extras, as no
    row has what they score.

    UserError when a reward cannot be loaded, takes longer than `timeout_s`, or can score no row of
    a data set.

    `prompts` are the rows of each data set by its label, `written` completions from SFT data, for a
    reward that reads the format which SFT teaches, and `heard` the text that is left of completions
    after they were tokens. Functions are tried in a process of their own, so that this one imports
    none. Services are not called: one that is down when it is needed is a fault of the rollouts,
    `reward_unavailable`.
    """
    _scorers(rewards, args, 1, timeout_s, secrets)
    for name in rewards:
        if name.startswith("hf:"):
            try_model(name)
    # without prompts not those that cannot be refused: loading their libraries would take seconds
    names = [name for name in rewards if not is_service(name) and (prompts or can_be_refused(name, args))]
    if not names:
        return None
    functions, of_extras = {name: rewards[name] for name in names}, [name for name in rewards if name in REWARDS]
    own_args = {name: args[name] for name in names if name in args}
    with RewardPool(functions, own_args, workers=1, timeout_s=timeout_s, secrets=secrets) as pool:
        for name in of_extras:  # loaded: their arguments have the right types
            extra_reward(name).check(args.get(name, {}), timeout_s)
        tried = {label: _tried(pool, rows, written, passing, heard or {}) for label, rows in (prompts or {}).items()}
    errors = {label: trial.error for label, trial in tried.items() if trial.error}
    if errors:
        raise UserError(
            f"rl.rewards cannot score the rows of {' and '.join(errors)}: no trial rollout (completed with the answer,"
            " with the answer between answer tags, with nothing, with what SFT shows) has a reward. The first error:"
            f" {next(iter(errors.values()))}. Choose rewards that fit these rows, for example --set 'rl.rewards={{exact"
            " = 1.0}', or mend the reward: it has to give a number for any text (docs/rewards.md)"
        )
    is_told = len(names) == len(rewards) and not of_extras
    return max((trial.best for trial in tried.values()), default=None) if is_told else None


def trial_completions(prompt: RewardPrompt, written: Sequence[str]) -> list[str]:
    """Completions for a trial of a reward before the policy has sampled any: the answer, the answer
    between tags, the empty text, and `written` (from SFT data).
    """
    answer = prompt["answer"]
    return [*([] if answer is None else [answer, f"<answer>{answer}</answer>"]), "", *written]


class _Trial(NamedTuple):
    """The best reward of a data set's trial rollouts, or the reason why none of them could be
    scored.
    """

    best: float
    error: str


def _tried(
    pool: RewardPool, rows: list[RewardPrompt], written: Sequence[str], passing: float, heard: Mapping[str, str]
) -> _Trial:
    """Trial rollouts of a data set, row after row until one has the reward `passing`.

    A character counts as a token.
    """
    deadline, best = time.monotonic() + TRIAL_S, -math.inf
    for prompt in rows[:ROWS_MAX]:
        completions = [heard.get(text, text) for text in trial_completions(prompt, written)]
        items: list[Item] = [
            {
                "prompt": prompt,
                "completion": completion,
                "rollout": {**unsampled_facts(completion), "num_tokens": len(completion)},
            }
            for completion in completions
        ]
        rewards = [score.reward for score in pool.score(items, quiet=True) if score.reward is not None]
        best = max([best, *rewards])
        if (rewards and best >= passing) or time.monotonic() > deadline:
            break
    return _Trial(best, "" if best > -math.inf else pool.last_error or "it gave no reason")
