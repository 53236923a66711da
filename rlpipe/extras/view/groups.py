"""The groups of an iteration or of an evaluation: their rollouts and rewards, and if they were
trained or dropped.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

import numpy as np

from rlpipe.base.errors import UserError
from rlpipe.base.manifests import Manifest
from rlpipe.base.references import ArtifactRef
from rlpipe.extras.view.library import CommittedFile, InGroup, Library, rows_with
from rlpipe.records.kinds import Float, Int32, Int64, Json, Mask, OptionalFloat, Spans, Text
from rlpipe.records.prompt import Messages, Prompt
from rlpipe.records.rollout import EnvironmentOutcome, Rollout, TokenGaps
from rlpipe.report.stored_turns import turns_to_show
from rlpipe.store.run import BEFORE_SFT, Run

Place = Literal["iterations", "evaluations"]
FATES = ("trained", "dropped", "carried", "left out", "not filtered yet", "evaluated")


@dataclass(frozen=True)
class GroupMember:
    """The columns of a rollout that the list of groups needs."""

    group_index: Int32
    prompt_id: Text
    prompt: Text
    reward: OptionalFloat = None


@dataclass(frozen=True)
class ShownRollout:
    """A rollout without its tokens."""

    prompt_id: Text
    group_index: Int32
    rollout_index: Int32
    prompt: Text
    completion: Text
    weight_version: Int32
    weight_versions: Spans
    finish_reason: Text
    seed: Int64
    engine: Text
    environment: Annotated[EnvironmentOutcome | None, Json(sort_keys=True, record=EnvironmentOutcome)] = None
    reward: OptionalFloat = None
    reward_parts: Annotated[dict[str, float] | None, Json(sort_keys=True)] = None
    reward_fault: Text = ""

    @property
    def num_tokens(self) -> int:
        return sum(span.num_tokens for span in self.weight_versions)

    @property
    def has_turns(self) -> bool:
        """True when there are several turns. The text of the completion does not say where they
        begin."""
        return self.environment is not None and len(self.environment.messages) > 0


@dataclass(frozen=True)
class TrainedRollout:
    """The data that the batch adds to a rollout; its mask is the one of the training."""

    group_index: Int32
    rollout_index: Int32
    advantage: Float
    loss_mask: Mask


@dataclass
class GroupLine:
    """A group in the list of groups. `reason`: why it was dropped."""

    group_index: int
    prompt_id: str
    prompt: str
    fate: str
    reason: str = ""
    rewards: list[float] = field(default_factory=list)  # of those that are scored
    num_rollouts: int = 0

    @property
    def mean(self) -> float | None:
        return float(np.mean(self.rewards)) if self.rewards else None

    @property
    def spread(self) -> float:
        """The standard deviation of the rewards."""
        return float(np.std(self.rewards)) if self.rewards else 0.0


@dataclass(frozen=True)
class GroupFiles:
    """The groups of an iteration, as far as they are scored, or of an evaluation: the files that
    hold them.
    """

    library: Library
    run: Run
    place: Place
    number: int  # the iteration, or the weight version that was evaluated
    scores: list[CommittedFile]
    prompts: list[CommittedFile] = field(default_factory=list)
    batch: tuple[ArtifactRef, Manifest] | None = None  # of all sampling rounds
    # of the tokens that were trained; older code stored none
    gap: tuple[ArtifactRef, Manifest] | None = None

    @property
    def path(self) -> str:
        """The address of its page, below that of the run."""
        return f"{self.place}/{self.number}"

    @property
    def title(self) -> str:
        """The title for a person."""
        return f"iteration {self.number}" if self.place == "iterations" else f"evaluation of version {self.number}"

    @property
    def crumbs(self) -> list[list[str]]:
        """The path to its page: names and addresses."""
        home = f"/runs/{self.run.name}"
        above = [["evaluations", f"{home}/evaluations"]] if self.place == "evaluations" else []
        return [[self.run.name, home], *above, [self.title, f"{home}/{self.path}"]]

    def groups(self) -> list[GroupLine]:
        """All groups, in order."""
        fates, lines = self._fates(), dict[int, GroupLine]()
        for member in (member for file in self.scores for member in self.library.rows(file, GroupMember)):
            index = member.group_index
            if index not in lines:
                lines[index] = GroupLine(
                    index, member.prompt_id, member.prompt, *fates.get(index, (self._otherwise, ""))
                )
            lines[index].num_rollouts += 1
            if member.reward is not None:
                lines[index].rewards.append(member.reward)
        return [lines[index] for index in sorted(lines)]

    @property
    def _otherwise(self) -> str:
        """The fate of a group that no file names."""
        return "evaluated" if self.place == "evaluations" else "left out" if self.batch else "not filtered yet"

    def _fates(self) -> dict[int, tuple[str, str]]:
        """group_index -> the fate of the group (trained, dropped, ...), and the reason why it was
        dropped.
        """
        if self.batch is None:
            return {}
        named, fates = {record.plain_name for record in self.batch[1].files}, dict[int, tuple[str, str]]()
        for name, fate in (("batch.parquet", "trained"), ("carried.parquet", "carried")):
            if name in named:
                rows = self.library.table(CommittedFile.of(self.batch, name), InGroup)
                fates |= dict.fromkeys(rows["group_index"].unique().to_pylist(), (fate, ""))
        return fates | {
            int(index): ("dropped", reason) for index, reason in self.batch[1].metrics.get("dropped", {}).items()
        }

    def fate(self, group_index: int) -> tuple[str, str]:
        """The fate of a group (trained, dropped, ...), and the reason why it was dropped."""
        return self._fates().get(group_index, (self._otherwise, ""))

    def rollouts(self, group_index: int) -> list[ShownRollout]:
        """The rollouts of a group; UserError when there is no such group."""
        for file in self.scores:
            if rows := self.library.rows(file, ShownRollout, group_index):
                return sorted(rows, key=lambda row: row.rollout_index)
        raise UserError(f"{self.path} of run {self.run.name} has no group {group_index}, or it is not scored yet")

    def greedy(self) -> list[ShownRollout]:
        """The greedy rollout of each prompt of an evaluation."""
        return [row for file in self.scores for row in self.library.rows(file, ShownRollout) if row.rollout_index == 0]

    def rollout(self, group_index: int, rollout_index: int) -> Rollout:
        """A rollout with its tokens; UserError when there is none."""
        for row in (row for file in self.scores for row in self.library.rows(file, Rollout, group_index)):
            if row.rollout_index == rollout_index:
                return row
        raise UserError(f"group {group_index} of {self.path} of run {self.run.name} has no rollout {rollout_index}")

    def turns(self, group_index: int) -> dict[int, Messages]:
        """rollout_index -> who said what, for the rollouts of a group that have several turns."""
        if not any(rollout.has_turns for rollout in self.rollouts(group_index)):
            return {}
        rows = (row for file in self.scores for row in self.library.rows(file, Rollout, group_index))
        turns_of = turns_to_show(self.sampled_by)
        return {row.rollout_index: turns for row in rows if len(turns := turns_of(row)) > 1}

    def turns_of(self, rollout: ShownRollout) -> Messages | None:
        """The turns of a rollout, with who said each; None for a rollout of one turn."""
        return self.turns(rollout.group_index).get(rollout.rollout_index) if rollout.has_turns else None

    @property
    def sampled_by(self) -> Run:
        """The run whose settings the rollouts were sampled with: this one, or an ancestor."""
        if self.place == "iterations":
            return self.run.owner("rl", self.number, "rollouts")
        return self.run.owner(*self.run.policy_place(self.number), "evaluation")

    def neighbours(self, group_index: int) -> tuple[int | None, int | None]:
        """The groups before and after a group."""
        tables = [self.library.table(file, InGroup) for file in self.scores]
        return beside(group_index, {index for table in tables for index in table["group_index"].unique().to_pylist()})

    def trained(self, group_index: int) -> dict[int, TrainedRollout]:
        """rollout_index -> the batch's data, for the rollouts that are trained."""
        if self.batch is None:
            return {}
        rows = self.library.rows(CommittedFile.of(self.batch, "batch.parquet"), TrainedRollout, group_index)
        return {row.rollout_index: row for row in rows}

    def gaps(self, group_index: int) -> dict[int, np.ndarray]:
        """rollout_index -> the engine-trainer gap of each token that was trained, where it is
        stored.
        """
        if self.gap is None:
            return {}
        rows = self.library.rows(CommittedFile.of(self.gap, "gap.parquet"), TokenGaps, group_index)
        return {row.rollout_index: row.gap for row in rows}

    def prompt(self, prompt_id: str) -> Prompt | None:
        """The prompt with its messages and reference answer, where it is stored."""
        for file in self.prompts:
            table = self.library.table(file, Prompt)
            if rows := self.library.parsed(file, rows_with(table, "prompt_id", prompt_id), Prompt):
                return rows[0]
        return None


