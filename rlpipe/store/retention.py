"""The policies and training states that a run keeps, and when the others are pruned.

Pruning deletes the files of an artifact; its manifest stays.

A pruned policy can be made again, to the same hashes: from the newest training state before it (or
weight version 0) and the stored batches, which are always kept (rlpipe/stored/remaking.py). Only
policies and states of phase `rl` are pruned, by the process that holds the run's lease, beside its
work; SFT and what a run starts from stay. A forked run prunes its own iterations only.

Why it is safe. `pruned.json` exists beside the manifest from before the first file is deleted until
every file is back; in it, `finished` says that no file is left and that nobody deletes any more. A
file may be missing only beside it.

- A fork begins while its parent prunes. The fork writes its run.json, then looks for pruned.json.
  The parent writes pruned.json, then looks for forks, and deletes pruned.json when it sees one. The
  second of the two sees the other: the policy stays, or the fork waits until the pruning is
  `finished` and makes it again. Prunings that begin once run.json exists leave the policy alone.
- Killed before the first deletion, between two, or before `finished`: the next holder of the run
  finishes it when its session begins; a fork that waits does it itself when nobody holds the run,
  under the run's lease. Also for a version that forks share: they make it again.
- Killed while a policy is made again: some files are restored, beside pruned.json, others are not.
  The next process that needs the policy makes it again, and writes the same bytes.
- Two processes make the same policy: both replay, and write the same bytes under the same keys,
  each file as a whole. The second finds no pruned.json to delete.
- A holder that was taken for dead and wakes up: it looks at its lease before each deletion, so one
  at most comes late. It looks once more after each, and where it was superseded writes pruned.json
  again, as `finished`: the file that it deleted may have been made again since, and is known as
  pruned then. A late pruned.json stays: whoever holds the run may have pruned by it
  (docs/store.md).
"""

from __future__ import annotations

import logging
import os
import re
import socket
import threading
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor, wait
from datetime import UTC, datetime
from typing import NamedTuple

from rlpipe.base.errors import StoreError, UserError
from rlpipe.base.manifests import IterationRecord
from rlpipe.config.rules import is_run_name
from rlpipe.config.sections import CheckpointConfig
from rlpipe.store.artifacts import PRUNED, read_artifact, read_manifest
from rlpipe.store.backend import Store
from rlpipe.store.documents import read_document, sealed
from rlpipe.store.lease import TakenOver, fenced
from rlpipe.store.policy_files import stored_policy
from rlpipe.store.pruned import PruneRecord, delete_fenced, finish_pruning, read_pruned
from rlpipe.store.run import Run
from rlpipe.store.run_record import ForkRecord, RunRecord, record_key

log = logging.getLogger(__name__)
PLACE = re.compile(r"(\d{5,6})/(?:(iteration)\.json|(policy|state)/(manifest|pruned)\.json)")
CLOSE_S = 60.0  # for deletions in progress when a session ends
READERS = 16  # of pruned.json, at the same time


def kept_versions(checkpoint: CheckpointConfig, newest: int, pinned: Collection[int]) -> set[int]:
    """The weight versions of 1 to `newest` whose policies are kept: the newest, those at equal
    distances, and the `pinned` ones.
    """
    last, every = checkpoint.keep_policies_last, checkpoint.keep_policies_every
    recent = range(newest - last + 1 if last else 1, newest + 1)
    spaced = range(every, newest + 1, every) if every else ()
    return {version for version in (*recent, *spaced, *pinned) if 1 <= version <= newest}


def kept_states(checkpoint: CheckpointConfig, states: Collection[int], pinned: Collection[int]) -> set[int]:
    """The iterations whose training states are kept: the newest `keep_states` (0: all), and the
    `pinned` ones.

    `states`: the iterations that have a training state.
    """
    newest = sorted(states)[-checkpoint.keep_states :]  # 0: all
    return {*newest, *pinned}.intersection(states)


class Pins(NamedTuple):
    """The iterations of a run from whose policies, and from whose states, forks begin."""

    policies: set[int]
    states: set[int]


