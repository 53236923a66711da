"""Rewards in processes of their own, since one may raise, crash, print or never return.

`hf:<folder>`, a model, is one of them.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Annotated

from pydantic import Field

from rlpipe.base.errors import UserError
from rlpipe.base.values import expanded
from rlpipe.data.links import check_links
from rlpipe.models.folder import folder_config
from rlpipe.processes.pool import Child, ChildPool, ProcessEnded
from rlpipe.rewards.score import FAILURES_MAX, Item, NotScored, Score, Scored

LOAD_TIMEOUT_S = 900.0  # of a reward model
LOSSES_MAX = 8  # processes of a reward model replaced within one `score`
Fault = tuple[str, str]  # reason and message
logger = logging.getLogger(__name__)


class RewardLost(RuntimeError):
    """Raised when a reward that was loaded before does not load again, for lack of memory or of its
    files: another try may succeed.
    """


class ProcessScorer:
    """Processes with rewards loaded; each gets `batch_size` rollouts at a time, n of them with n x
    `timeout_s`.

    A process that dies or hangs is replaced. Functions are not called again for its rollouts, and
    given up when FAILURES_MAX processes were lost before any has answered. With `losses_max`,
    rollouts that fail are sent again one by one, and at most so many processes are replaced within
    one `score`: a kill from outside costs no rollout.
    """

    def __init__(
        self, name: str, processes: ChildPool, timeout_s: float, *, batch_size: int = 1, losses_max: int | None = None
    ) -> None:
        assert timeout_s > 0
        self.name = name
        self.processes = processes
        self.timeout_s = timeout_s
        self.batch_size = batch_size
        self.losses_max = losses_max
        self._lock = threading.Lock()  # of the losses

    def start(self) -> None:
        """Returns when the rewards are loaded; UserError when one cannot be."""
        self.processes.on_all(Child.start)

    def score(self, items: list[Item]) -> list[Score]:
        """One Score per item, in order; EngineError once it is closed. One call at a time."""
        self._items = items
        self._scores: dict[int, Score] = {}  # by the rollout's index, as are the faults
        self._faults: dict[int, Fault] = {}
        self._given_up: Fault | None = None  # the fault of all rollouts that are not sent any more
        self._num_losses = 0
        self._has_answers = False
        order = sorted(range(len(items)), key=lambda index: len(items[index]["completion"]))  # alike lengths pad little
        self._ask([order[start : start + self.batch_size] for start in range(0, len(order), self.batch_size)])
        # of several that failed together none is known to be at fault
        if self.losses_max is not None:
            failed, self._faults = self._faults, {}
            self._ask([[index] for index in failed])
        return [self._scores.get(index) or self._fault(index) for index in range(len(items))]

    def close(self) -> None:
        """Kills the processes."""
        self.processes.close()

    def _ask(self, batches: list[list[int]]) -> None:
        """Sends batches to the processes until none is left, or the reward is given up."""
        left = iter(batches)  # every thread takes the next one
        self.processes.on_all(lambda child: self._work(child, left))

    def _work(self, child: Child, batches: Iterator[list[int]]) -> None:
        for batch in batches:
            if self._given_up:
                return
            try:
                child.start()
                answer = child.ask({"items": [self._items[index] for index in batch]}, self.timeout_s * len(batch))
            except UserError as error:
                self._given_up = "reward_unavailable", str(error)  # for the other threads: no process is left
                raise RewardLost(str(error)) from error
            except TimeoutError:
                self._lose(batch, ("reward_timeout", f"took more than rl.reward_timeout_s={self.timeout_s:g}"))
            except ProcessEnded as error:
                self._lose(batch, ("reward_crash", str(error)))
            else:
                try:
                    self._keep(batch, answer)
                except (KeyError, TypeError, ValueError):
                    # the real one may come yet, and would be taken for the next
                    child.end()
                    self._lose(batch, ("reward_crash", "its code wrote something of its own in the place of an answer"))

    def _keep(self, batch: list[int], answer: Scored | NotScored) -> None:
        """Stores a batch's scores, or the error that all of it met; KeyError, TypeError or
        ValueError for an invalid answer.
        """
        if "error" in answer:
            self._has_answers = True
            self._faults |= dict.fromkeys(batch, ("reward_error", answer["error"]))
            return
        if warning := answer.get("warning"):
            logger.warning("%s: %s", self.name, warning)
        self._scores |= {index: Score(**score) for index, score in zip(batch, answer["scores"], strict=True)}
        self._has_answers = True

    def _lose(self, batch: list[int], fault: Fault) -> None:
        """Handles the loss of a process with a batch.

        After too many losses the reward is given up.
        """
        with self._lock:
            self._faults |= dict.fromkeys(batch, fault)
            self._num_losses += 1
            if self.losses_max is not None and self._num_losses > self.losses_max:
                self._given_up = "reward_crash", f"its process had to be replaced more than {self.losses_max} times"
            elif self._num_losses >= FAILURES_MAX and not self._has_answers:
                self._given_up = fault[0], f"given up after {self._num_losses} processes; the last one: {fault[1]}"

    def _fault(self, index: int) -> Score:
        fault = self._faults.get(index) or self._given_up
        assert fault is not None, "a rollout was neither asked nor given up"
        message = f"reward {self.name!r} on prompt {self._items[index]['prompt']['prompt_id']}: {fault[1]}"
        return Score(None, {}, fault[0], message)


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
    processes = ChildPool(f"rl.rewards.{name}", "rlpipe.rewards.worker", hello, start_timeout_s=LOAD_TIMEOUT_S)
    return ProcessScorer(name, processes, timeout_s, batch_size=batch_size, losses_max=LOSSES_MAX)


def try_model(name: str) -> None:
    """UserError naming the reason why the weights in a reward model's folder are not that model;
    read once, in a process of its own.
    """
    hello = {"name": name, "tried": str(expanded(name.removeprefix("hf:")))}
    with closing(
        ChildPool(f"rl.rewards.{name}", "rlpipe.rewards.worker", hello, start_timeout_s=LOAD_TIMEOUT_S)
    ) as trial:
        trial.on_all(Child.start)


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