def beside(number: int, known: set[int]) -> tuple[int | None, int | None]:
    """The known numbers before and after `number`."""
    return max((k for k in known if k < number), default=None), min((k for k in known if k > number), default=None)


def scored_files(run: Run, iteration: int) -> list[CommittedFile]:
    """The rollouts of each sampling round of an iteration that is scored."""
    files = list[CommittedFile]()
    while artifact := run.artifact("rl", iteration, f"scores/round-{len(files)}"):
        files.append(CommittedFile.of(artifact, "scores.parquet"))
    return files


def iteration_groups(library: Library, run: Run, iteration: int) -> GroupFiles:
    """The groups of an iteration, also of one that is not committed yet, if a sampling round is
    scored. UserError when there are none."""
    scores = scored_files(run, iteration)
    if not scores:
        raise UserError(f"iteration {iteration} of run {run.name}: nothing of it is scored")
    drawn = [run.committed("rl", iteration, f"prompts/round-{round_index}") for round_index in range(len(scores))]
    prompts = [CommittedFile.of(artifact, "prompts.parquet") for artifact in drawn]
    batch = run.artifact("rl", iteration, f"batch/round-{len(scores) - 1}")
    return GroupFiles(
        library, run, "iterations", iteration, scores, prompts, batch, run.artifact("rl", iteration, "gap")
    )


def evaluation_groups(library: Library, run: Run, version: int) -> GroupFiles:
    """The groups of the evaluation of a weight version; UserError when it was not evaluated."""
    artifact = run.artifact(*run.policy_place(version), "evaluation") if version >= BEFORE_SFT else None
    if artifact is None:
        raise UserError(
            f"weight version {version} of run {run.name} is not evaluated; rlpipe evaluate {run.name} --version"
            f" {version}"
        )
    return GroupFiles(library, run, "evaluations", version, [CommittedFile.of(artifact, "evaluation.parquet")])
