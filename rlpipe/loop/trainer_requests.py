"""Requests to the trainer: the job of a stage, and rebuilds for uploads to the store.

An upload needs a rebuild when the trainer that published its files was lost. To reach a position
takes several jobs, so a rebuild and the job after it are one turn (`trainer_turn`): of two that run
at once, each would move the trainer away from the other's position.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from rlpipe.base.errors import TrainerError
from rlpipe.loop.session import Session
from rlpipe.store.commits import Act
from rlpipe.trainer.client import NotResident, TrainerClient, TrainerLost
from rlpipe.trainer.jobs import ANY_JOB, SAVED, AnyJob, JobAnswer, LoadJob, RlJob, SaveJob, SftJob, TeacherJob

log = logging.getLogger(__name__)
ATTEMPTS_MAX = 6  # of one job, the trainer being rebuilt before each but the first
KIND: dict[type[AnyJob], str] = {
    LoadJob: "load",
    RlJob: "train",
    SftJob: "train",
    SaveJob: "save",
    TeacherJob: "teacher",
}

# restores the position that a job starts from in the trainer
Rebuild = Callable[[TrainerClient], Awaitable[object]]
OnProgress = Callable[[dict[str, int]], None] | None


async def send(trainer: TrainerClient, job: AnyJob, on_progress: OnProgress = None) -> JobAnswer:
    """Sends one job to the trainer, whatever it holds; errors as of `TrainerClient.run`."""
    return await trainer.run(KIND[type(job)], ANY_JOB.dump_python(job, mode="json"), on_progress)


async def nothing() -> None: ...


async def do_job(
    session: Session, job: AnyJob, rebuild: Rebuild, on_progress: OnProgress = None, before_rebuild: Act = nothing
) -> JobAnswer:
    """Does one job on the trainer, and rebuilds the trainer first when it was lost or does not hold
    the position that the job starts from. TrainerError after ATTEMPTS_MAX tries.

    `before_rebuild` is awaited outside of the turn: it may need the trainer.
    """
    last = ""
    for attempt in range(ATTEMPTS_MAX):
        if attempt:
            await before_rebuild()
        try:
            async with session.trainer.turn:
                trainer = await session.trainer.ready()
                if attempt:
                    await rebuild(trainer)
                return await send(trainer, job, on_progress)
        except (NotResident, TrainerLost) as error:
            last = str(error)
            log.log(
                logging.WARNING if attempt or isinstance(error, TrainerLost) else logging.INFO,
                "%s: rebuilding it",
                error,
            )
    raise TrainerError(
        f"{KIND[type(job)]} failed {ATTEMPTS_MAX} times because the trainer was lost; its log:"
        f" {session.data.folder}/trainer.log; at last {last}"
    )


@dataclass
class Upload:
    """The upload to the store of everything that one save published; `answer` lists the files.

    It is done once though the files are of several artifacts: files of a committed artifact are
    never written again.
    """

    session: Session
    job: SaveJob
    rebuild: Rebuild
    answer: JobAnswer
    _is_done: bool = field(default=False, init=False)

    async def finish(self) -> None:
        """Returns when the store has all files.

        A trainer that lost them makes them again; TrainerError when the new ones have other bits.
        """
        if self._is_done:
            return
        for _ in range(2 * ATTEMPTS_MAX):  # twice: TrainerLost first, then the new trainer answers NotResident
            try:
                await self.session.trainer.client.run("upload", {"attempt": self.job.attempt})
                self._is_done = True
                return
            except TrainerLost as error:
                log.warning("%s", error)
            except NotResident as error:
                log.warning(
                    "%s: the trainer makes the files of %s again that it had not uploaded yet", error, self.job.position
                )
                await self._publish_again()
        raise TrainerError(f"the trainer was lost {ATTEMPTS_MAX} times before {self.job.position} was in the store")

    async def _publish_again(self) -> None:
        async with self.session.trainer.turn:
            self._check_memory()
            try:
                trainer = await self.session.trainer.ready()
                await self.rebuild(trainer)
                again = await send(trainer, self.job)
            except (TrainerLost, NotResident) as error:
                log.warning("%s", error)
                return
        if any(again[name] != self.answer[name] for name in SAVED):
            raise TrainerError(
                f"the trainer was lost before {self.job.position} was in the store, and the files that it made again"
                " have other bits. Start the run again: the iteration is then trained again from its batch"
            )

    def _check_memory(self) -> None:
        """TrainerError when the memory that the trainer needs for it is held by engines that
        sample.
        """
        if self.session.trainer.memory and self.session.trainer.memory.turn == "engines":
            raise TrainerError(
                f"the trainer was lost before {self.job.position} was in the store, and engines use its memory now"
                " (engines.colocate). Start the run again: the iteration is then trained again from its batch"
            )
