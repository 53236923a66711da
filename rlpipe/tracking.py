"""MLflow, in a thread of its own and failing open: an outage costs a warning, never the run.

The store is the truth: what MLflow missed is read from there and sent later, each step once, by whoever runs next.
"""

from __future__ import annotations

import logging
import os
import queue
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from rlpipe.config import PipelineConfig, TrackingConfig, identity
from rlpipe.report import Point
from rlpipe.secrecy import without_passwords
from rlpipe.types import StoreError

log = logging.getLogger(__name__)
FINISH_TIMEOUT_S = 30.0
EXPERIMENT = "rlpipe"
SENT_TAG = "rlpipe.sent_"
CATCH_UP_MAX = 200  # committed units sent per wake-up: a resume after an outage catches up in bounded steps

Fetch = Callable[[str, int], list[Point]]  # (phase, unit) -> its points


def tracking_uri(config: PipelineConfig) -> str:
    """Where MLflow is. What the environment says of it may hold a password, and is told to nobody."""
    uri = config.tracking.uri
    return os.environ.get("MLFLOW_TRACKING_URI", uri) if uri == TrackingConfig().uri else uri


def _with_password_aside(uri: str) -> str:
    """An http URI without user and password, which MLflow finds in the environment: it prints the URI of a run that ended."""
    parts = urlsplit(uri)
    if parts.scheme not in ("http", "https") or not parts.username:
        return uri
    os.environ["MLFLOW_TRACKING_USERNAME"] = unquote(parts.username)
    os.environ["MLFLOW_TRACKING_PASSWORD"] = unquote(parts.password or "")
    return without_passwords(uri)


@dataclass
class Phase:
    """How far a phase is committed, and how much of it MLflow has."""

    mlflow_run: str
    sent: int
    committed: int = 0


@dataclass
class Tracker:
    """Follows the commits of one pipeline run. `fetch` reads the metrics of a committed SFT segment or RL iteration."""

    config: PipelineConfig
    store_url: str
    fetch: Fetch
    _queue: queue.Queue[Callable[[], None] | None] = field(default_factory=queue.Queue)
    _thread: threading.Thread | None = None
    _client: Any = None
    _experiment: str = ""
    _parent: str = ""
    _phases: dict[str, Phase] = field(default_factory=dict)
    _warned: bool = False

    def committed(self, phase: str, committed: int) -> None:
        """Says that `committed` units of the phase are in the store now; begins the phase, or continues it."""
        self._submit(lambda: self._send(phase, committed))

    def finish(self, policy_url: str, files: list[Path]) -> None:
        """Attaches the report's files and registers the final policy by its URL, without copying it."""
        self._submit(lambda: self._finish(policy_url, files))

    def close(self) -> None:
        """Gives MLflow a bounded time to take what is left."""
        if self._thread is None:
            return
        self._queue.put(None)
        self._thread.join(timeout=FINISH_TIMEOUT_S)
        if self._thread.is_alive():
            log.warning("MLflow at %s is slow; what it missed is sent at the next start", without_passwords(self._uri))

    @property
    def _uri(self) -> str:
        return tracking_uri(self.config)

    def _submit(self, job: Callable[[], None]) -> None:
        if not self._uri:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, daemon=True, name="tracking")
            self._thread.start()
        self._queue.put(job)

    def _work(self) -> None:
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
        os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")
        logging.getLogger("alembic").setLevel(logging.WARNING)
        from mlflow.exceptions import MlflowException

        while (job := self._queue.get()) is not None:
            try:
                job()
                self._warned = False
            except (MlflowException, StoreError, OSError) as error:  # an outage, a full disk, a wrong URI: it fails open
                if not self._warned:
                    log.warning(
                        "MLflow at %s cannot be reached (%s); the run goes on",
                        without_passwords(self._uri),
                        without_passwords(str(error))[:200],
                    )
                self._warned = True

    def _connect(self) -> None:
        if self._client is not None:
            return
        from mlflow import MlflowClient

        client = MlflowClient(tracking_uri=_with_password_aside(self._uri))
        experiment = client.get_experiment_by_name(EXPERIMENT)
        self._experiment = experiment.experiment_id if experiment else client.create_experiment(EXPERIMENT)
        self._parent = self._run_of(client, "post-train", "")
        self._client = client

    def _run_of(self, client: Any, phase: str, parent: str) -> str:
        """The MLflow run of a phase: found by its tags, or created."""
        tags = {"rlpipe.run": self.config.run, "rlpipe.store": self.store_url, "rlpipe.phase": phase}
        clause = " and ".join(f"tags.`{key}` = '{value}'" for key, value in tags.items())
        found = client.search_runs([self._experiment], clause, max_results=1)
        if found:
            return found[0].info.run_id
        nested = {"mlflow.parentRunId": parent} if parent else {}
        name = self.config.run if not parent else f"{self.config.run} {phase}"
        created = client.create_run(self._experiment, run_name=name, tags={**tags, **nested}).info.run_id
        if not parent:
            for key, value in identity(self.config).items():
                client.log_param(created, key, str(value)[:5000])
        return created

    def _send(self, phase: str, committed: int) -> None:
        """Sends every committed unit that MLflow does not have, oldest first, and remembers how far it got."""
        from mlflow.entities import Metric, RunTag

        self._connect()
        if phase not in self._phases:
            mlflow_run = self._run_of(self._client, phase, self._parent)
            tags = self._client.get_run(mlflow_run).data.tags
            self._phases[phase] = Phase(mlflow_run, int(tags.get(SENT_TAG + phase, 0)))
        state = self._phases[phase]
        for unit in range(state.sent, min(committed, state.sent + CATCH_UP_MAX)):
            points = [
                Metric(re.sub(r"[^\w\-. :/]", "_", name), float(value), point.time_ms, point.step)
                for point in self.fetch(phase, unit)
                for name, value in point.metrics.items()
            ]
            # dying between metrics and tag sends the unit again: the same points, which MLflow keeps once
            for first in range(0, len(points), 900):
                last = first + 900 >= len(points)
                tag = [RunTag(SENT_TAG + phase, str(unit + 1))] if last else []
                self._client.log_batch(state.mlflow_run, metrics=points[first : first + 900], tags=tag)
            state.sent = unit + 1

    def _finish(self, policy_url: str, files: list[Path]) -> None:
        from mlflow.exceptions import MlflowException

        self._connect()
        for path in files:
            self._client.log_artifact(self._parent, str(path))
        name = f"rlpipe-{self.config.run}"
        try:
            self._client.create_registered_model(name)
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
        known = {version.source for version in self._client.search_model_versions(f"name = '{name}'")}
        if policy_url not in known:
            self._client.create_model_version(name, source=policy_url, run_id=self._parent)
        self._client.set_terminated(self._parent)
        for state in self._phases.values():
            self._client.set_terminated(state.mlflow_run)
