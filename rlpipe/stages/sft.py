"""The stages of SFT: conversations become tokens once; then segments of steps, each committed with its state."""

from __future__ import annotations

from functools import partial

from rlpipe.data.conversations import split_validation, tokenise_conversations
from rlpipe.data.cursor import PromptCursor
from rlpipe.data.sources import load_conversations
from rlpipe.rollouts import CONVERSATIONS
from rlpipe.stages.commit import Attempt, Produced, StageKey, run_stage
from rlpipe.stages.session import Session, data_seed
from rlpipe.stages.training import OnProgress, save_job, sft_job, train_job
from rlpipe.types import ArtifactRef, StageResult, UserError


async def prepare_sft_data(session: Session, tokenizer: ArtifactRef) -> StageResult:
    """Tokenises the conversations of all SFT sets, mixed by weight, with the loss mask on the assistant's tokens."""
    return await run_stage(session, StageKey("data", 0, "data"), {"tokenizer": tokenizer}, partial(_tokenise, session))


def _tokenise(session: Session, attempt: Attempt) -> Produced:
    config = session.config
    every = {data.name: load_conversations(data, data_seed(config.seed, data.name)) for data in config.sets("sft")}
    sets, kept = split_validation(every, config.sft.validation_fraction)
    cursor = PromptCursor([len(rows) for rows in sets], [data.weight for data in config.sets("sft")], config.seed)
    wanted = min(sum(len(rows) for rows in sets), config.sft.num_steps * config.sft.batch_size)
    drawn, _ = cursor.take(cursor.start(), wanted)
    conversations = [sets[set_index][row_index] for set_index, row_index in drawn]
    rows, counts = tokenise_conversations(conversations, session.tokenizer, config.model.context_tokens_max)
    if not rows:
        raise UserError(
            f"sft: none of {len(conversations)} conversations keeps an assistant token within "
            f"model.context_tokens_max={config.model.context_tokens_max}; raise it, or shorten the prompts"
        )
    files = [attempt.write_rows("conversations.parquet", rows, CONVERSATIONS)]
    metrics = {f"data/{name}": value for name, value in counts.items()}
    metrics |= {"data/conversations": len(rows), "data/tokens": sum(len(row["tokens"]) for row in rows)}
    if kept:
        validation, _ = tokenise_conversations(kept, session.tokenizer, config.model.context_tokens_max)
        if not validation:
            raise UserError(
                f"sft.validation_fraction={config.sft.validation_fraction:g}: none of {len(kept)} conversations keeps an assistant "
                "token within model.context_tokens_max; raise either"
            )
        files.append(attempt.write_rows("validation.parquet", validation, CONVERSATIONS))
        metrics["data/conversations_validation"] = len(validation)
    return Produced(files, metrics)


async def train_segment(
    session: Session, segment: int, data: ArtifactRef, tokenizer: ArtifactRef, on_progress: OnProgress = None
) -> StageResult:
    """One segment of SFT steps: trained, then state and policy committed (the policy last: it is the segment's commit)."""
    run = session.run
    job = sft_job(run, segment, data)
    previous, _ = run.committed("sft", segment - 1, "policy") if segment else run.committed("base", 0, "policy")
    inputs = {"data": data, "tokenizer": tokenizer, "previous": previous}

    async def produce(attempt: Attempt) -> Produced:
        metrics = await train_job(session, "sft", segment, job, on_progress)
        saved = await save_job(session, "sft", segment, job, attempt, state_inputs=inputs)
        return Produced(saved.policy, metrics | saved.probe, weight_version=0)

    return await run_stage(session, StageKey("sft", segment, "policy"), inputs, produce)
