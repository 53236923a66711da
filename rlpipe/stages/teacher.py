"""The stage ask_teacher: the teacher's logprobs of a batch, between filter and train."""

from __future__ import annotations

from rlpipe.base.references import ArtifactRef
from rlpipe.loop.session import Session
from rlpipe.loop.stage import Attempt, Produced, stage
from rlpipe.loop.trainer_requests import do_job
from rlpipe.trainer.client import TrainerClient
from rlpipe.trainer.jobs import RESULT, TeacherJob


@stage("rl", "teacher_logprobs")
async def ask_teacher(
    session: Session, attempt: Attempt, *, iteration: int, batch: ArtifactRef, teacher: ArtifactRef
) -> Produced:
    """The logprobs that the teacher gives to each trained token of the batch, computed by the
    trainer. A retry, a replay and a fork that trains the batch again take them from here.
    """
    assert attempt.folder == session.run.folder("rl", iteration, "teacher_logprobs"), attempt.folder
    job = TeacherJob(batch, teacher, session.config.rl.temperature, attempt.folder, attempt.name)
    answer = RESULT.validate_python(await do_job(session, job, _nothing_to_rebuild))
    return Produced(answer.teacher, answer.metrics)


async def _nothing_to_rebuild(_: TrainerClient) -> None:
    """The job needs no position: a trainer that was lost loads the teacher again by itself."""
