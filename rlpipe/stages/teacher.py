"""The stage ask_teacher: the teacher's logprobs of a batch, between filter and train."""

from __future__ import annotations

import asyncio

from rlpipe.base.errors import UserError
from rlpipe.base.references import ArtifactRef
from rlpipe.config.extras import TEACHER, opened
from rlpipe.loop.session import Session
from rlpipe.loop.stage import Attempt, Produced, stage
from rlpipe.loop.trainer_requests import do_job
from rlpipe.records.rollout import TEACHER_FILE, TEACHER_TOP_FILE, TeacherLogprobs, TeacherTop
from rlpipe.trainer.client import TrainerClient
from rlpipe.trainer.jobs import RESULT, TeacherJob


@stage("rl", "teacher_logprobs")
async def ask_teacher(
    session: Session,
    attempt: Attempt,
    *,
    iteration: int,
    batch: ArtifactRef,
    teacher: ArtifactRef | None,
    set_teachers: list[ArtifactRef],
) -> Produced:
    """The logprobs that the teacher gives to each trained token of the batch, and to its own top
    tokens there where `rl.teacher_top_k` says so, computed by the trainer. A retry, a replay and a
    fork that trains the batch again take them from here.

    `teacher`: that of `rl.teacher`; `set_teachers`: those that data sets name beside it, in the
    order of `PipelineConfig.teachers`.
    """
    assert attempt.folder == session.run.folder("rl", iteration, "teacher_logprobs"), attempt.folder
    config, rl = session.config, session.config.rl
    if rl.teacher_engine:
        vocab_size = (await asyncio.to_thread(lambda: session.data.tokenizer)).vocab_size if rl.teacher_top_k else 0
        ask = opened(TEACHER, "rl.teacher_engine")
        rows = await ask(session.run.store, rl.teacher_engine, batch, rl.teacher_top_k, vocab_size)
        counts = {"num_tokens": sum(len(own.logprobs) for own, _ in rows), "engine": rl.teacher_engine}
        files = [attempt.write(TEACHER_FILE, [own for own, _ in rows], TeacherLogprobs)]
        if rl.teacher_top_k:
            files.append(attempt.write(TEACHER_TOP_FILE, [top for _, top in rows], TeacherTop))
        return Produced(files, counts)
    if teacher and not any(file.name.endswith(".safetensors") for file in session.run.manifest(teacher).files):
        raise UserError(
            "rl.teacher_engine is empty: this run began with a teacher on an engine, and has no weights of it; name one"
        )
    held = [*([teacher] if teacher else []), *set_teachers]
    of_set = {data.name: config.teachers.index(config.teacher_of(data)) for data in config.sets("rl")}
    of_set = of_set if len(held) > 1 else {}
    job = TeacherJob(batch, held, rl.temperature, attempt.folder, attempt.name, rl.teacher_top_k, of_set)
    answer = RESULT.validate_python(await do_job(session, job, _nothing_to_rebuild))
    return Produced(answer.teacher, answer.metrics)


async def _nothing_to_rebuild(_: TrainerClient) -> None:
    """The job needs no position: a trainer that was lost loads the teacher again by itself."""
