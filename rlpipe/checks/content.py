"""Checks of everything that a config names, before a run depends on it: a model, data, a tokenizer,
rewards, filters and a machine.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from rlpipe.algorithms.filters import apply_filters, check_thresholds, resolve_filters, trial_group
from rlpipe.base.errors import UserError
from rlpipe.base.values import expanded
from rlpipe.checks.tried_model import TriedModel, tried_adapter, try_model
from rlpipe.config.extras import COMMANDS, opened
from rlpipe.config.passing import passing_reward, why_none_passes
from rlpipe.config.pipeline import RUN, PipelineConfig
from rlpipe.config.sections import DataConfig
from rlpipe.data.read_sets import ReadSets
from rlpipe.data.sources import fitting, load_conversations, load_prompts, question, room_for, split_validation
from rlpipe.data.trial import TokenizerTrial
from rlpipe.engines.commands import check_python
from rlpipe.loop.player import kind_of_player
from rlpipe.processes.gpus import check_compiler, check_gpus
from rlpipe.records.messages import content_text
from rlpipe.records.prompt import Prompt, Talk
from rlpipe.rewards.pool import ROWS_MAX, TrialRows, check_rewards, trial_completions
from rlpipe.rewards.references import COMPARING, references_line
from rlpipe.rewards.score import label as part_of
from rlpipe.stages.base import check_frozen, tokenizer_folder
from rlpipe.stages.model_source import source_of
from rlpipe.stages.sampling import check_room
from rlpipe.stages.sft import check_fits
from rlpipe.store.opening import open_existing
from rlpipe.store.run import Run

TEXT_CHARS_MAX = 60
NEW_VOCABULARY = 320  # about: where a new tokenizer could not be made
CONVERSATIONS_MAX = 64  # of each set of SFT are tried: a template treats the others the same
BAR_DELAY_S = 2.0


@dataclass(frozen=True)
class Lengths:
    """Mean tokens of the prompts of RL and of the conversations of SFT, as the tokenizer counted
    them; 0 where it was not tried.
    """

    prompt: float = 0.0
    conversation: float = 0.0


class Content:
    """The things that a config names. Each method checks one, and returns a line about what it
    read.

    UserError when it cannot be used.
    """

    def __init__(self, config: PipelineConfig) -> None:
        self.config = config
        self.lengths = Lengths()
        self.vocab_size = config.model.vocab_size or NEW_VOCABULARY
        # the rows that could be read, by label, of RL and evaluation
        self.prompts: dict[str, list[Prompt]] = {}
        self.conversations: dict[str, list[Talk]] = {}  # and of SFT
        self.sets = ReadSets(config.seed)  # all rows of both, for the session
        self.roles: list[str] = []  # of the environment's messages
        self.doubts: list[str] = []  # settings that are hardly meant, found so far
        # completions that rewards are tried on, as they are once they were tokens
        self.heard: dict[str, str] = {}

    def model(self) -> str:
        """Checks that the model's files are complete, and that its config makes a model that they
        fit.
        """
        return f"model: {self.tried('model.path', source_of(self.config).folder, **tried_adapter(self.config))}"

    def tried(self, field: str, folder: Path, **named: object) -> str:
        """The line about the model of a folder, which is tried in a process of its own."""
        return tried_line(folder, try_model(self.config, named | named_folder(field, folder)))

    def gate(self, run: Run | None) -> str:
        """Opens the gate of the config; UserError where that, or the run that it compares with, is
        not there. A plan reads no store.
        """
        against = self.config.evaluation.gate_against
        opened(COMMANDS["gate of a run"], f"evaluation.gate_against={against!r}")
        if run is not None and against.startswith(RUN):
            open_existing(run.store, against.removeprefix(RUN).partition("@")[0])
        return f"gate: against {against}"

    def frozen(self, stage: str, run: Run | None) -> str:
        """Checks that the reference, or a teacher, is a model that loads, with the vocabulary of
        the run; for a plan, as far as its files are on this machine.
        """
        config, (field, name) = self.config, self.config.frozen_models[stage]
        role = field.removeprefix("rl.")
        folders = [expanded(path) for path in (name, config.model.path or ".")]
        if (run is None and not all(folder.is_dir() for folder in folders)) or not (config.model.path or self.prompts):
            return f"{role}: {name}, not tried"
        label = name
        if stage == "teacher" and config.rl.teacher_engine:
            label = f"{name}, on {config.rl.teacher_engine}"
        elif run is not None or not name.startswith(RUN):
            folder = source_of(config, field, name).folder
            label = self.tried(field, folder)
        with tempfile.TemporaryDirectory() as scratch:
            check_frozen(config, stage, run, self._prompts_of, Path(scratch))
        return f"{role}: {label}"

    def trainer(self) -> str:
        """Checks that the GPUs that trainer processes would use are on this machine, and a compiler
        for them.
        """
        trainer = self.config.trainer
        if trainer.place == "process":
            check_gpus("trainer.gpu_ids", trainer.gpu_ids)
            if trainer.gpu_ids:
                check_compiler()
        return ""

    def engines(self) -> str:
        """Checks that the GPUs of engines are on this machine, and that their interpreter has the
        packages that they run.
        """
        engines = self.config.engines
        if not (self.config.samples and self.config.engines_here):
            return ""
        check_gpus("engines.gpu_ids", engines.gpu_ids, engines.count)
        return check_python(engines)

    def data_set(self, data: DataConfig) -> str:
        """Reads one set, and keeps its rows for later checks."""
        name = label(data)
        if data.use == "sft":
            rows = self.conversations[name] = self.sets.read(data, load_conversations)
            messages = rows[0].messages
            first = next((message for message in messages if message["role"] != "system"), messages[0])
            example = f"{_short(content_text(first))} -> {_short(content_text(messages[-1]))}"
        else:
            rows = self.prompts[name] = self.sets.read(data, load_prompts)
            answer = "" if rows[0].answer is None else f", answer {_short(rows[0].answer)}"
            example = f"{_short(content_text(rows[0].messages[-1]))}{answer}"
        return f"{name}: {len(rows):,} rows of {data.source}, for example {example}"

    def leaks(self) -> Iterator[str]:
        """A line for each evaluation set of which prompts are trained on."""
        trained = {question(talk.messages) for rows in self.conversations.values() for talk in rows}
        trained |= {question(row.messages) for rows in self._prompts_of("rl") for row in rows}
        for data in self.config.sets("evaluation"):
            rows = self.prompts.get(label(data), [])
            num_leaked = sum(question(row.messages) in trained for row in rows)
            if num_leaked:
                yield (
                    f"{label(data)}: {num_leaked:,} of its {len(rows):,} prompts are trained on too, so it measures"
                    " what was learnt by heart; use part = 'train' for the one and part = 'heldout' for the other"
                )

    def validation(self) -> str:
        if len(self.conversations) < len(self.config.sets("sft")):
            return ""  # a set that could not be read is reported already
        _, kept = split_validation(self.conversations, self.config.sft.validation_fraction)
        return f"sft.validation_fraction: {len(kept):,} conversations are kept for validation"

    def tokenizer(self) -> str:
        """Checks that the tokenizer loads, that its template accepts the data, and that every
        prompt leaves room for a completion.
        """
        config, model = self.config, self.config.model
        if not model.path and not self.prompts:
            return ""  # it is made from prompts: the fault of each set is reported already
        with tempfile.TemporaryDirectory() as scratch:
            folder = tokenizer_folder(config, self._prompts_of, Path(scratch))
            with closing(TokenizerTrial(folder, model)) as trial:
                conversations: list[int] = []
                for data in config.sets("sft"):
                    rows = self.conversations.get(label(data), [])
                    rows = rows if data.on_too_long else rows[:CONVERSATIONS_MAX]
                    conversations += (tokens := list(trial.conversation_lengths(rows)))
                    check_fits(config, data, tokens)
                self.heard = trial.heard(
                    text
                    for rows in self._trial_rows().values()
                    for row in rows
                    for text in trial_completions(row, self._shown())
                )
                trial.try_continuations([[{"role": role, "content": "an answer"}] for role in self.roles])
                tried = [] if config.rl.environment else [row for _, rows in self._prompt_sets() for row in rows]
                counted = tqdm(tried, "prompts", disable=None, leave=False, delay=BAR_DELAY_S)
                lengths = dict(zip(map(id, tried), trial.prompt_lengths(counted), strict=True))
        self.vocab_size = trial.vocab_size
        self.lengths = Lengths(_mean(list(lengths.values())), _mean(conversations))
        sft = [row for rows in self.conversations.values() for row in rows]
        num_with = sum(bool(row.tools) for row in [*sft, *tried])
        lost = (
            f"; its template writes no tools, which {num_with:,} rows have"
            if num_with and not trial.knows_tools
            else ""
        )
        return f"tokenizer: {trial.vocab_size:,} tokens{self._room(lengths)}{lost}"

    def _room(self, lengths: dict[int, int]) -> str:
        """Drops the prompts that are too long where their set says so, and reports the lengths of
        the others.

        `lengths`: tokens, by id of the row.
        """
        config, kept = self.config, []
        for use in ("rl", "evaluation"):
            for data in config.sets(use) if lengths else []:
                rows = self.prompts.get(label(data), [])
                if data.on_too_long == "drop" and rows:
                    self.prompts[label(data)] = fitting(
                        data, rows, (lengths[id(row)] for row in rows), room_for(config, use)
                    )
            of_use = [row for rows in self._prompts_of(use) for row in rows] if lengths else []
            check_room(config, use, of_use, [lengths[id(row)] for row in of_use])
            kept += of_use
        longest = (
            f"; the longest of {len(kept):,} prompts has {max(lengths[id(row)] for row in kept):,} tokens"
            if kept
            else ""
        )
        return longest + (
            f"; {len(lengths) - len(kept):,} more are too long and left out" if len(kept) < len(lengths) else ""
        )

    def _prompt_sets(self) -> list[tuple[DataConfig, list[Prompt]]]:
        """The data sets of RL and evaluation that could be read, with their prompts.

        The errors of the others are reported already.
        """
        return [(data, self.prompts[label(data)]) for data in self.config.data if label(data) in self.prompts]

    def _prompts_of(self, use: str) -> list[list[Prompt]]:
        """The prompts of each set of one use; an empty list for a set that could not be read."""
        return [self.prompts.get(label(data), []) for data in self.config.sets(use)]

    def player(self) -> str:
        """Checks that the environment or the agent loads; the messages of an environment are tried
        on the chat template with the tokenizer.
        """
        rl = self.config.rl
        kind = kind_of_player(rl)
        assert kind is not None, "asked for a run with an environment or an agent"
        self.roles = kind.check(rl)
        return f"agent: {rl.agent}" if rl.agent else f"environment: {rl.environment}"

    def rewards(self, uses: list[str], tried: bool) -> str:
        """Checks that the rewards of these uses load, and score a row of each set.

        `uses`: one or both; both are scored by the rewards of the first.
        """
        config, rl = self.config, self.config.rl
        rows, written = (self._trial_rows(uses), self._shown()) if tried else ({}, [])
        rewards, args = config.rewards(uses[0]), config.reward_args(uses[0])
        try:
            best = check_rewards(
                rewards,
                args,
                rl.reward_timeout_s,
                rows,
                written,
                passing_reward(config, uses[0]),
                self.heard,
                rl.secrets,
            )
        except UserError as error:
            own = uses[0] == "evaluation" and config.evaluation.rewards
            raise UserError(str(error).replace("rl.rewards", "evaluation.rewards")) if own else error from error
        self.doubts += filter(None, [why_none_passes(config, uses[0], best)])
        lines = [
            f"rewards: {', '.join(rewards)}; tried on {', '.join(rows) or 'no data'}; a rollout passes at"
            f" {passing_reward(config, uses[0]):.6g}"
        ]
        for data, read in self._prompt_sets() if rows and COMPARING & rewards.keys() else []:
            if data.use in uses and (line := references_line([row.answer for row in read])):
                lines.append(f"  {label(data)}: {line}")
        return "\n".join(lines)

    def _trial_rows(self, uses: Sequence[str] = ("rl", "evaluation")) -> TrialRows:
        """The rows of each set that rewards are tried on; none where that would take an invented
        environment, or invented stored rollouts.
        """
        rl = self.config.rl
        sets = [] if rl.environment or rl.agent or rl.rollouts_from else self._prompt_sets()
        return {label(data): [row.for_reward() for row in read[:ROWS_MAX]] for data, read in sets if data.use in uses}

    def _shown(self) -> list[str]:
        """A completion from each set of SFT."""
        return [content_text(read[0].messages[-1]) for read in self.conversations.values()]

    def filters(self, tried: bool) -> str:
        """Checks that the filters load, and return what they must; not tried where that would take
        invented answers of an environment.
        """
        rl = self.config.rl
        filters = resolve_filters(rl.filters)
        if tried:
            check_thresholds(rl.filters)
        for resolved in filters if tried and not (rl.environment or rl.agent) else []:
            apply_filters([trial_group(rl.group_size, map(part_of, rl.rewards))], [resolved])
        return f"filters: {', '.join(f'{name} {threshold:g}' for name, threshold in rl.filters.items()) or 'none'}"


def label(data: DataConfig) -> str:
    return f"data.{data.name} ({data.use})"


def named_folder(field: str, folder: Path) -> dict[str, object]:
    """The model of a folder, as `try_model` takes it."""
    return {"where": f"{field}={folder}", "folder": str(folder)}


def tried_line(folder: Path, tried: TriedModel) -> str:
    return f"{folder}, {tried.num_parameters:,} parameters; rows of training: {tried.rows}"


def _mean(counts: list[int]) -> float:
    return sum(counts) / max(1, len(counts))


def _short(text: str) -> str:
    return repr(text if len(text) <= TEXT_CHARS_MAX else f"{text[:TEXT_CHARS_MAX]}...")
