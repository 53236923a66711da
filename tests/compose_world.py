"""The services of infra/compose.yaml without Docker: their commands, environments, health checks
and order, as processes in a network and mount namespace of their own, where each service's name is
an address. Ports and names are the file's, and collide with nobody's.

Not as in the images: what starts Postgres and SeaweedFS there, and the user.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

from tests.deadlines import DEADLINE_S, until
from tests.paths import ROOT

BIN = Path(sys.executable).parent
POSTGRES = next(iter(sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)), Path("/usr/lib/postgresql/bin"))
OUTSIDE = "10.9.9.1"  # where a service reaches another; beside it, 127.0.0.1 is a container's own


def unavailable() -> str:
    """Why the stand cannot be started on this machine; empty: it can."""
    if not (POSTGRES / "initdb").exists():
        return "Postgres is not installed"
    made = subprocess.run(["unshare", "--net", "--mount", "true"], capture_output=True, text=True)
    return f"no namespaces: {made.stderr}" if made.returncode else ""


class Compose:
    """The stand in a folder, started by `up`, ended by `close`."""

    def __init__(self, folder: Path, secrets: dict[str, str]) -> None:
        self.folder, self.secrets = folder, secrets
        self.services: dict[str, Any] = yaml.safe_load((ROOT / "infra" / "compose.yaml").read_text())["services"]
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.database = Path(
            tempfile.mkdtemp(prefix="rlpipe-postgres-")
        )  # pytest's folders are closed to the user postgres
        names = " ".join(self.services)
        (folder / "hosts").write_text(f"127.0.0.1 localhost\n{OUTSIDE} {names}\n")
        setup = (
            f"ip link set lo up && ip addr add {OUTSIDE}/32 dev lo && mount --bind {folder}/hosts /etc/hosts && "
            "echo ready && read -r _"
        )
        self.holder = subprocess.Popen(
            ["unshare", "--net", "--mount", "sh", "-c", setup], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.holder.stdout is not None and self.holder.stdout.readline() == "ready\n"

    def environment(self, name: str) -> dict[str, str]:
        """What the service's processes see: its own variables, and nothing of this process."""
        given = {key: self._filled(value) for key, value in self.services[name].get("environment", {}).items()}
        home = self.folder / name
        home.mkdir(exist_ok=True)
        path = f"{BIN}:{POSTGRES}:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"
        return {"PATH": path, "HOME": str(home), "PYTHONPATH": str(ROOT), "LANG": "C.UTF-8", **given}

    def _filled(self, text: str) -> str:
        """Interpolated as compose does; a KeyError is its refusal to
        start without a required variable."""
        return re.sub(
            r"\$\{(\w+):([?-])([^}]*)\}", lambda found: self.secrets[found[1]] if found[2] == "?" else found[3], text
        )

    def inside(self, *command: str) -> list[str]:
        return ["nsenter", f"--target={self.holder.pid}", "--net", "--mount", f"--wdns={ROOT}", *command]

    def run(self, name: str, *command: str, timeout_s: float = DEADLINE_S) -> subprocess.CompletedProcess[str]:
        """A command beside the service `name`, as `docker compose exec` would."""
        return subprocess.run(
            self.inside(*command), env=self.environment(name), capture_output=True, text=True, timeout=timeout_s,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip

    def command(self, name: str) -> list[str]:
        """The service's command, with what the image's entry point puts before
        it, and its volume in our folder."""
        if name == "postgres":
            return ["setpriv", "--reuid=postgres", "--regid=postgres", "--clear-groups",
                    "postgres", "-D", str(self._database()),
                    "-c", f"unix_socket_directories={self.database}", "-c", "listen_addresses=*"]  # fmt: skip
        told = self.services[name]["command"]
        parts = shlex.split(told) if isinstance(told, str) else told
        data = self.folder / name / "data"
        data.mkdir(parents=True, exist_ok=True)
        return ["weed", *(part.replace("=/data", f"={data}") for part in parts)] if name == "s3" else parts

    def _database(self) -> Path:
        """What the entry point of the Postgres image does with an empty folder: initdb, the
        database, the mounted scripts."""
        given, data = self.environment("postgres"), self.database / "data"
        shutil.chown(self.database, "postgres", "postgres")
        (self.database / "password").write_text(given["POSTGRES_PASSWORD"])
        scripts = [
            mount.split(":")[0]
            for mount in self.services["postgres"]["volumes"]
            if "docker-entrypoint-initdb.d" in mount
        ]
        as_postgres = ["setpriv", "--reuid=postgres", "--regid=postgres", "--clear-groups"]
        single = [*as_postgres, "postgres", "--single", "-j", "-D", str(data), "postgres"]
        subprocess.run([*as_postgres, "initdb", "-D", data, "-U", given["POSTGRES_USER"],
                        f"--pwfile={self.database}/password",
                        "--auth=scram-sha-256"], env=given, check=True, capture_output=True)  # fmt: skip
        for statement in (
            f"CREATE DATABASE {given['POSTGRES_DB']};\n\n",
            *((ROOT / "infra" / each).read_text() for each in scripts),
        ):
            subprocess.run(single, env=given, input=statement + "\n", text=True, check=True, capture_output=True)
        with (data / "pg_hba.conf").open("a") as rules:
            rules.write("host all all all scram-sha-256\n")
        return data

    def up(self) -> None:
        """Starts every service that has no profile when what it depends on
        is healthy, or has ended well."""
        for name, service in self.services.items():
            if "profiles" in service:
                continue
            started = set(self.processes)
            assert set(service.get("depends_on", {})) <= started, f"{name} comes before what it needs"
            with (self.folder / f"{name}.log").open("wb") as log:
                self.processes[name] = subprocess.Popen(
                    self.inside(*self.command(name)), env=self.environment(name), stdout=log, stderr=log,
                    stdin=subprocess.DEVNULL, start_new_session=True,
                )  # fmt: skip
            self._wait(name, service)

    def _wait(self, name: str, service: dict[str, Any]) -> None:
        if "healthcheck" not in service:
            assert self.processes[name].wait(timeout=DEADLINE_S) == 0, self.log(name)
            return
        check = service["healthcheck"]["test"][1:]
        until(
            lambda: self.run(name, *check).returncode == 0,
            lambda: self.log(name),
            running=self.processes[name],
            look_s=0.5,
        )

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()[-3000:]

    def close(self) -> None:
        for process in reversed(self.processes.values()):
            if process.poll() is None:
                process.terminate()
        for process in reversed(self.processes.values()):
            try:
                process.wait(timeout=DEADLINE_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, 9)
                process.wait(timeout=DEADLINE_S)
        self.holder.communicate("\n", timeout=DEADLINE_S)
        shutil.rmtree(self.database)
