"""Stored rollouts instead of sampled ones (`rl.rollouts_from`): those of another run of the store,
or of Parquet files from anywhere.

Files are imported once, before the first iteration of the run that names them; from then on the run
does not need them. Each iteration then copies its prompts and rollouts into the run, so that a run
is complete without other runs.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
from collections.abc import Callable, Collection, Iterable
from dataclasses import asdict, dataclass, field, replace

from rlpipe.base.errors import UserError
from rlpipe.base.manifests import StageResult
from rlpipe.base.references import ArtifactRef
from rlpipe.config.pipeline import RUN
from rlpipe.config.settings import artifact_settings
from rlpipe.data.cursor import CursorPosition
from rlpipe.data.sources import PromptSets
from rlpipe.extras.imports.foreign import UNKNOWN_SOURCE, ForeignFiles, has_no_logprobs, prompt_book
from rlpipe.loop.session import Session
from rlpipe.loop.stage import Attempt, Produced, StageKey, run_stage, stage
from rlpipe.records.prompt import Prompt
from rlpipe.records.rollout import ROLLOUTS, SCORES, Group, Rollout, grouped, is_finished
from rlpipe.stages.sampling import carried_groups, prompts_by_id
from rlpipe.stages.scoring import KeptReward
from rlpipe.store.artifacts import SOURCE_INPUT, file_sha256, read_file, read_records
from rlpipe.store.facts import PromptsFacts, facts_of
from rlpipe.store.opening import open_existing
from rlpipe.store.progress import Progress
from rlpipe.store.run import Run
from rlpipe.stored.redo import stored_rounds

log = logging.getLogger(__name__)
PROMPTS_KEY = "prompts/round-0"  # all rounds of the source are imported as one
IMPORTED = "rollouts/round-0/shard-000"  # the last that an iteration needs of its source
CHUNK_GROUPS = 256  # groups a file of the imported artifact
StoredGroup = tuple[Prompt, Group]


@dataclass(frozen=True)
class StoredIteration:
    """The groups that are stored for one iteration. `inputs`: the artifacts that they were read
    from, by name.
    """

    groups: list[StoredGroup]
    inputs: dict[str, ArtifactRef] = field(default_factory=dict)
    data_sha256: str = ""  # of the data of the run they are from
    cursor: CursorPosition | None = None  # in these data: the position at which that run would have gone on


def is_run(config_value: str) -> bool:
    """True when `rl.rollouts_from` names a run of the store."""
    return config_value.startswith(RUN)


def source_run(run: Run) -> Run:
    """The run that `rl.rollouts_from` names; UserError naming the field when its rollouts do not
    fit, or are too few.
    """
    rl, context = run.config.rl, run.config.model.context_tokens_max
    source = open_existing(run.store, rl.rollouts_from.removeprefix(RUN))
    if source.config.model.context_tokens_max > context:
        raise UserError(
            f"model.context_tokens_max={context}: the rollouts of run {source.name} may have "
            f"{source.config.model.context_tokens_max} tokens; set it to that, or give those that fit as a Parquet file"
        )
    committed = Progress(source).num_committed("rl", rl.num_iterations)
    _check_enough(run, committed, "committed iterations", rl.num_iterations)
    return source


def check_tokenizer(source: Run, tokenizer_sha256: str) -> None:
    """UserError unless a run has this tokenizer, byte for byte."""
    if source.committed("base", 0, "tokenizer")[1].file("tokenizer.json").sha256 != tokenizer_sha256:
        raise UserError(
            f"rl.rollouts_from=run:{source.name}: that run has another tokenizer, so its tokens mean other text; use"
            " the model.path (or, without one, the data sets) of that run, or a run with this tokenizer"
        )


def foreign_files(run: Run, prompts: PromptSets, vocab_size: int) -> ForeignFiles:
    """The files that `rl.rollouts_from` names.

    `vocab_size`: the larger one of the tokenizer's and the model's.
    """
    rl, book = run.config.rl, prompt_book([prompt for rows in prompts("rl") for prompt in rows])
    return ForeignFiles(rl.rollouts_from, run.config.model.context_tokens_max, vocab_size, book)


def check_enough(run: Run, num_groups: int) -> None:
    """UserError when a file's groups are too few for all iterations of the run."""
    _check_enough(run, num_groups, "groups", groups_before(run, run.config.rl.num_iterations))


def check_groups(run: Run, sizes: Collection[int]) -> None:
    """UserError when a file's groups are too few for the run, or have one rollout each, so that all
    would be dropped.
    """
    rl, alone = run.config.rl, max(sizes, default=0) == 1
    check_enough(run, len(sizes))
    if alone and rl.rollouts_min > 1:
        raise UserError(
            f"rl.estimator={rl.estimator!r} compares the rollouts of a group, and each group of"
            f" rl.rollouts_from={rl.rollouts_from!r} has one; use reinforce_plus_plus, or put the rollouts of a prompt"
            " side by side, with one group_index"
        )
    if alone and "nonzero_std" in rl.filters:
        raise UserError(
            f"rl.filters: nonzero_std drops every group of one, as those of rl.rollouts_from={rl.rollouts_from!r} are;"
            " use filters = {}"
        )


