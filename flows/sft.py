"""SFT: segment after segment of optimizer steps, from the newest committed one."""

from __future__ import annotations

import asyncio

from prefect import flow

from flows.session import begin_base, open_session, prepare_base, reason_to_end, requested, run_name
from flows.terminal import bar, say, segment_line
from flows.ui import ended, track_data
from rlpipe.base.references import ArtifactRef
from rlpipe.config.pipeline import PipelineConfig
from rlpipe.config.source import Changes
from rlpipe.loop.session import Session
from rlpipe.stages.sft import LOSS, out_of_patience, previous_policy, validation_losses
from rlpipe.store.run import BEFORE_SFT
from tasks.stages import evaluate, prepare_sft_data, select_segment, train_segment


@flow(name="sft", flow_run_name=run_name("sft"), persist_result=False)
async def sft(changes: Changes | None = None, *, config: PipelineConfig) -> dict[str, str]:
    """The SFT phase of a run; starts it, or goes on after its newest committed segment.
    Returns the policy's reference.

    Args:
        changes: Only what differs from the config below, for example
            `{"run": "monday", "rl.num_iterations": 30, "data.words.rows_max": 500}`. With
            `"preset": "smollm2"` among them that preset is taken instead of the config.
        config: The whole config. The same `run` continues; an empty one makes a run of its own,
            named by schedule and time (the Run Name above is replaced).
    """
    config = await requested(config, changes)
    async with open_session(config) as session:
        tokenizer, data = await begin_sft(session)
        run, total = session.run, session.run.config.sft.num_segments
        first = await asyncio.to_thread(session.progress.num_done, "sft")
        session.tracker.committed("sft", first)
        steps = config.sft.segment_steps
        losses = await asyncio.to_thread(validation_losses, run, first)
        if first < total:
            slow = f"about ten seconds, minutes for a large model; log: {session.data.folder}/trainer.log"
            say(f"SFT: the trainer starts if it does not run yet ({slow}), then every {steps} steps print a line")
        with bar("SFT", config.sft.num_steps, min(first * steps, config.sft.num_steps), "step") as progress:
            for segment in range(first, total):
                if out_of_patience(config.sft, losses):
                    say(f"SFT ends: {config.sft.patience} segments without a better validation loss")
                    break
                if reason := await reason_to_end(session, "sft", segment):
                    return await ended(session, ("sft",), {}, reason)

                def show(done: dict[str, int], segment: int = segment) -> None:
                    progress.n = segment * steps + done["done"]
                    progress.refresh()

                previous = await asyncio.to_thread(previous_policy, run, segment)
                trained = await train_segment(
                    session, segment=segment, data=data, tokenizer=tokenizer, previous=previous, on_progress=show
                )
                session.tracker.committed("sft", segment + 1)
                progress.n = min((segment + 1) * steps, config.sft.num_steps)
                say(segment_line(segment, progress.n, trained.metrics))
                losses += [trained.metrics[LOSS]] if config.sft.validated else []
        if config.sft.validated:
            done = await asyncio.to_thread(session.progress.num_done, "sft")
            await select_segment(session, last=await asyncio.to_thread(previous_policy, run, done), num_segments=done)
        await evaluate_sft(session)
        policy, _ = await asyncio.to_thread(run.policy, 0)
        return await ended(session, ("sft",), policy.as_json())


async def begin_sft(session: Session) -> tuple[ArtifactRef, ArtifactRef]:
    """Returns the tokenizer of the run and the data of its SFT; these and the base model are
    committed.
    """
    is_complete, has_base = await asyncio.to_thread(lambda: (session.progress.sft_complete, session.progress.has_base))
    if not is_complete:
        session.tracker.begin("sft")
    if not has_base:
        maker = "is copied" if session.config.model.path else "is made by the trainer, which starts"
        made = f"the model {maker} (seconds, minutes for a large one)"
        say(f"tokenizer, base model and SFT data are written to the store: {made}")
    tokenizer = (await begin_base(session)).ref
    # the trainer, which makes the base model, starts: meanwhile this process has time. When one
    # fails, the other comes to its end first
    made, data = await asyncio.gather(
        prepare_base(session, tokenizer), prepare_sft_data(session, tokenizer=tokenizer), return_exceptions=True
    )
    if isinstance(made, BaseException):
        raise made
    if isinstance(data, BaseException):
        raise data
    session.data.forget_conversations()  # which are not taken where the data was committed before
    track_data(session, "sft")
    return tokenizer, data.ref


async def evaluate_sft(session: Session) -> None:
    """Evaluates the base model and the policy after SFT, where no RL follows, which would evaluate
    its start.
    """
    run, config = session.run, session.config
    if (
        config.rl.num_iterations
        or not config.sets("evaluation")
        or run.owner(*run.policy_place(0), "evaluation") is not run
    ):
        return
    for version in ([BEFORE_SFT] if run.config.sft.num_segments else []) + [0]:
        policy, _ = await asyncio.to_thread(run.policy, version)
        await evaluate(session, policy=policy, version=version)
        session.tracker.evaluated(version)
    track_data(session, "evaluation")
