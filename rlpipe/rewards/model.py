"""The reward `hf:<folder>`: a sequence-classification model in a process of its own, asked in batches."""

from __future__ import annotations

import json
import logging
import threading
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from pydantic import Field

from rlpipe.rewards.process import LineProcess
from rlpipe.rewards.score import InvalidReward, Score, parts_of, weighted
from rlpipe.types import JsonDict, UserError

logger = logging.getLogger(__name__)
LOAD_TIMEOUT_S = 900.0
RESTARTS_MAX = 8  # within one `score`
CHARS_PER_TOKEN = 16  # a completion is cut to so many characters a token before it is sent: few tokens are longer


def model(
    name: str, weight: float, timeout_s: float, /, *, batch_size: Annotated[int, Field(ge=1, le=4096)] = 8,
    tokens_max: Annotated[int, Field(ge=16)] = 2048, output: Annotated[int, Field(ge=0)] = 0, device: str = "cpu",
) -> ModelScorer:  # fmt: skip
    """The model's output number `output` for the prompt and the completion as a conversation, cut to `tokens_max` tokens.

    ValueError when the folder holds no sequence-classification model, or it has no such output.
    """
    folder = Path(name.removeprefix("hf:")).expanduser()
    _check_folder(folder, output)
    hello = {"folder": str(folder), "tokens_max": tokens_max, "output": output, "device": device}
    return ModelScorer(name, weight, timeout_s, hello, batch_size)


def _check_folder(folder: Path, output: int) -> None:
    missing = [each for each in ("config.json", "tokenizer.json") if not (folder / each).is_file()]
    if missing or not any(folder.glob("*.safetensors")):
        raise ValueError(f"folder {folder} is no model in HF format: {', '.join(missing or ['*.safetensors'])} is missing")
    config = json.loads((folder / "config.json").read_text())
    kinds = config.get("architectures") or ["none"]
    if not kinds[0].endswith("ForSequenceClassification"):  # another kind would load, with a random head
        raise ValueError(f"folder {folder} holds a {kinds[0]}; a reward model is some ...ForSequenceClassification")
    num_outputs = len(config["id2label"]) if config.get("id2label") else config.get("num_labels", 2)
    if output >= num_outputs:
        raise ValueError(f"output={output}: the model in {folder} has the outputs 0 to {num_outputs - 1}")


class ModelScorer:
    """Batches of n have n x `timeout_s`. A batch that fails is tried again one by one; what fails alone is at fault."""

    def __init__(self, name: str, weight: float, timeout_s: float, hello: JsonDict, batch_size: int) -> None:
        self._name = name
        self._weight = weight
        self._timeout_s = timeout_s
        self._hello = hello
        self._batch_size = batch_size
        self._process: LineProcess | None = None
        self._scoring = threading.Lock()
        self._closed = False

    def start(self) -> None:
        """Returns when the model is loaded; UserError when it cannot be."""
        self._process = LineProcess("rlpipe.rewards.model_worker", self._hello, LOAD_TIMEOUT_S)
        if self._closed:  # before `close` could see it
            self._process.stop()
        self._process.wait_ready()

    def close(self) -> None:
        """Kills the process; what is being scored ends soon, with faults."""
        self._closed = True
        if self._process is not None:
            self._process.stop()
        with self._scoring:
            if self._process is not None:
                self._process.kill()

    def score(self, items: list[JsonDict]) -> list[Score]:
        """One Score per item, in order; a process that dies or hangs is replaced at most RESTARTS_MAX times."""
        with self._scoring:
            return self._score(items)

    def _score(self, items: list[JsonDict]) -> list[Score]:
        scores: dict[int, Score] = {}
        left = _Restarts(RESTARTS_MAX)
        order = sorted(range(len(items)), key=lambda index: len(items[index]["completion"]))  # alike lengths pad little
        batches = deque(order[start : start + self._batch_size] for start in range(0, len(order), self._batch_size))
        tried_alone: set[int] = set()
        while batches:
            batch = batches.popleft()
            told = self._ask([items[index] for index in batch], left)
            if isinstance(told, Score) and len(batch) == 1 and (batch[0] in tried_alone or left.none):
                scores[batch[0]] = told
            elif isinstance(told, Score):  # alone, and before the others: the one that did it is known at once
                tried_alone.update(batch)
                batches.extendleft([index] for index in reversed(batch))
            else:
                scores.update(zip(batch, told, strict=True))
        return [scores[index] for index in range(len(items))]

    def _ask(self, items: Sequence[JsonDict], left: _Restarts) -> list[Score] | Score:
        """The scores of a batch, or the fault that all of it met."""
        fault = self._revive(left)
        if fault is not None:
            return fault
        assert self._process is not None
        chars_max = self._hello["tokens_max"] * CHARS_PER_TOKEN
        timeout_s = self._timeout_s * len(items)
        cut = [{"messages": item["prompt"]["messages"], "completion": item["completion"][:chars_max]} for item in items]
        self._process.send({"items": cut, "timeout_s": timeout_s})
        answer, alive = self._process.wait_answer(timeout_s)
        if answer is None:
            self._process.kill()
            return self._fault("reward_timeout" if alive else "reward_crash",
                               f"took more than {len(items)} x rl.reward_timeout_s={self._timeout_s:g}" if alive else "its process died")  # fmt: skip
        if "error" in answer:
            return self._fault("reward_error", answer["error"])
        num_cut = sum(answer["cut"])
        if num_cut:
            logger.warning("%s: %d of %d rollouts were cut to tokens_max=%d", self._name, num_cut, len(items), self._hello["tokens_max"])  # fmt: skip
        assert len(answer["rewards"]) == len(items)
        return [self._read(reward) for reward in answer["rewards"]]

    def _revive(self, left: _Restarts) -> Score | None:
        """A process that lives, or why there is none."""
        assert self._process is not None, "not started"
        if self._closed:
            return self._fault("reward_unavailable", "closed")
        if self._process.alive:
            return None
        if not left.take():
            return self._fault("reward_crash", f"its process had to be replaced more than {RESTARTS_MAX} times")
        self._process.kill()
        try:
            self.start()
        except UserError as error:
            left.give_up()
            return self._fault("reward_unavailable", f"its process does not start again: {error}")
        return None

    def _read(self, reward: object) -> Score:
        try:
            return weighted(parts_of(self._name, reward), self._weight, self._name)
        except InvalidReward as error:
            return self._fault("reward_invalid", str(error))

    def _fault(self, reason: str, message: str) -> Score:
        return Score(None, {}, reason, f"reward {self._name!r}: {message}")


class _Restarts:
    """How often a process may still be replaced."""

    def __init__(self, num: int) -> None:
        self._num = num

    def take(self) -> bool:
        self._num -= 1
        return self._num >= 0

    def give_up(self) -> None:
        self._num = 0

    @property
    def none(self) -> bool:
        return self._num <= 0