def _check_enough(run: Run, count: int, unit: str, wanted: int) -> None:
    rl = run.config.rl
    if count < wanted:
        raise UserError(
            f"rl.rollouts_from={rl.rollouts_from!r} has {count} whole {unit}; {rl.num_iterations} iterations need"
            f" {wanted}: lower rl.num_iterations or rl.num_prompts, or give more"
        )


def groups_before(run: Run, iteration: int) -> int:
    """The number of a file's groups that the iterations before this one use; iterations of a fork's
    parent count by the parent's settings.
    """
    return sum(run.owner("rl", index, "prompts").config.rl.num_prompts for index in range(iteration))


@stage("rl", "imported")
def import_files(session: Session, attempt: Attempt, *, iteration: int) -> Produced:
    """All whole groups of the files that `rl.rollouts_from` names, checked row by row and written
    in files of CHUNK_GROUPS groups.
    """
    run = session.run
    ref, base = run.committed("base", 0, "policy")
    model = json.loads(read_file(run.store, ref.folder, base.file("config.json")))
    files = foreign_files(run, session.data.prompts, max(session.data.tokenizer.vocab_size, model.get("vocab_size", 0)))
    digests = {str(path): file_sha256(path) for path in files.paths()}
    groups, records, sizes, num_unknown = files.groups(), [], list[int](), 0
    while chunk := numbered(itertools.islice(groups, CHUNK_GROUPS), len(sizes)):
        name = f"{len(records) // 2:05d}.parquet"
        records.append(attempt.write(f"prompts-{name}", [prompt for prompt, _ in chunk], Prompt))
        records.append(
            attempt.write(f"rollouts-{name}", [rollout for _, group in chunk for rollout in group], Rollout, SCORES)
        )
        sizes += [len(group) for _, group in chunk]
        num_unknown += sum(has_no_logprobs(rollout) for _, group in chunk for rollout in group)
    check_groups(run, sizes)
    if num_unknown:
        log.warning(
            "rl.rollouts_from=%s: %d of %d rollouts have no rollout_logprobs: they are trained as if the "
            "policy of their iteration had sampled them, with the trainer's own logprobs, "
            "and rl.importance corrects nothing",
            run.config.rl.rollouts_from, num_unknown, sum(sizes),
        )  # fmt: skip
    return Produced(records, {"num_groups": len(sizes), "num_without_logprobs": num_unknown, "files": digests})


def numbered(groups: Iterable[StoredGroup], first: int) -> list[StoredGroup]:
    """The groups with group indices from `first` on."""
    return [
        (prompt, [replace(rollout, group_index=index) for rollout in group])
        for index, (prompt, group) in enumerate(groups, start=first)
    ]


def imported_at(run: Run) -> int:
    """The iteration beside which a run imports its files: the first of its own."""
    return run.fork_at + 1


async def import_prompts(session: Session, *, iteration: int) -> StageResult:
    """The prompts of this iteration's stored rollouts."""

    def write(stored: StoredIteration, attempt: Attempt) -> Produced:
        prompts: dict[str, Prompt] = {}
        for prompt, _ in stored.groups:
            same = prompts.setdefault(prompt.prompt_id, prompt)
            if same.prompt_tokens.tolist() != prompt.prompt_tokens.tolist():
                name = session.config.rl.rollouts_from
                raise UserError(f"rl.rollouts_from={name!r}: two different prompts are called {prompt.prompt_id}")
        file = attempt.write("prompts.parquet", list(prompts.values()), Prompt)
        digest, cursor = session.data.sha256, stored.cursor
        if (
            stored.data_sha256 != digest
        ):  # a fork that samples again goes on where the source would have, else at the start
            cursor = session.data.cursor.start() if session.config.sets("rl") else None
        facts = PromptsFacts(num_prompts=len(prompts), first_group=0, cursor=cursor, data_sha256=digest)
        return Produced([file], asdict(facts))

    return await _import(session, StageKey("rl", iteration, PROMPTS_KEY), {}, write)


async def import_rollouts(session: Session, *, iteration: int, prompts: ArtifactRef) -> StageResult:
    """This iteration's stored rollouts, and their stored rewards where the prompts are not
    known.
    """

    def write(stored: StoredIteration, attempt: Attempt) -> Produced:
        rollouts = [_with_text(session, rollout) for _, group in stored.groups for rollout in group]
        files = [attempt.write("rollouts.parquet", rollouts, Rollout, ROLLOUTS)]
        kept = [
            KeptReward(rollout.group_index, rollout.rollout_index, rollout.reward or 0.0, rollout.reward_parts or {})
            for prompt, group in stored.groups
            if prompt.source == UNKNOWN_SOURCE
            for rollout in group
        ]
        files += [attempt.write("rewards.parquet", kept, KeptReward)] if kept else []
        num_tokens = sum(len(rollout.completion_tokens) for rollout in rollouts)
        return Produced(files, {"num_rollouts": len(rollouts), "num_tokens": num_tokens, "num_rewards_kept": len(kept)})

    return await _import(session, StageKey("rl", iteration, IMPORTED), {"prompts": prompts}, write)


