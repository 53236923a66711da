"""What a team has, on one machine: a Prefect server on Postgres, a worker for each of the three pools, MLflow, an S3 server."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from rlpipe.launch import free_port
from rlpipe.types import JsonDict
from tests.compose_world import POSTGRES
from tests.conftest import S3Server
from tests.pipeline import BIN, kill_group
from tests.prefect_stand import Stand, kill_tree

POOLS = ("cpu", "train-gpu", "rollout-gpu")
AS_POSTGRES = ["setpriv", "--reuid=postgres", "--regid=postgres", "--clear-groups"]
START_TIMEOUT_S = 120


class TeamStand(Stand):
    """A Stand whose processes have names: server, one worker a pool, mlflow, postgres."""

    def __init__(self, path: Path, s3: S3Server) -> None:
        super().__init__(path)
        self.s3 = s3
        self.database = Path(tempfile.mkdtemp(prefix="rlpipe-postgres-"))  # pytest's folders are closed to the user postgres
        self.database_port, self.mlflow_port = free_port(), free_port()
        user = f"postgresql+asyncpg://prefect@127.0.0.1:{self.database_port}/postgres"
        self.environment |= {
            **s3.environment,
            "PREFECT_API_DATABASE_CONNECTION_URL": user,
            "RLPIPE_SERVICE_KEY": "the team's key",
        }

    def spawn_program(self, name: str, *command: str) -> None:
        with (self.path / f"{name}.log").open("a") as log:
            self.processes[name] = subprocess.Popen(
                command, cwd=self.path, env=self.environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL, text=True,
                start_new_session=True,
            )  # fmt: skip

    def start_postgres(self) -> None:
        """As Debian's, without a password: it listens on loopback."""
        shutil.chown(self.database, "postgres", "postgres")
        data = self.database / "data"
        made = [*AS_POSTGRES, str(POSTGRES / "initdb"), "-D", str(data), "-U", "prefect", "--auth=trust"]
        subprocess.run(made, check=True, capture_output=True, cwd="/", env={"PATH": os.environ["PATH"], "LANG": "C.UTF-8"})
        self.spawn_program("postgres", *AS_POSTGRES, str(POSTGRES / "postgres"), "-D", str(data), "-p", str(self.database_port),
                           "-c", f"unix_socket_directories={self.database}", "-c", "listen_addresses=127.0.0.1")  # fmt: skip
        ready = [str(POSTGRES / "pg_isready"), "-h", "127.0.0.1", "-p", str(self.database_port)]
        end = time.monotonic() + START_TIMEOUT_S
        while subprocess.run(ready, capture_output=True).returncode:
            assert time.monotonic() < end, (self.path / "postgres.log").read_text()[-3000:]
            time.sleep(0.2)

    def start_server(self) -> None:
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
    stand = TeamStand(path, s3)
    try:
        stand.start_postgres()
        stand.spawn_program("mlflow", str(BIN / "mlflow"), "server", "--host", "127.0.0.1", "--port", str(stand.mlflow_port),
                            "--backend-store-uri", f"sqlite:///{path}/mlflow.db", "--artifacts-destination", f"{path}/artifacts",
                            "--workers", "1")  # fmt: skip
        stand.start_server()
        for pool in POOLS:
            stand.prefect("work-pool", "create", pool, "--type", "process", "--overwrite", deadline_s=START_TIMEOUT_S)
        stand.prefect("deploy", "--all")
        stand.run(BIN / "rlpipe", "automations")
        for pool in POOLS:
            stand.start_worker(pool)
        yield stand
    finally:
        for process in reversed(stand.processes.values()):
            if process is not stand.processes.get("postgres"):
                kill_tree(process)
        if "postgres" in stand.processes:
            kill_group(stand.processes["postgres"])
        shutil.rmtree(stand.database, ignore_errors=True)
