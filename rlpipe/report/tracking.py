"""Tracking with MLflow, in a thread of its own: an outage costs a warning, never the run.
docs/tracking.md lists what is where.

The store is the truth: points that MLflow missed are read from there and sent later, each step
once, by the next process that works on the run.
"""

from __future__ import annotations

import logging
import os
import queue
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rlpipe.base.errors import RunWaits, StoreError, UserError
from rlpipe.base.values import Metrics
from rlpipe.config.operational import TrackingConfig
from rlpipe.config.pipeline import PipelineConfig, identity
from rlpipe.config.secrecy import with_password_aside, without_passwords
from rlpipe.report.curves import BEFORE_RL, EXPORT_TAG, DataSet, Point, code_tags, evaluation_points
from rlpipe.report.outages import read, said_of
from rlpipe.report.show import parameter_text, rollout_table
from rlpipe.store.run import Run

if TYPE_CHECKING:
    from mlflow import MlflowClient

log = logging.getLogger(__name__)
FINISH_TIMEOUT_S = 30.0
# MLflow waits so long for the first commit: its import, and the tables of a new database, take
# seconds of this process, for which the first step of a run would wait
BEGIN_S = 15.0
PARENT = "post-train"  # the phase tag of the parent, the MLflow run around those of the phases
SENT_TAG = "rlpipe.sent_"
STOPPED_TAG = "rlpipe.stopped"
POLICY_TAG = "rlpipe.policy"
GATE_TAG = "rlpipe.gate"  # of a registered version: its verdict
Verdict = Literal["passed", "failed", "revoked"]  # revoked: passed first, failed a later evaluation
# verdict -> those that it replaces: a run that is started again promotes nothing twice, and nothing
# that was revoked
REPLACED: dict[Verdict, tuple[str | None, ...]] = {
    "passed": (None, "failed"),
    "failed": (None,),
    "revoked": (None, "passed", "revoked"),
}
CHAMPION = "champion"  # the alias of the newest version that passed
# the source of tables: of each iteration some of the rollouts that it trained on
ROLLOUTS = "rollouts"
# the source of points -> the MLflow run that has them
PHASE_OF = {"sft": "sft", BEFORE_RL: "rl", "rl": "rl", ROLLOUTS: "rl"}
# what the parent has too
COMPARED = re.compile(rf"evaluation/|before_sft/|{BEFORE_RL}/|rollout/reward_mean$|sft/validation_loss$")
VALUE_CHARACTERS_MAX = 6000  # of a parameter; this and the next two are MLflow's limits
PARAMS_MAX = 100  # in one request
METRICS_MAX = 1000  # in one request
ENVIRONMENT = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_LOGGING_LEVEL": "WARNING",
}


def tracking_uri(config: PipelineConfig) -> str:
    """The address of MLflow. The one in the environment may hold a password: show it only through
    `without_passwords`.
    """
    uri = config.tracking.uri
    return os.environ.get("MLFLOW_TRACKING_URI", uri) if uri == TrackingConfig().uri else uri


def status_of(error: BaseException) -> str:
    """MLflow's status of a run that this exception ended: FAILED; KILLED by a signal or a
    cancellation; SCHEDULED where it goes on later.
    """
    if isinstance(error, RunWaits):
        return "SCHEDULED"
    return "FAILED" if isinstance(error, Exception) else "KILLED"


@dataclass
class MlflowRun:
    """An MLflow run as this process knows it."""

    run_id: str
    status: str
    tags: dict[str, str]
    is_new: bool