class Forks:
    """The forks in a store.

    The fork point of a run never changes, so each run.json is read once.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._records: dict[str, ForkRecord | None] = {}
        # run and iteration -> that of the newest state then
        self._states: dict[tuple[str, int], int] = {}

    def pins(self, run: str) -> Pins:
        """The pins of a run by the present store.

        StoreError when a run.json cannot be read: then it is unknown what must be kept.
        """
        for name in self._store.folders("runs"):
            if name not in self._records and is_run_name(name) and self._store.exists(record_key(name)):
                self._records[name] = read_document(self._store, record_key(name), RunRecord).fork
        pins = Pins(set(), set())
        for fork in filter(None, self._records.values()):
            newest = _newest_shared(fork)
            # one step off policy, a fork samples with the version before its first one too
            pins.policies.update(at for at in (newest, newest - 1) if at >= 0 and self._owner(fork.run, at) == run)
            state = self._newest_state(self._owner(fork.run, newest), newest) if newest >= 0 else -1
            if state >= 0 and self._owner(fork.run, state) == run:
                pins.states.add(state)
        return pins

    def _owner(self, name: str, iteration: int) -> str:
        """The run that committed an iteration of run `name`."""
        for _ in self._records:  # no chain of forks is longer
            fork = self._records.get(name)
            if fork is None or iteration > _newest_shared(fork):
                break
            name = fork.run
        return name

    def _newest_state(self, owner: str, iteration: int) -> int:
        key = f"runs/{owner}/rl/{iteration:05d}/iteration.json"
        if (owner, iteration) not in self._states and self._store.exists(key):
            self._states[owner, iteration] = read_document(self._store, key, IterationRecord).state_iteration
        return self._states.get((owner, iteration), -1)


def _newest_shared(fork: ForkRecord) -> int:
    """The newest iteration that is wholly the parent's; -1 when none is."""
    return fork.at - 1 if fork.redo else fork.at


