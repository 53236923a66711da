"""What a team has, on one machine: a Prefect server on Postgres, a worker for each of the three
pools, MLflow, an S3 server."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from rlpipe.base.values import JsonDict
from rlpipe.processes.launch import free_port
from tests.conftest import S3Server
from tests.pipeline import BIN
from tests.postgres_world import running_postgres
from tests.prefect_stand import POOLS, Stand, kill_tree


class TeamStand(Stand):
    """A Stand on Postgres whose processes have names: server, one worker a pool, mlflow."""

    def __init__(self, path: Path, s3: S3Server, database_url: str) -> None:
        super().__init__(path)
        self.s3 = s3
        self.mlflow_port = free_port()
        self.environment |= {
            **s3.environment,
            "PREFECT_API_DATABASE_CONNECTION_URL": database_url,
            "RLPIPE_SERVICE_KEY": "the team's key",
        }

    def start_server(self) -> None:  # on Postgres it is Prefect's own
        self.spawn("server", "server", "start", "--host", "127.0.0.1", "--port", str(self.port))

    def start_worker(self, pool: str) -> None:
        self.spawn(pool, "worker", "start", "--pool", pool)

    def config(self, run: str, *sets: str) -> list[str]:
        """The settings of a run that uses all of the stand."""
        return [
            f"run={run}", f"store=s3://{self.s3.bucket}/team", f"tracking.uri=http://127.0.0.1:{self.mlflow_port}",
            "trainer.place=deployment", "engines.place=deployment", *sets,
        ]  # fmt: skip

    def services(self, run: str, kind: str) -> list[JsonDict]:
        """The flow runs of a run's services of a kind (trainer or engines), the oldest first."""
        told = self.api("POST", "/flow_runs/filter", {"flow_runs": {"name": {"like_": f"serve-{kind} {run} node"}}})
        return sorted(told, key=lambda each: each["created"])


@contextlib.contextmanager
def team_stand(path: Path, s3: S3Server) -> Iterator[TeamStand]:
    """Everything up, the deployments and automations made."""
    with contextlib.ExitStack() as stack:
        stand = TeamStand(path, s3, stack.enter_context(running_postgres()))
        stack.callback(lambda: [kill_tree(process) for process in reversed(stand.processes.values())])
        stand.spawn_program("mlflow", str(BIN / "mlflow"), "server", "--host",
                            "127.0.0.1", "--port", str(stand.mlflow_port),
                            "--backend-store-uri", f"sqlite:///{path}/mlflow.db",
                            "--artifacts-destination", f"{path}/artifacts",
                            "--workers", "1")  # fmt: skip
        stand.start_server()
        stand.wait_ready()
        stand.deploy()
        stand.run(BIN / "rlpipe", "automations")
        for pool in POOLS:
            stand.start_worker(pool)
        yield stand
