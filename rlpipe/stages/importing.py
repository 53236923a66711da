"""The stages import_prompts and import_rollouts: stored rollouts become this run's own, so that it is whole by itself."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from functools import partial

from rlpipe.data.cursor import PromptCursor
from rlpipe.rollouts import KEPT_REWARDS, PROMPTS, ROLLOUTS
from rlpipe.stages.commit import Attempt, Produced, StageKey, run_stage
from rlpipe.stages.rollout_source import RolloutSource, Stored
from rlpipe.stages.session import Session
from rlpipe.store.artifacts import SOURCE_INPUT, read_file
from rlpipe.types import ArtifactRef, JsonDict, StageResult, UserError

ROUND = "round-0"  # whatever the rounds of the source, they are imported as one
IMPORTED = f"rollouts/{ROUND}/shard-000"  # the last that an iteration needs of its source
PIN = f"{SOURCE_INPUT}of all "  # begins the name of an input that every iteration has
Write = Callable[[Stored, Attempt], Produced]  # of the source's rollouts


async def import_prompts(session: Session, iteration: int) -> StageResult:
    """The prompts of this iteration's stored rollouts."""

    def write(stored: Stored, attempt: Attempt) -> Produced:
        record = attempt.write_rows("prompts.parquet", stored.prompts, PROMPTS)
        metrics = {"num_prompts": len(stored.prompts), "first_group": 0, **_cursor(session, stored)}
        return Produced([record], metrics)

    return await _import(session, StageKey("rl", iteration, f"prompts/{ROUND}"), {}, write)


async def import_rollouts(session: Session, iteration: int, prompts: ArtifactRef) -> StageResult:
    """This iteration's stored rollouts, and the rewards that are kept because their prompts are not known."""

    def write(stored: Stored, attempt: Attempt) -> Produced:
        rollouts = [_with_text(session, row) for row in stored.rollouts]
        files = [attempt.write_rows("rollouts.parquet", rollouts, ROLLOUTS)]
        if stored.rewards:
            files.append(attempt.write_rows("rewards.parquet", stored.rewards, KEPT_REWARDS))
        tokens = sum(len(row["completion_tokens"]) for row in rollouts)
        return Produced(files, {"num_rollouts": len(rollouts), "num_tokens": tokens, "num_rewards_kept": len(stored.rewards)})

    return await _import(session, StageKey("rl", iteration, IMPORTED), {"prompts": prompts}, write)


async def _import(session: Session, key: StageKey, inputs: dict[str, ArtifactRef], write: Write) -> StageResult:
    """Commits what `write` makes of the source's rollouts. What is imported needs its source no more."""
    found = await asyncio.to_thread(session.run.artifact, *key)
    if found is not None:
        return StageResult(found[0], found[1].metrics, cached=True)
    stored, sources = await asyncio.to_thread(_stored, session, key.iteration)
    return await run_stage(session, key, inputs | sources, partial(write, stored))


def _stored(session: Session, iteration: int) -> tuple[Stored, dict[str, ArtifactRef]]:
    """The rollouts of an iteration and the inputs to record; UserError when the source is not what it was, or does not fit."""
    source = session.rollout_source
    _check_unchanged(session, iteration, source)
    _check_tokens(session, source)
    stored = source.iteration(iteration)
    pins = {f"{PIN}{name}": ref for name, ref in source.pins.items()}
    return stored, pins | {f"{SOURCE_INPUT}{name}": ref for name, ref in stored.inputs.items()}


def _check_unchanged(session: Session, iteration: int, source: RolloutSource) -> None:
    """The pins are those of the prompts that go with these rollouts, or of the iteration before."""
    run = session.run
    before = run.artifact("rl", iteration, f"prompts/{ROUND}") or (
        run.artifact("rl", iteration - 1, IMPORTED) if iteration else None
    )
    if before is None or before[1].settings["rl.rollouts_from"] != session.config.rl.rollouts_from:
        return  # nothing was imported before, or (in a fork) from elsewhere
    recorded = {name.removeprefix(PIN): sha256 for name, sha256 in before[1].inputs.items() if name.startswith(PIN)}
    pins = {name: ref.sha256 for name, ref in source.pins.items()}
    differ = [name for name in sorted({*pins, *recorded}) if pins.get(name) != recorded.get(name)]
    if differ:
        raise UserError(
            f"rl.rollouts_from: {', '.join(differ)} is not what iteration {before[1].iteration} was made of: restore it, or fork"
        )


def _check_tokens(session: Session, source: RolloutSource) -> None:
    run = session.run
    tokenizer = run.committed("base", 0, "tokenizer")[1].file("tokenizer.json").sha256
    ref, base = run.committed("base", 0, "policy")
    model = json.loads(read_file(run.store, ref.folder, base.file("config.json")))
    source.check(tokenizer, max(session.tokenizer.vocab_size, model.get("vocab_size", 0)))


def _with_text(session: Session, row: JsonDict) -> JsonDict:
    """The row with its completion's text; UserError when a text of one turn is not what the tokens say."""
    decoded = session.tokenizer.decode(row["completion_tokens"])
    if not row["completion"]:
        return {**row, "completion": decoded}
    if all(row["loss_mask"]) and decoded.strip() not in row["completion"]:
        raise UserError(
            f"rl.rollouts_from={session.config.rl.rollouts_from!r}: a completion of prompt {row['prompt_id']} reads "
            f"{row['completion'][:80]!r}, but its tokens {decoded[:80]!r}: another tokenizer made them"
        )
    return row


def _cursor(session: Session, stored: Stored) -> JsonDict:
    """Where a fork that samples again goes on: where the source would have; else at the start."""
    digest, sets = session.data_sha256, session.config.sets("rl")
    if stored.cursor is not None and stored.cursor["data_sha256"] == digest:
        return stored.cursor
    sizes = [len(rows) for rows in session.prompts("rl")]
    start = PromptCursor(sizes, [entry.weight for entry in sets], session.config.seed).start() if sets else None
    return {"cursor": start, "data_sha256": digest}
