"""Rewards in processes of their own, since one may raise, crash, print or never return.

`hf:<folder>`, a model, is one of them.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Annotated

from pydantic import Field, TypeAdapter

from rlpipe.base.errors import UserError
from rlpipe.base.values import expanded
from rlpipe.data.links import check_links
from rlpipe.models.folder import folder_config
from rlpipe.processes.pool import WorkerPool
from rlpipe.processes.worker import ProcessEnded, TooManyLost, Worker, ask_twice
from rlpipe.rewards.score import FAILURES_MAX, Item, Score, Scored

LOAD_TIMEOUT_S = 900.0  # of a reward model
LOSSES_MAX = 8  # processes of a reward model that are lost in a row
BATCH_S = 0.02  # functions get as many rollouts at a time as they score in so long
BATCH_MAX = 64  # of these
Fault = tuple[str, str]  # reason and message
SCORED: TypeAdapter[Scored] = TypeAdapter(Scored)
logger = logging.getLogger(__name__)


class RewardLost(RuntimeError):
    """Raised when a reward that was loaded before does not load again, for lack of memory or of its
    files: another try may succeed.
    """


class ProcessScorer:
    """Processes with rewards loaded. The rollouts of a batch that fails are asked one by one.

    A model gets `batch_size` rollouts at a time, n of them with n x `timeout_s`. Functions get one,
    or while they are quick as many as take BATCH_S, with `timeout_s` for all of them: so one that
    hangs costs twice the time that it costs alone.

    The reward is given up when `losses_max` processes were lost before anything has answered; a
    model, as its processes take long to load, also when as many were lost in a row.
    """

    def __init__(
        self, name: str, processes: WorkerPool, timeout_s: float, *, batch_size: int | None = None,
        losses_max: int | None = None,
    ) -> None:  # fmt: skip
        """`batch_size`: None for functions. `losses_max`: None for FAILURES_MAX."""
        assert timeout_s > 0
        self.name = name
        self.processes = processes
        self.timeout_s = timeout_s
        self.batch_size = batch_size
        self.losses_max = losses_max
        self._has_answered = False
        self._rollout_s = math.inf  # how long a rollout of the last batch took; it is not known yet

    def start(self) -> None:
        """Returns when the rewards are loaded; UserError when one cannot be."""
        self.processes.start()

    def score(self, items: list[Item]) -> list[Score]:
        """One Score per item, in order; EngineError once it is closed. One call at a time."""
        self._items = items
        self._scores: dict[int, Score] = {}  # by the rollout's index, as are the faults
        self._faults: dict[int, Fault] = {}
        self._given_up: Fault | None = None  # the fault of all rollouts that are not sent any more
        self.processes.losses.answered()
        is_proven = self.losses_max is None and self._has_answered  # then a rollout is at fault, and not the function
        most = FAILURES_MAX if self.losses_max is None else self.losses_max
        self.processes.losses.in_a_row_max = math.inf if is_proven else most
        order = sorted(range(len(items)), key=lambda index: len(items[index]["completion"]))  # alike lengths pad little
        left, share = deque(order), math.ceil(len(items) / len(self.processes.workers))
        self.processes.on_all(lambda worker: self._work(worker, self._batches(left, share)))
        return [self._scores.get(index) or self._fault(index) for index in range(len(items))]

    def close(self) -> None:
        """Kills the processes."""
        self.processes.close()

    def _batches(self, left: deque[int], share: int) -> Iterator[list[int]]:
        """Takes one batch after the other from the rollouts that are left for all workers; of
        functions not more than a worker's share.
        """
        while left:
            size = self.batch_size or min(max(int(BATCH_S / self._rollout_s), 1), BATCH_MAX, share)
            yield [left.popleft() for _ in range(min(size, len(left)))]

    async def _work(self, worker: Worker, batches: Iterable[list[int]], is_again: bool = False) -> None:
        """Asks for one batch after the other until none is left, or the reward is given up.
        `is_again`: they have failed once.
        """
        for batch in batches:
            if self._given_up:
                return
            fault = await self._ask(worker, batch)
            if fault and len(batch) > 1:  # of several that failed together none is known to be at fault
                await self._work(worker, [[index] for index in batch], is_again=True)
                continue
            if fault and fault[0] == "reward_error" and self.losses_max is not None and not is_again:
                fault = await self._ask(worker, batch)  # a model may have been short of memory
            if fault:
                self._faults[batch[0]] = fault

    async def _ask(self, worker: Worker, batch: list[int]) -> Fault | None:
        """Asks for a batch and stores its scores, or returns the fault that all of it met."""
        request = {"items": [self._items[index] for index in batch]}
        timeout_s = self.timeout_s * (len(batch) if self.batch_size else 1)
        once, asked_s = partial(worker.ask, lambda _: (request, timeout_s)), time.monotonic()
        try:
            answer = await (ask_twice(once) if len(batch) == 1 else once())
            self._rollout_s = (time.monotonic() - asked_s) / len(batch)
            if self.losses_max is None:
                self._has_answered, self.processes.losses.in_a_row_max = True, math.inf  # it is never given up then
            return self._keep(batch, answer)
        except TimeoutError:
            return "reward_timeout", f"took more than rl.reward_timeout_s={self.timeout_s:g}"
        except ProcessEnded as error:
            return "reward_crash", str(error)
        except TooManyLost as error:  # it is broken, and no rollout is to blame
            self._given_up = "reward_unavailable", f"given up: {error}"
            return self._given_up
        except UserError as error:
            self._given_up = "reward_unavailable", str(error)  # for the other workers: no process is left
            raise RewardLost(str(error)) from error

    def _keep(self, batch: list[int], answer: object) -> Fault | None:
        """Stores a batch's scores, or returns its fault."""
        try:
            scored = SCORED.validate_python(answer)
            if scored.error is not None:
                return "reward_error", scored.error
            self._scores |= dict(zip(batch, scored.scores, strict=True))
        except ValueError:
            return "reward_crash", "its code wrote something of its own in the place of an answer"
        if scored.warning:
            logger.warning("%s: %s", self.name, scored.warning)
        return None

    def _fault(self, index: int) -> Score:
        fault = self._faults.get(index) or self._given_up
        assert fault is not None, "a rollout was neither asked nor given up"
        message = f"reward {self.name!r} on prompt {self._items[index]['prompt']['prompt_id']}: {fault[1]}"
        # a model runs no code on a completion, which could be to blame
        return Score(None, {}, fault[0] if self.losses_max is None else "reward_unavailable", message)


