"""The models that the trainer has in memory (the policy in training, the frozen reference and
teachers), and the jobs that use them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from torch import Tensor

from rlpipe.base.references import ArtifactRef
from rlpipe.processes.memory import settle_heap
from rlpipe.trainer.adapted import adapter_of_reference
from rlpipe.trainer.jobs import AnyJob, JobResult, LoadJob, OfferJob, OffloadJob, SaveJob, SendJob, SftJob, TeacherJob
from rlpipe.trainer.model import load_policy, own_rows
from rlpipe.trainer.offload import Offloaded, offload
from rlpipe.trainer.publishing import Publication, publication, upload
from rlpipe.trainer.ranks import Ranks
from rlpipe.trainer.rl import Reference, train_rl
from rlpipe.trainer.selftest import proven_rows
from rlpipe.trainer.sending import Sending
from rlpipe.trainer.sft import train_sft
from rlpipe.trainer.state import load, save
from rlpipe.trainer.step import Resident
from rlpipe.trainer.teaching import teach


class Trainer:
    """One rank's part of the policy in training, of the frozen reference and of the teachers.

    All can be rebuilt from the store.

    `on_published`: called on the first rank of each node with the files that a save has published
    there; without it they are in the store when the job is done.
    """

    def __init__(self, ranks: Ranks, on_published: Callable[[Publication], None] | None = None) -> None:
        self.ranks = ranks
        self._on_published = on_published or partial(upload, ranks.store, ranks.published)
        self.resident: Resident | None = None
        self._has_loaded = False  # it has, or tried to
        # by role (reference, teacher-0, teacher-1, ...), the frozen model with its sha256
        self._frozen: dict[str, tuple[str, Reference]] = {}
        self._offloaded: Offloaded | None = None
        self._sending = Sending(ranks)

    def run(self, job: AnyJob) -> JobResult:
        """Does one job on all ranks.

        UserError, StoreError and StepRefused are raised on all ranks.

        After a load or train that fails nothing is resident: the weights would be neither its start
        nor its result.
        """
        if isinstance(job, OffloadJob):
            self._offloaded = self._offloaded or offload(self.ranks, self._tensors())
            return JobResult()
        self._bring_back(job)
        if isinstance(job, SaveJob):
            assert self.resident is not None, "a save of nothing"
            result = save(self.ranks, self.resident, job)
            with self.ranks.together():
                if self.ranks.leads_node:
                    self._on_published(publication(job, result, self.ranks.node))
            return result
        if isinstance(job, TeacherJob):
            teachers = [self._frozen_model(f"teacher-{index}", ref) for index, ref in enumerate(job.teachers)]
            return teach(self.ranks, teachers, job)
        if isinstance(job, OfferJob | SendJob):
            assert self.resident is not None, "nothing to send"
            if isinstance(job, OfferJob):
                return self._sending.offer(self.resident, job)
            return self._sending.send(self.resident, job)
        resident, self.resident = self.resident, None
        if isinstance(job, LoadJob):
            if "reference" in self._frozen and self._frozen["reference"][1].adapter:
                del self._frozen["reference"]
            del resident
            if self._has_loaded:
                settle_heap()  # reference cycles hold a sharded module; its memory is needed now
            self._has_loaded = True
            self.resident, differs = load(self.ranks, job)
            return JobResult(differs=differs)
        assert resident is not None, f"{job.kind} with nothing resident"
        if isinstance(job, SftJob):
            result = train_sft(self.ranks, resident, job)
        else:
            if job.reference is None:
                self._frozen.pop("reference", None)
            if job.teacher_logprobs is None:
                self._frozen = {role: model for role, model in self._frozen.items() if role == "reference"}
            reference = self._frozen_model("reference", job.reference, resident) if job.reference else None
            result = train_rl(self.ranks, resident, reference, job)
        self.resident = resident
        return result

    def _tensors(self) -> Iterator[Tensor]:
        """This rank's rows of all tensors that take memory between two jobs."""
        policies = [self.resident.policy] if self.resident else []
        for _, frozen in self._frozen.values():
            # with an adapter it is the resident policy
            policies += [] if frozen.adapter else [frozen.policy]
            yield from frozen.adapter
        for policy in policies:
            yield from (own_rows(parameter) for _, parameter in policy.shards())
            yield from policy.buffers()
        if self.resident is not None:
            yield from self.resident.held()

    def _bring_back(self, job: AnyJob) -> None:
        """Restores what was offloaded; before a load it is dropped instead, as a load needs none of
        it.
        """
        offloaded, self._offloaded = self._offloaded, None
        if offloaded is None:
            return
        if isinstance(job, LoadJob):
            self.resident = None
            self._frozen.clear()
            offloaded.forget()
        else:
            offloaded.restore()

    def _frozen_model(self, role: str, ref: ArtifactRef, resident: Resident | None = None) -> Reference:
        """The frozen reference or a teacher, loaded again only when `ref` changes; where it differs
        from the resident policy only in the adapter, it is that policy with other values of the
        adapter. A teacher is always a model of its own: it is asked where nothing is resident yet.
        """
        if role not in self._frozen or self._frozen[role][0] != ref.sha256:
            if self._frozen.pop(role, None) is not None:
                settle_heap()
            if resident is not None and (adapter := adapter_of_reference(self.ranks, resident, ref)):
                frozen = Reference(resident.policy, resident.rows, adapter)
            else:
                policy, _, _ = load_policy(self.ranks, ref, frozen=True)
                frozen = Reference(policy, proven_rows(self.ranks, policy))
            self._frozen[role] = (ref.sha256, frozen)
        return self._frozen[role][1]