class Tracker:
    """Tracks one pipeline run.

    `fetch` reads the points of one unit of a source: an SFT segment, an RL iteration, the
    evaluation before RL.
    """

    def __init__(self, run: Run, fetch: Callable[[str, int], list[Point]]) -> None:
        self.run = run
        self.status = "FINISHED"  # how the pipeline run ended; read by `close`
        self.stopped = ""  # the budget or rule that ended it; read by `close`
        self._fetch = fetch
        self._uri = tracking_uri(run.config)
        self._project = run.config.tracking.project
        self._queue: queue.Queue[Callable[[], None] | None] = queue.Queue()
        self._thread: threading.Thread | None = None
        self._phase = ""  # the phase in progress
        self._runs: dict[str, MlflowRun] = {}
        self._sent: dict[str, int] = {}  # of each source the units that MLflow has
        self._begun: set[str] = set()  # the sources that have begun, or are continued
        self._due = threading.Event()  # there is something to send

    def begin(self, phase: str) -> None:
        """Notes that a phase begins or goes on."""
        self._phase = phase
        self._submit(self._show_phase)

    def committed(self, source: str, units: int) -> None:
        """Notes that so many units of the source are in the store; called first when a source
        begins, or is continued.
        """
        self._submit(lambda: self._send(source, units), is_due=source in self._begun)
        self._begun.add(source)

    def evaluated(self, version: int) -> None:
        """Notes that a weight version was evaluated; points that MLflow has already are kept
        once.
        """
        phase = "rl" if version > 0 or (version == 0 and self.run.config.rl.num_iterations) else "sft"
        self._submit(
            lambda: self._log_points(self._open(phase), read("evaluation", evaluation_points, self.run, version)),
            is_due=True,
        )

    def reads(self, use: str, data_sets: Callable[[], list[DataSet]]) -> None:
        """Notes that the data sets of a use are read.

        They are loaded only where MLflow does not have them.
        """
        self._submit(lambda: self._log_data(use, data_sets))

    def publish(
        self, policy_url: str, num_iterations: int, evaluation: Metrics, curves: Path, lineage: dict[str, str],
        on_registered: Callable[[], None]
    ) -> None:  # fmt: skip
        """Attaches the curves and registers the final policy by the URL of its folder (a path where
        it is on a disk), without copying it.

        `lineage`: tags with its inputs. `on_registered` is called in the tracker's thread, where it
        was not registered before.
        """
        tags = lineage | {POLICY_TAG: policy_url, "rlpipe.run": self.run.name, "rlpipe.iterations": str(num_iterations)}
        tags |= {f"evaluation/{name}": f"{value:.6g}" for name, value in evaluation.items()}
        self._submit(lambda: self._client.log_artifact(self._open(PARENT).run_id, str(curves)))
        self._submit(lambda: self._register(policy_url, tags, on_registered), is_due=True)

    def judged(self, policy_url: str, verdict: Verdict, on_judged: Callable[[], None]) -> None:
        """Notes what the gate said of a registered policy: a version that passed gets the alias
        `champion`, once. Where the verdict replaces another, `on_judged` is called, in the
        tracker's thread.
        """
        self._submit(lambda: self._judge(policy_url, verdict, on_judged), is_due=True)

    def close(self) -> None:
        """Sends MLflow the end status of the run, and waits a bounded time for the rest to be
        sent.
        """
        if self._thread is None:
            return
        self._queue.put(self._end)
        self._queue.put(None)
        self._due.set()
        self._thread.join(timeout=FINISH_TIMEOUT_S)
        if self._thread.is_alive():
            log.warning("MLflow at %s is slow; what it missed is sent at the next start", without_passwords(self._uri))

    def _submit(self, job: Callable[[], None], *, is_due: bool = False) -> None:
        if not self._uri:
            return
        if is_due:
            self._due.set()
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, daemon=True, name="tracking")
            self._thread.start()
        self._queue.put(job)

    def _work(self) -> None:
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        logging.getLogger("alembic").setLevel(logging.WARNING)
        self._due.wait(BEGIN_S)
        has_warned = False
        while (job := self._queue.get()) is not None:
            try:
                job()
                has_warned = False
            except Exception as error:
                # an outage, a full disk, a wrong URI, a missing driver, any cloud's client:
                # any error fails open
                if not has_warned:
                    log.warning("%s; the run goes on", said_of(error, self._uri))
                has_warned = True

    def _open(self, phase: str) -> MlflowRun:
        """The MLflow run of a phase: found by its tags, or created; with all parameters and
        tags.
        """
        if phase in self._runs:
            return self._runs[phase]
        nested = {} if phase == PARENT else {"mlflow.parentRunId": self._open(PARENT).run_id}
        client, name = self._client, self.run.name
        tags = {"rlpipe.run": name, "rlpipe.store": self.run.store.url, "rlpipe.phase": phase}
        clause = " and ".join(f"tags.`{key}` = '{value}'" for key, value in tags.items())
        known = client.search_runs([self._experiment], clause, max_results=1)
        title = f"{name} {phase}" if nested else name
        entity = known[0] if known else client.create_run(self._experiment, run_name=title, tags=tags | nested)
        self._describe(entity)
        self._runs[phase] = MlflowRun(entity.info.run_id, entity.info.status, entity.data.tags, not known)
        return self._runs[phase]

    @cached_property
    def _client(self) -> MlflowClient:
        from mlflow import MlflowClient

        return MlflowClient(tracking_uri=with_password_aside(self._uri))

    @cached_property
    def _experiment(self) -> str:
        experiment = self._client.get_experiment_by_name(self._project)
        return experiment.experiment_id if experiment else self._client.create_experiment(self._project)

    def _describe(self, entity: Any) -> None:
        """Adds the parameters and tags that an MLflow run lacks: all where it is new, the rest
        where a process died in between.
        """
        from mlflow.entities import Param

        for key, value in code_tags(self.run).items():
            self._client.set_tag(entity.info.run_id, key, value)
        values = {key: parameter_text(value)[:VALUE_CHARACTERS_MAX] for key, value in identity(self.run.config).items()}
        assert len(values) <= PARAMS_MAX, "send them in several requests"
        params = [Param(key, value) for key, value in values.items() if key not in entity.data.params]
        self._client.log_batch(entity.info.run_id, params=params)

    def _show_phase(self) -> None:
        """Sets the phase in progress and the parent to RUNNING, and an earlier phase to
        FINISHED.
        """
        if not self._phase:
            return
        for phase in (PARENT, self._phase):
            self._set_status(phase, "RUNNING")
        for phase in set(self._runs) - {PARENT, self._phase}:
            self._set_status(phase, "FINISHED")

    def _set_status(self, phase: str, status: str) -> None:
        mlflow_run = self._open(phase)
        if status == "RUNNING" and STOPPED_TAG in mlflow_run.tags:
            self._client.delete_tag(mlflow_run.run_id, STOPPED_TAG)
            del mlflow_run.tags[STOPPED_TAG]
        if mlflow_run.status == status:
            return
        if status in ("RUNNING", "SCHEDULED"):
            self._client.update_run(mlflow_run.run_id, status)
        else:
            self._client.set_terminated(mlflow_run.run_id, status)
        mlflow_run.status = status

    def _send(self, source: str, units: int) -> None:
        """Sends every unit that MLflow does not have, oldest first, and remembers the number
        sent.
        """
        phase, tag = self._open(PHASE_OF[source]), SENT_TAG + source
        self._show_phase()
        for unit in range(self._sent.setdefault(source, int(phase.tags.get(tag, 0))), units):
            if source == ROLLOUTS:  # the same file again where the process dies before the tag
                text = read(f"{source} {unit}", rollout_table, self.run, unit)
                self._client.log_text(phase.run_id, text, f"rollouts/{unit:05d}.csv")
            else:
                self._log_points(phase, read(f"{source} {unit}", self._fetch, source, unit))
            # dying before the tag sends the unit again: the same points,
            # which MLflow's database keeps once
            self._client.set_tag(phase.run_id, tag, str(unit + 1))
            self._sent[source] = unit + 1

    def _log_points(self, phase: MlflowRun, points: list[Point]) -> None:
        metrics = _metrics(points)
        self._log(self._open(PARENT), [metric for metric in metrics if COMPARED.match(metric.key)])
        self._log(phase, metrics)

    def _log(self, mlflow_run: MlflowRun, metrics: list[Any]) -> None:
        for first in range(0, len(metrics), METRICS_MAX):
            self._client.log_batch(mlflow_run.run_id, metrics=metrics[first : first + METRICS_MAX])

    def _log_data(self, use: str, data_sets: Callable[[], list[DataSet]]) -> None:
        from mlflow.entities import Dataset, DatasetInput, InputTag

        phase = self._open("sft" if use == "sft" or not self.run.config.rl.num_iterations else "rl")
        tag = f"{SENT_TAG}data_{use}"
        if tag in phase.tags:
            return
        try:
            read = data_sets()
        except (UserError, StoreError, OSError) as error:
            log.warning("MLflow does not get the data sets of use %s: %s", use, error)
            return
        context = [InputTag("mlflow.data.context", use)]
        entities = [
            Dataset(data.name, data.digest, data.source_type, data.source, profile=data.profile) for data in read
        ]
        inputs = [DatasetInput(entity, context) for entity in entities]
        for run_id in (phase.run_id, self._open(PARENT).run_id) if inputs else ():
            self._client.log_inputs(run_id, inputs)
        self._client.set_tag(phase.run_id, tag, str(len(inputs)))
        phase.tags[tag] = str(len(inputs))

    def _register(self, policy_url: str, tags: dict[str, str], on_registered: Callable[[], None]) -> None:
        from mlflow.exceptions import MlflowException

        parent = self._open(PARENT)
        for key, value in tags.items():
            self._client.set_tag(parent.run_id, key, value)
        try:
            self._client.create_registered_model(self._project)
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
        if self._registered(policy_url):
            return
        # a server refuses a folder of this machine: there the source is the MLflow
        # run, and the tag has the folder
        refused = policy_url.startswith("/") and self._uri.startswith("http")
        self._client.create_model_version(
            self._project,
            source=f"runs:/{parent.run_id}/policy" if refused else policy_url,
            run_id=parent.run_id,
            tags=tags,
            description=_description(policy_url, tags),
        )
        on_registered()

    def _registered(self, policy_url: str) -> list[Any]:
        versions = self._client.search_model_versions(f"name = '{self._project}'")
        return [version for version in versions if version.tags.get(POLICY_TAG) == policy_url]

    def _judge(self, policy_url: str, verdict: Verdict, on_judged: Callable[[], None]) -> None:
        """Moves the alias before the tag: where the process dies in between, the next start does it
        again. A version that passed is left alone, as the alias may have moved on since, or back.
        """
        for version in self._registered(policy_url):
            if version.tags.get(GATE_TAG) not in REPLACED[verdict]:
                continue
            if verdict == "passed":
                self._client.set_registered_model_alias(self._project, CHAMPION, version.version)
            self._client.set_model_version_tag(self._project, version.version, GATE_TAG, verdict)
            on_judged()

    def _end(self) -> None:
        """Ends the MLflow runs that are RUNNING; where this process began no phase, only those that
        it created, as another process may work on the others. A run that waits for a person is
        between two phases: the phase is FINISHED, its parent SCHEDULED.
        """
        if self.stopped and self.status == "FINISHED" and PARENT in self._runs:
            self._client.set_tag(self._runs[PARENT].run_id, STOPPED_TAG, self.stopped)
        for phase, mlflow_run in self._runs.items():
            if mlflow_run.status == "RUNNING" and (self._phase or mlflow_run.is_new):
                self._set_status(phase, "FINISHED" if phase != PARENT and self.status == "SCHEDULED" else self.status)


def _metrics(points: list[Point]) -> list[Any]:
    from mlflow.entities import Metric

    return [
        Metric(re.sub(r"[^\w\-. :/]", "_", name), float(value), point.time_ms, point.step)
        for point in points
        for name, value in point.metrics.items()
    ]


def _description(policy_url: str, tags: dict[str, str]) -> str:
    copied = "" if policy_url.startswith("/") else "; once it is copied to a disk,"
    before = f"; once `{tags[EXPORT_TAG]}` has rebuilt it," if EXPORT_TAG in tags else copied
    return (
        f"The policy of run `{tags['rlpipe.run']}` after {tags['rlpipe.iterations']} RL iterations:"
        f" `{policy_url}`\n\nIt is a folder in Hugging Face's format{before}"
        f" `AutoModelForCausalLM.from_pretrained('{'FOLDER' if before else policy_url}')` loads it. It has no MLmodel"
        " file: `mlflow.transformers` and `mlflow.pyfunc` cannot load it."
    )