class Retention:
    """Prunes one run, in a thread of its own, for as long as the caller holds the run.

    A pruning that fails is tried again after the next commit.
    """

    def __init__(self, run: Run) -> None:
        self._run, self._forks = run, Forks(run.store)
        # iterations whose artifacts have their files
        self._files: dict[str, set[int]] = {"policy": set(), "state": set()}
        # iteration -> the folder of its policy's base; empty for a whole policy
        self._bases: dict[int, str] = {}
        self._newest = -1
        self._unfinished: set[str] = set()  # folders whose pruning began
        self._stopped = threading.Event()
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="retention")
        self._passes: list[Future[None]] = []

    def begin(self) -> None:
        """Reads the state of the whole run by one listing; then finishes, in the background, what a
        killed process began.
        """
        begun = self._look()

        def work() -> None:
            self._find_unfinished(begun)
            self._finish()

        self._submit(work)

    def prune(self) -> None:
        """Prunes surplus policies and states in the background.

        Not for a session that only reads the run: its config may be the one that the run began
        with.
        """
        self._submit(self._prune_all)

    def committed(self, record: IterationRecord) -> None:
        """Prunes in the background what is surplus once this iteration is committed."""

        def work() -> None:
            self._add(record)
            self._prune_all()

        self._submit(work)

    def close(self) -> None:
        """Returns when all surplus was pruned, or after CLOSE_S: the next start prunes the rest."""
        done, _ = wait(self._passes, timeout=CLOSE_S)
        self._stopped.set()
        self._worker.shutdown(wait=False, cancel_futures=True)
        for ended in done:
            ended.result()  # a fault of ours

    def _submit(self, work: Callable[[], None]) -> None:
        def attempt() -> None:
            try:
                work()
            except TakenOver:
                self._stopped.set()
            except (StoreError, UserError, OSError) as error:
                log.warning("nothing is pruned before the next commit: %s", error)

        while self._passes and self._passes[0].done():
            self._passes.pop(0).result()  # a fault of ours
        self._passes.append(self._worker.submit(attempt))

    def _look(self) -> list[str]:
        """Records which artifacts have their files; returns the folders of those that were pruned,
        or whose pruning began.
        """
        begun: list[str] = []
        root = f"{self._run.root}/rl"
        places = filter(None, (PLACE.fullmatch(key.removeprefix(f"{root}/")) for key in self._run.store.list(root)))
        for number, committed, stage, document in (place.groups() for place in places):
            if committed:
                self._newest = max(self._newest, int(number))
            elif document == "manifest":
                self._files[stage].add(int(number))
            else:
                begun.append(f"{root}/{number}/{stage}")
        for folder in begun:
            number, stage = folder.split("/")[-2:]
            self._files[stage].discard(int(number))
        return begun

    def _find_unfinished(self, folders: list[str]) -> None:
        with ThreadPoolExecutor(READERS) as readers:
            records = [*readers.map(lambda folder: read_pruned(self._run.store, folder), folders)]
        for folder, record in zip(folders, records, strict=True):
            if record is not None and not record.finished:
                self._unfinished.add(folder)

    def _finish(self) -> None:
        for folder in sorted(self._unfinished):
            finish_pruning(self._run.store, folder, self._run.lease, self._stopped)
            self._unfinished.discard(folder)

    def _add(self, record: IterationRecord) -> None:
        self._newest = max(self._newest, record.iteration)
        for stage, iterations in self._files.items():
            if stage in record.artifacts:
                iterations.add(record.iteration)

    def _prune_all(self) -> None:
        self._finish()  # what failed before, also where a fork that begins from it waits for it
        for stage in self._files:
            if self._surplus(stage, Pins(set(), set())):  # else forks need not be read
                for iteration in sorted(self._surplus(stage, self._forks.pins(self._run.name))):
                    self._prune_one(stage, iteration)

    def _surplus(self, stage: str, pins: Pins) -> set[int]:
        """The committed iterations whose policies, or states, are surplus."""
        checkpoint, committed = self._run.config.checkpoint, {at for at in self._files[stage] if at <= self._newest}
        if stage == "state":
            return committed - kept_states(checkpoint, committed, pins.states)
        if not checkpoint.keep_policies_last or not committed:
            return set()
        pinned = {at + 1 for at in pins.policies} | self._versions_of_use()
        return committed - self._with_bases(
            {version - 1 for version in kept_versions(checkpoint, self._newest + 1, pinned)}
        )

    def _with_bases(self, iterations: set[int]) -> set[int]:
        """These iterations, and those that hold the bases of their policies."""
        whole, numbers = set(iterations), {self._folder("policy", at): at for at in self._files["policy"]}
        for iteration in iterations:
            while (iteration := numbers.get(self._base(iteration), -1)) >= 0:
                whole.add(iteration)
        return whole

    def _base(self, iteration: int) -> str:
        """The folder of the base of an iteration's policy; empty for a whole policy."""
        if iteration not in self._files["policy"]:  # not of this run, or pruned
            return ""
        if iteration not in self._bases:
            place = read_artifact(self._run.store, self._folder("policy", iteration))
            try:
                base = stored_policy(self._run.store, *place).base
                self._bases[iteration] = base.folder if base else ""
            except StoreError as error:  # damaged: keep what it most likely needs, and prune the rest
                log.warning("%s; the policy before it is kept", error)
                return self._folder("policy", iteration - 1)
        return self._bases[iteration]

    def _folder(self, stage: str, iteration: int) -> str:
        return f"{self._run.root}/rl/{iteration:05d}/{stage}"

    def _versions_of_use(self) -> set[int]:
        """The version with the best mean reward, and the one that the run ends with by its config,
        which is registered.
        """
        best = self._run.record(self._newest).best.iteration
        return {self._run.sampled_by(best), self._run.config.rl.num_iterations}

    def _prune_one(self, stage: str, iteration: int) -> None:
        store, folder = self._run.store, self._folder(stage, iteration)
        if self._stopped.is_set():
            return
        record = self._record(stage, iteration, folder)
        self._unfinished.add(folder)
        with fenced(self._run.lease):
            created = store.create(f"{folder}/{PRUNED}", sealed(record))
        if created and iteration not in self._surplus(
            stage, self._forks.pins(self._run.name)
        ):  # a fork began meanwhile
            delete_fenced(store, f"{folder}/{PRUNED}", record, folder, self._run.lease)
            self._unfinished.discard(folder)
            return
        self._finish()
        self._files[stage].discard(iteration)

    def _record(self, stage: str, iteration: int, folder: str) -> PruneRecord:
        run, files = self._run.name, read_manifest(self._run.store, folder).files
        earlier = [at for at in self._files["state"] if at < iteration or (at == iteration and stage == "policy")]
        return PruneRecord(
            run=run,
            iteration=iteration,
            stage=stage,
            bytes=sum(file.bytes for file in files),
            state_iteration=max(earlier, default=-1),
            command=f"rlpipe fork {run} --at {iteration} --run NEW" if stage == "policy" else "",
            host=socket.gethostname(),
            pid=os.getpid(),
            began_at=datetime.now(UTC).isoformat(timespec="milliseconds"),
            lease=self._run.lease.number if self._run.lease else None,
        )
