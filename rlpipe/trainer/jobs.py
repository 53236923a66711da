"""The loop of every rank: get the job that rank 0 got, do it together, answer. What is resident lives here."""

from __future__ import annotations

import logging

from pydantic import ValidationError

from rlpipe.trainer.board import STATUS_OK, Board
from rlpipe.trainer.gang import Gang
from rlpipe.trainer.model import PolicyModel
from rlpipe.trainer.rl import train_rl
from rlpipe.trainer.saving import save
from rlpipe.trainer.settings import RlSettings, SftSettings
from rlpipe.trainer.sft import train_sft
from rlpipe.trainer.state import Resident, fetch, forget, load, load_policy
from rlpipe.types import ArtifactRef, JsonDict, StepRefused, StoreError, UserError

log = logging.getLogger(__name__)
TICK_S = 5.0  # idle ranks meet this often: none waits for another as long as the collective timeout
STATUS_OF = {UserError: 400, StoreError: 500, StepRefused: 422}


class Trainer:
    """The gang's memory: the policy in training and the frozen reference. Both can be rebuilt from the store."""

    def __init__(self, gang: Gang) -> None:
        self.gang = gang
        self.resident: Resident | None = None
        self._reference: tuple[str, PolicyModel] | None = None

    def run(self, kind: str, body: JsonDict) -> JsonDict:
        """Does one job on all ranks. UserError, StoreError and StepRefused are raised on all of them alike.

        A load or train that fails leaves nothing resident: what it left would be neither its start nor its result.
        """
        if kind == "save":
            assert self.resident is not None, "a save of nothing"
            return save(self.gang, self.resident, body)
        before, self.resident = self.resident, None
        if kind == "load":
            del before  # its memory is needed
            self.resident = load(self.gang, body)
            return {}
        assert kind == "train" and before is not None, f"{kind} with nothing resident"
        metrics = self._train(before, body)
        self.resident = before
        return {"metrics": metrics}

    def _train(self, resident: Resident, body: JsonDict) -> JsonDict:
        data = ArtifactRef.from_json(body["data"])
        kind = {"sft": SftSettings, "rl": RlSettings}.get(body["kind"])
        if kind is None:
            raise UserError(f"train: kind={body['kind']!r}: use rl or sft")
        try:
            settings = kind.model_validate(body["settings"])
        except ValidationError as error:
            raise UserError(f"settings: {error}") from error
        if isinstance(settings, SftSettings):
            return train_sft(self.gang, resident, data, settings)
        if settings.kl != "none" and body["reference"] is None:
            raise UserError(f"settings.kl={settings.kl} needs a reference policy")
        return train_rl(self.gang, resident, self._reference_of(body["reference"]), data, settings)

    def _reference_of(self, value: JsonDict | None) -> PolicyModel | None:
        """The frozen reference, loaded once for as long as it stays the same."""
        if value is None:
            self._reference = None
            return None
        ref = ArtifactRef.from_json(value)
        if self._reference is None or self._reference[0] != ref.sha256:
            self._reference = None
            folder = fetch(self.gang, ref)
            policy, _, _ = load_policy(self.gang, folder)
            forget(self.gang, folder)
            self._reference = (ref.sha256, policy.requires_grad_(False))
        return self._reference[1]


def serve_jobs(trainer: Trainer, board: Board | None) -> None:
    """Works until the process is ended. Only rank 0 has the board. A fault that is not common to all ranks ends the process:
    torchrun then restarts the gang, empty."""
    gang = trainer.gang
    assert (board is not None) == (gang.rank == 0), "the board is rank 0's"
    if board is not None:
        gang.report = board.progress
    while True:
        job = board.next(TICK_S) if board is not None else None
        message, *_ = gang.gather({"kind": job.kind, "body": job.body} if job else None)
        if message is None:
            continue
        status, answer = _outcome(trainer, message["kind"], message["body"])
        if board is not None:
            assert job is not None, "a message without its job"
            board.finish(job, status, answer)


def _outcome(trainer: Trainer, kind: str, body: JsonDict) -> tuple[int, JsonDict]:
    try:
        return STATUS_OK, {"state": "done", "result": trainer.run(kind, body)}
    except tuple(STATUS_OF) as error:
        log.warning("%s refused: %s", kind, error)
        return STATUS_OF[type(error)], {"error": str(error)}