async def _import(
    session: Session,
    key: StageKey,
    inputs: dict[str, ArtifactRef],
    write: Callable[[StoredIteration, Attempt], Produced],
) -> StageResult:
    """Commits what `write` makes of the source's rollouts.

    The result does not need its source any more.
    """
    standing = await asyncio.to_thread(session.run.artifact, *key)
    if standing is not None:
        return StageResult(standing[0], standing[1].metrics, cached=True)
    if is_run(session.config.rl.rollouts_from):
        stored = await asyncio.to_thread(_of_run, session, key.iteration)
    else:
        files = await import_files(session, iteration=imported_at(session.run))
        stored = await asyncio.to_thread(_of_files, session, files, key.iteration)
    # a field with a condition is about sampling, and nothing is sampled
    settings = artifact_settings(session.config, key.phase, key.stage.split("/", 1)[0], judged_by=())
    return await run_stage(session, key, inputs | stored.inputs, settings, lambda attempt: write(stored, attempt))


def _of_run(session: Session, iteration: int) -> StoredIteration:
    """All sampling rounds of another run's iteration; UserError when there are no more."""
    source, store = source_run(session.run), session.run.store
    check_tokenizer(source, session.run.committed("base", 0, "tokenizer")[1].file("tokenizer.json").sha256)
    rounds = stored_rounds(source, iteration)
    drawn, shards = [stored.prompts.ref for stored in rounds], [ref for stored in rounds for ref in stored.rollouts]
    prompts = prompts_by_id(store, drawn)
    rollouts = [
        rollout for ref in shards for rollout in read_records(store, ref, "rollouts.parquet", Rollout, ROLLOUTS)
    ]
    last = facts_of(rounds[-1].prompts.metrics, PromptsFacts, drawn[-1].folder)
    handed = _handed_on(source, iteration)
    groups = [group for group in grouped(rollouts) if not (is_finished(group) and group[0].group_index in handed)]
    return StoredIteration(
        [(prompts[group[0].prompt_id], group) for group in groups],
        {f"{SOURCE_INPUT}{ref.folder}": ref for ref in drawn + shards},
        last.data_sha256,
        last.cursor,
    )


def _handed_on(source: Run, iteration: int) -> set[int]:
    """The groups that the source's next iteration has too.

    Finished ones among them were trained there, so they are imported once.
    """
    record = source.iteration(iteration)
    assert record is not None, "there are as many committed iterations as are needed"
    return {group[0].group_index for group in carried_groups(source.store, record.artifacts["batch"])}


def _of_files(session: Session, files: StageResult, iteration: int) -> StoredIteration:
    """The groups of the imported files that belong to an iteration, numbered from 0."""
    run = session.run
    first, end = groups_before(run, iteration), groups_before(run, iteration + 1)
    check_enough(run, files.metrics["num_groups"])
    groups: list[StoredGroup] = []
    for chunk in range(first // CHUNK_GROUPS, -(-end // CHUNK_GROUPS)):
        prompts = read_records(run.store, files.ref, f"prompts-{chunk:05d}.parquet", Prompt)
        rollouts = read_records(run.store, files.ref, f"rollouts-{chunk:05d}.parquet", Rollout, SCORES)
        chunk_groups = zip(prompts, grouped(rollouts), strict=True)
        groups += [entry for entry in chunk_groups if first <= entry[1][0].group_index < end]
    assert len(groups) == end - first, f"iteration {iteration} takes {end - first} groups, {len(groups)} were read"
    return StoredIteration(numbered(groups, 0), {"imported": files.ref})


def _with_text(session: Session, rollout: Rollout) -> Rollout:
    """The rollout with its completion's text; UserError when the stored text of a single turn is
    not that of the tokens.
    """
    tokens = rollout.completion_tokens.tolist()
    decoded = session.data.tokenizer.decode(tokens)
    if not rollout.completion:
        return replace(rollout, completion=decoded)
    # others write a text without its marks that are special tokens
    if rollout.loss_mask.all() and not any(
        text.strip() in rollout.completion for text in (decoded, session.data.tokenizer.decode_plain(tokens))
    ):
        raise UserError(
            f"rl.rollouts_from={session.config.rl.rollouts_from!r}: a completion of prompt {rollout.prompt_id} reads "
            f"{rollout.completion[:80]!r}, but its tokens {decoded[:80]!r}: another tokenizer made them"
        )
    return rollout
