"""The data of a run, loaded once a process: prompt sets, tokenizer, the cursor over the prompts."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

from rlpipe.base.hashing import sha256_of
from rlpipe.data.chat import ChatTokenizer
from rlpipe.data.conversations import prompt_lengths
from rlpipe.data.cursor import PromptCursor
from rlpipe.data.read_sets import handed_over
from rlpipe.data.sources import PromptSets, fitting, load_conversations, load_prompts, once, room_for
from rlpipe.records.prompt import Prompt, Talk
from rlpipe.report.curves import DataSet
from rlpipe.store.local_copy import materialise
from rlpipe.store.run import Run


class RunData:
    """The data of a run.

    `folder`: where this process has its copies and logs. `prompts`: a use ("sft", "rl",
    "evaluation") to the rows of its sets, in the order of the config. `fitting`: the same without
    what `on_too_long` drops: what is drawn from, the same on every start.
    """

    def __init__(self, run: Run, folder: Path) -> None:
        self._run, self._config, self.folder = run, run.config, folder
        self._sets = handed_over(run.config)
        self.prompts: PromptSets = once(self._load)
        self.fitting: PromptSets = once(self._fitting)

    def _load(self, use: str) -> list[list[Prompt]]:
        return [self._sets.take(data, load_prompts) for data in self._config.sets(use)]

    def conversations(self) -> dict[str, list[Talk]]:
        """The rows of each set of use sft, by its name; not kept, as they are prepared once."""
        return {data.name: self._sets.take(data, load_conversations) for data in self._config.sets("sft")}

    def forget_conversations(self) -> None:
        """Drops those that were read before, once nobody needs them."""
        for data in self._config.sets("sft"):
            self._sets.forget(data)

    def _fitting(self, use: str) -> list[list[Prompt]]:
        return [
            fitting(data, rows, prompt_lengths(self.tokenizer, rows), room_for(self._config, use))
            for data, rows in zip(self._config.sets(use), self.prompts(use), strict=True)
        ]

    @cached_property
    def tokenizer(self) -> ChatTokenizer:
        """The tokenizer of the run, from its base artifact."""
        source, _ = self._run.committed("base", 0, "tokenizer")
        model = self._config.model
        folder = materialise(self._run.store, source, self.folder / "tokenizer")
        return ChatTokenizer.from_folder(folder, model.chat_template, model.chat_template_args, model.control_tokens)

    @cached_property
    def cursor(self) -> PromptCursor:
        """The cursor that draws from the prompt sets of use rl, by their weights."""
        sizes, weights = [len(rows) for rows in self.fitting("rl")], [data.weight for data in self._config.sets("rl")]
        return PromptCursor(sizes, weights, self._config.seed)

    @cached_property
    def sha256(self) -> str:
        """The hash of all prompts of use rl that are drawn: a cursor's position means nothing in
        other data.
        """
        return sha256_of([[prompt.as_json() for prompt in rows] for rows in self.fitting("rl")])

    def described(self, use: str) -> list[DataSet]:
        """The data sets of a use as tracking names them."""
        sets = self._config.sets(use)
        if use == "sft":  # none in what older code committed
            known = self._run.committed("data", 0, "data")[1].metrics.get("sets", {})
            return [
                DataSet.of(data, known[data.name]["sha256"], known[data.name]["rows"])
                for data in sets
                if data.name in known
            ]
        loaded = zip(sets, self.prompts(use), strict=True)
        return [DataSet.of(data, sha256_of([row.as_json() for row in rows]), len(rows)) for data, rows in loaded]
