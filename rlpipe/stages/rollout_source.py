"""Where stored rollouts come from when nothing is sampled (`rl.rollouts_from`): another run of the store, or Parquet files."""

from __future__ import annotations

from dataclasses import dataclass, field

from rlpipe.data.prompt import Prompt
from rlpipe.rollouts import PROMPTS, ROLLOUTS, read_rows
from rlpipe.stages.rollout_files import FileRollouts
from rlpipe.stages.stored import stored_rounds
from rlpipe.store.artifacts import reference_of_file
from rlpipe.store.run import Run, open_existing
from rlpipe.types import ArtifactRef, JsonDict, UserError

RUN = "run:"


@dataclass(frozen=True)
class Stored:
    """The rollouts of one iteration. `inputs`: what they were read from, by name."""

    prompts: list[JsonDict]  # rows of PROMPTS
    rollouts: list[JsonDict]  # rows of ROLLOUTS
    rewards: list[JsonDict]  # rows of KEPT_REWARDS: of rollouts whose prompt is not known
    inputs: dict[str, ArtifactRef] = field(default_factory=dict)
    cursor: JsonDict | None = None  # {"cursor", "data_sha256"} of the run they are from


@dataclass(frozen=True)
class RunRollouts:
    """Another run of the store: its iteration k, all sampling rounds of it, is ours."""

    run: Run

    @property
    def pins(self) -> dict[str, ArtifactRef]:
        """What must stay as it is from the first iteration to the last, by name."""
        key = f"{self.run.root}/run.json"
        return {key: reference_of_file(self.run.store, key)}

    def check(self, tokenizer_sha256: str, vocab_size: int) -> None:
        """UserError unless it is the same tokenizer, to the byte."""
        theirs = self.run.committed("base", 0, "tokenizer")[1].file("tokenizer.json").sha256
        if theirs != tokenizer_sha256:
            raise UserError(
                f"rl.rollouts_from=run:{self.run.name}: that run has another tokenizer, so its tokens mean other text; use the "
                "model.path (or, without one, the data sets) of that run, or a run with this tokenizer"
            )

    def iteration(self, iteration: int) -> Stored:
        """The rollouts of our iteration; UserError when there are no more."""
        if self.run.iteration_record(iteration) is None:
            raise UserError(f"rl.rollouts_from=run:{self.run.name}: its iteration {iteration} is not committed (yet)")
        rounds = stored_rounds(self.run, iteration)
        store, shards = self.run.store, [ref for each in rounds for ref in each.rollouts]
        prompts = [row for each in rounds for row in read_rows(store, each.prompts.ref, "prompts.parquet", PROMPTS)]
        rollouts = [row for ref in shards for row in read_rows(store, ref, "rollouts.parquet", ROLLOUTS)]
        inputs = {ref.folder: ref for each in rounds for ref in (each.prompts.ref, *each.rollouts)}
        told = rounds[-1].prompts.metrics
        return Stored(prompts, rollouts, [], inputs, {name: told[name] for name in ("cursor", "data_sha256")})


@dataclass(frozen=True)
class ParquetRollouts:
    """Parquet files: their whole groups in order, num_prompts of them an iteration."""

    files: FileRollouts
    run: Run  # the one that is fed

    @property
    def pins(self) -> dict[str, ArtifactRef]:
        return {str(path): ArtifactRef(str(path), sha256) for path, sha256 in self.files.sha256.items()}

    def check(self, tokenizer_sha256: str, vocab_size: int) -> None:
        """UserError for a token outside the vocabulary."""
        token, where = self.files.largest_token
        if token >= vocab_size:
            raise UserError(f"{where}: token {token} is outside the vocabulary of {vocab_size}: another tokenizer made it")

    def iteration(self, iteration: int) -> Stored:
        first, end, total = _groups_of(self.run, iteration), _groups_of(self.run, iteration + 1), len(self.files.groups)
        if end > total:
            raise _too_few(self.files.name, total, "groups", end, iteration + 1)
        return Stored(*self.files.read(first, end - first))


RolloutSource = RunRollouts | ParquetRollouts


def _groups_of(run: Run, iterations: int) -> int:
    """Groups of a file that the first iterations take: those of a fork's parent took as many as the parent was set to."""
    return sum(run.owner("rl", each, "prompts").config.rl.num_prompts for each in range(iterations))


def open_source(run: Run, prompts: list[Prompt]) -> RolloutSource:
    """The source that `rl.rollouts_from` of a run names, its files checked row by row; writes nothing.

    `prompts`: those of the data sets of use rl. UserError naming the field, file or row, also when there is not enough in it.
    """
    rl, context = run.config.rl, run.config.model.context_tokens_max
    if rl.rollouts_from.startswith(RUN):
        source = open_existing(run.store, rl.rollouts_from.removeprefix(RUN))
        if source.config.rl.group_size != rl.group_size:
            raise UserError(
                f"rl.group_size={rl.group_size}: the groups of run {source.name} have {source.config.rl.group_size} rollouts; "
                f"set rl.group_size = {source.config.rl.group_size}"
            )
        if source.config.model.context_tokens_max > context:
            raise UserError(
                f"model.context_tokens_max={context}: the rollouts of run {source.name} may have "
                f"{source.config.model.context_tokens_max} tokens; set it to that, or give those that fit as a Parquet file"
            )
        committed = source.num_committed("rl", rl.num_iterations)
        if committed < rl.num_iterations:
            raise _too_few(rl.rollouts_from, committed, "committed iterations", rl.num_iterations, rl.num_iterations)
        return RunRollouts(source)
    files = FileRollouts.open(rl.rollouts_from, rl.group_size, context, prompts)
    wanted = _groups_of(run, rl.num_iterations)
    if len(files.groups) < wanted:
        raise _too_few(files.name, len(files.groups), "groups", wanted, rl.num_iterations)
    return ParquetRollouts(files, run)


def _too_few(name: str, found: int, unit: str, wanted: int, iterations: int) -> UserError:
    return UserError(
        f"rl.rollouts_from={name!r} has {found} whole {unit}; {iterations} iterations need {wanted}: "
        "lower rl.num_iterations or rl.num_prompts, or give more"
    )
