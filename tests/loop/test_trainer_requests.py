"""What a save published comes to the store though the trainer is lost meanwhile; who asks the
trainer beside that, takes turns with it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlpipe.base.errors import TrainerError
from rlpipe.base.references import ArtifactRef
from rlpipe.base.values import JsonDict
from rlpipe.loop.trainer_requests import ATTEMPTS_MAX, Upload, do_job
from rlpipe.trainer import client as module
from rlpipe.trainer.client import NotResident, TrainerClient, TrainerLost
from rlpipe.trainer.jobs import STATUS_LOST, STATUS_STORE, LoadJob, SaveJob

JOB = SaveJob("runs/a/rl/00001", "runs/a/rl/00001/policy", None, "a1", None, [0], 64)
SAVED = {"policy": [{"name": "a1/x", "bytes": 1, "sha256": "0"}], "state": [], "gap": []}


class PlayedTrainer:
    """Answers uploads as it is told; saves give SAVED, or what it `makes`."""

    def __init__(self, *uploads: Exception | None) -> None:
        self.uploads, self.calls, self.makes = list(uploads), [], SAVED

    async def run(self, kind: str, body: JsonDict, on_progress: object = None) -> JsonDict:
        self.calls.append(kind)
        await asyncio.sleep(0)
        if kind == "upload" and (fault := self.uploads.pop(0)) is not None:
            raise fault
        return {} if kind == "upload" else self.makes


def upload(trainer: PlayedTrainer, turn: str = "") -> Upload:
    async def ready() -> PlayedTrainer:
        return trainer

    async def rebuild(trainer: Any) -> None:
        await trainer.run("rebuild", {})

    memory = SimpleNamespace(turn=turn) if turn else None
    seat = SimpleNamespace(client=trainer, ready=ready, turn=asyncio.Lock(), memory=memory)
    session: Any = SimpleNamespace(trainer=seat, data=SimpleNamespace(folder=Path("/work")))
    return Upload(session, JOB, rebuild, SAVED)


async def test_what_was_uploaded_is_never_asked_for_again() -> None:
    """It is a state and a policy: between their commits the trainer may be lost, and files that are
    committed are not written again."""
    trainer = PlayedTrainer(None)
    way = upload(trainer)
    await way.finish()
    await way.finish()
    assert trainer.calls == ["upload"]


async def test_a_trainer_that_was_lost_makes_it_again_and_one_that_only_did_not_answer_is_asked_again() -> None:
    trainer = PlayedTrainer(TrainerLost("no answer"), None)
    await upload(trainer).finish()
    assert trainer.calls == ["upload", "upload"]
    trainer = PlayedTrainer(TrainerLost("gone"), NotResident("it holds nothing"), None)
    await upload(trainer).finish()
    assert trainer.calls == ["upload", "upload", "rebuild", "save", "upload"]


async def test_other_bits_are_not_taken_and_losses_have_a_bound() -> None:
    trainer = PlayedTrainer(NotResident(""), None)
    trainer.makes = SAVED | {"policy": [{"name": "a1/x", "bytes": 1, "sha256": "1"}]}
    with pytest.raises(TrainerError, match="have other bits"):
        await upload(trainer).finish()
    trainer = PlayedTrainer(*[fault for _ in range(ATTEMPTS_MAX) for fault in (TrainerLost("gone"), NotResident(""))])
    with pytest.raises(TrainerError, match="was lost 6 times"):
        await upload(trainer).finish()
    with pytest.raises(OSError, match="away"):
        await upload(PlayedTrainer(OSError("away"))).finish()


async def test_it_is_not_made_again_in_memory_that_engines_have() -> None:
    trainer = PlayedTrainer(NotResident(""), None)
    with pytest.raises(TrainerError, match=r"engines\.colocate"):
        await upload(trainer, "engines").finish()
    assert trainer.calls == ["upload"]
    await upload(PlayedTrainer(NotResident(""), None), "trainer").finish()


async def test_a_job_is_rebuilt_after_the_upload_in_progress_and_in_a_turn_of_its_own() -> None:
    """Both find the trainer lost.

    What is uploaded is made again first: what the job is rebuilt from is in the store then.
    """
    trainer = PlayedTrainer(NotResident(""), None)
    way, answers = upload(trainer), [NotResident("")]
    uploaded = asyncio.Event()

    async def finish() -> None:
        await way.finish()
        uploaded.set()

    async def run(kind: str, body: JsonDict, on_progress: object = None) -> JsonDict:
        if kind == "load" and answers:
            trainer.calls.append("refused")
            raise answers.pop()
        return await PlayedTrainer.run(trainer, kind, body)

    trainer.run = run  # pyright: ignore[reportAttributeAccessIssue]

    async def rebuild(trainer: Any) -> None:
        await trainer.run("replay", {})

    load = LoadJob("p", new=None, policy=None, state=ArtifactRef("runs/a/x", "0"))
    job = asyncio.create_task(do_job(way.session, load, rebuild, before_rebuild=uploaded.wait))
    await asyncio.gather(job, finish())
    assert [call for call in trainer.calls if call not in ("refused", "upload")] == [
        "rebuild",
        "save",
        "replay",
        "load",
    ]


class PlayedPlace:
    """A trainer that is brought back, which takes a moment."""

    key, starts = "key", 0

    async def start(self) -> str:
        return "http://here"

    async def bring_back(self) -> str:
        self.starts += 1
        await asyncio.sleep(0.05)
        return "http://there"

    async def close(self) -> None: ...


@pytest.fixture
def answered(monkeypatch: pytest.MonkeyPatch) -> Callable[[int | Exception], None]:
    """How every call of the trainer is answered from here on."""

    def answer(outcome: int | Exception) -> None:
        async def call(*arguments: object) -> tuple[int, bytes]:
            await asyncio.sleep(0)
            if isinstance(outcome, Exception):
                raise outcome
            return outcome, b'{"error": "why", "result": {}}'

        monkeypatch.setattr(module, "http_call", call)

    return answer


async def test_a_trainer_is_brought_back_once_for_all_that_asked_it(
    answered: Callable[[int | Exception], None],
) -> None:
    place: Any = PlayedPlace()
    client = TrainerClient(place)
    await client.start()
    for times, outcome in enumerate((ConnectionError("gone"), STATUS_LOST), 1):
        answered(outcome)
        faults = await asyncio.gather(client.run("upload", {}), client.run("train", {}), return_exceptions=True)
        assert [type(fault) for fault in faults] == [TrainerLost, TrainerLost]
        assert place.starts == times
        assert client.url == "http://there"
    answered(STATUS_STORE)
    with pytest.raises(OSError, match="why"):
        await client.run("upload", {})
    assert place.starts == 2
    await client.close()
