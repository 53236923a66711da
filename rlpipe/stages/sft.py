"""The stages of SFT: conversations are tokenized once; then segments of steps are trained, each
committed with its state; then one segment is chosen.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlpipe.base.errors import UserError
from rlpipe.base.hashing import sha256_of
from rlpipe.base.references import ArtifactRef
from rlpipe.config.pipeline import PipelineConfig
from rlpipe.config.sections import DataConfig
from rlpipe.config.training import SftConfig
from rlpipe.data.conversations import encode_talk, tokenise_conversations
from rlpipe.data.cursor import PromptCursor
from rlpipe.data.sources import fitting, split_validation
from rlpipe.loop.session import Session
from rlpipe.loop.stage import Attempt, Produced, StageKey, stage
from rlpipe.loop.trainer_requests import OnProgress
from rlpipe.records.prompt import Talk
from rlpipe.records.rollout import Conversation
from rlpipe.stages.training import commit_saved, save_job, sft_job, train_job
from rlpipe.store.run import Run

LOSS = "train/validation_loss"


@stage("data", "data")
def prepare_sft_data(session: Session, attempt: Attempt, *, tokenizer: ArtifactRef) -> Produced:
    """Tokenizes the conversations of all SFT sets, mixed by weight, with the loss mask on the
    assistant's tokens.
    """
    config = session.config
    read = session.data.conversations()
    loaded = {data.name: _short_enough(session, data, read[data.name]) for data in config.sets("sft")}
    sets, kept = split_validation(loaded, config.sft.validation_fraction)
    cursor = PromptCursor([len(rows) for rows in sets], [data.weight for data in config.sets("sft")], config.seed)
    wanted = min(sum(len(rows) for rows in sets), config.sft.num_steps * config.sft.batch_size)
    drawn, _ = cursor.take(cursor.start(), wanted)
    conversations = [sets[set_index][row_index] for set_index, row_index in drawn]
    rows, counts = tokenise_conversations(conversations, session.data.tokenizer, config.model.context_tokens_max)
    if not rows:
        raise UserError(
            f"sft: none of {len(conversations)} conversations keeps an assistant token within "
            f"model.context_tokens_max={config.model.context_tokens_max}; raise it, or shorten the prompts"
        )
    files = [attempt.write("conversations.parquet", rows, Conversation)]
    metrics = {f"data/{name}": value for name, value in counts.items()}
    if config.drops("sft"):
        metrics["data/dropped_too_long"] = sum(len(read[name]) - len(loaded[name]) for name in read)
    metrics |= {"data/conversations": len(rows), "data/tokens": sum(len(row.tokens) for row in rows)}
    if kept:
        validation, _ = tokenise_conversations(kept, session.data.tokenizer, config.model.context_tokens_max)
        if not validation:
            raise UserError(
                f"sft.validation_fraction={config.sft.validation_fraction:g}: none of {len(kept)} conversations keeps"
                " an assistant token within model.context_tokens_max; raise either"
            )
        files.append(attempt.write("validation.parquet", validation, Conversation))
        metrics["data/conversations_validation"] = len(validation)
    digests = {
        name: {"sha256": sha256_of([talk.as_json() for talk in talks]), "rows": len(talks)}
        for name, talks in loaded.items()
    }
    return Produced(files, metrics | {"sets": digests})


def _short_enough(session: Session, data: DataConfig, conversations: list[Talk]) -> list[Talk]:
    """The conversations of a set that its `on_too_long` allows; all of them where it is not set:
    long ones are truncated later.
    """
    if data.on_too_long is None:
        return conversations
    lengths = [len(encode_talk(session.data.tokenizer, talk)[0]) for talk in conversations]
    check_fits(session.config, data, lengths)
    return fitting(data, conversations, lengths, session.config.model.context_tokens_max)


def check_fits(config: PipelineConfig, data: DataConfig, lengths: Sequence[int]) -> None:
    """UserError where a set allows no conversation that is too long, and has one."""
    room = config.model.context_tokens_max
    too_long = [index for index, length in enumerate(lengths) if length > room]
    if too_long and data.on_too_long == "fail":
        raise UserError(
            f"data.{data.name}.on_too_long='fail': {len(too_long)} of {len(lengths)} conversations have more than"
            f" model.context_tokens_max={room} tokens, the first of them {lengths[too_long[0]]} (number"
            f" {too_long[0] + 1} of {data.source}); shorten them, raise it, or set 'drop'"
        )


@stage("sft", "policy")
async def train_segment(
    session: Session,
    attempt: Attempt,
    *,
    segment: int,
    data: ArtifactRef,
    tokenizer: ArtifactRef,
    previous: ArtifactRef,
    on_progress: OnProgress = None,
) -> Produced:
    """One segment of SFT steps: trained, then state and policy committed (the policy last: it is
    the segment's commit).
    """
    job = sft_job(session.run, segment, data)
    metrics = await train_job(session, segment, job, on_progress)
    inputs = {"data": data, "tokenizer": tokenizer, "previous": previous}
    saved = await save_job(session, segment, job, attempt, with_state=True)
    await saved.published.upload()
    await commit_saved(session, StageKey("sft", segment, "state"), inputs, saved.result.state)
    return saved.produced(metrics, 0)


def previous_policy(run: Run, segment: int) -> ArtifactRef:
    """The policy that a segment starts from."""
    return (run.committed("sft", segment - 1, "policy") if segment else run.committed("base", 0, "policy"))[0]


def validation_losses(run: Run, num_segments: int) -> list[float]:
    """The validation loss of each of the first `num_segments` segments, which are committed; none
    without validation.
    """
    if not run.config.sft.validated:
        return []
    return [run.committed("sft", segment, "policy")[1].metrics[LOSS] for segment in range(num_segments)]


def best_segment(losses: list[float]) -> int:
    """The segment with the lowest loss; of equal ones the first."""
    return min(range(len(losses)), key=lambda segment: (losses[segment], segment))


def out_of_patience(sft: SftConfig, losses: list[float]) -> bool:
    """True when the last `sft.patience` segments brought no loss below those before."""
    return 0 < sft.patience <= len(losses) - 1 - best_segment(losses) if losses else False


@stage("data", "selection")
def select_segment(session: Session, attempt: Attempt, *, last: ArtifactRef, num_segments: int) -> Produced:
    """Commits the choice once SFT is over: `segment` is the best one, `num_segments` were trained,
    `losses` is one a segment.

    It is a function of the committed segments (`last` is the policy of the last one), so a process
    that continues after a crash chooses the same.
    """
    losses = validation_losses(session.run, num_segments)
    sft = session.config.sft
    assert num_segments == session.run.config.sft.num_segments or out_of_patience(sft, losses), "SFT is not over"
    return Produced([], {"segment": best_segment(losses), "num_segments": num_segments, "losses": losses})