def model(
    name: str, weight: float, timeout_s: float, /, *, batch_size: Annotated[int, Field(ge=1, le=4096)] = 8,
    tokens_max: Annotated[int, Field(ge=16)] = 2048, output: Annotated[int, Field(ge=0)] = 0, device: str = "cpu",
) -> ProcessScorer:  # fmt: skip
    """The model's output number `output` for the prompt and the completion as a conversation, cut
    to `tokens_max` tokens.

    ValueError when the folder holds no sequence-classification model, or it has no such output.
    """
    folder = expanded(name.removeprefix("hf:"))
    _check_folder(folder, output)
    arguments = {"folder": str(folder), "tokens_max": tokens_max, "output": output, "device": device}
    hello = {"name": name, "weight": weight, "model": arguments}
    processes = WorkerPool(f"rl.rewards.{name}", "rlpipe.rewards.worker", hello, start_timeout_s=LOAD_TIMEOUT_S)
    return ProcessScorer(name, processes, timeout_s, batch_size=batch_size, losses_max=LOSSES_MAX)


def try_model(name: str) -> None:
    """UserError naming the reason why the weights in a reward model's folder are not that model;
    read once, in a process of its own.
    """
    hello = {"name": name, "tried": str(expanded(name.removeprefix("hf:")))}
    with closing(
        WorkerPool(f"rl.rewards.{name}", "rlpipe.rewards.worker", hello, start_timeout_s=LOAD_TIMEOUT_S)
    ) as trial:
        trial.start()


def _check_folder(folder: Path, output: int) -> None:
    missing = [file for file in ("config.json", "tokenizer.json") if not (folder / file).is_file()]
    if missing or not any(folder.glob("*.safetensors")):
        raise ValueError(
            f"folder {folder} is no model in HF format: {', '.join(missing or ['*.safetensors'])} is missing"
        )
    check_links(f"folder {folder}", folder, (path for path in folder.rglob("*") if path.is_file()))
    try:
        config = folder_config(folder)
    except UserError as error:
        raise UserError(f"folder {folder}: {error}") from error
    kinds = config.get("architectures") or ["none"]
    kind = str(kinds[0] if isinstance(kinds, list) else kinds)
    # another kind would load, with a random head
    if not kind.endswith("ForSequenceClassification"):
        raise ValueError(f"folder {folder} holds a {kind:.80}; a reward model is some ...ForSequenceClassification")
    labels = config.get("id2label")
    num_outputs = len(labels) if isinstance(labels, dict) and labels else config.get("num_labels", 2)
    if type(num_outputs) is not int or output >= num_outputs:
        raise ValueError(f"output={output}: the model in {folder} has the outputs 0 to {num_outputs - 1}")
