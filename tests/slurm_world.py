"""A real Slurm of several nodes on this machine, in a network and mount namespace of its own: each
node an address, CPUs and GPUs claimed."""

from __future__ import annotations

import shutil
import socket
import subprocess
from pathlib import Path

from tests.deadlines import DEADLINE_S, until

NODES = 5
CONF = """
ClusterName=test
SlurmctldHost={host}(10.9.9.100)
AuthType=auth/none
CryptoType=crypto/none
CredType=cred/none
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu
KillWait=10
MinJobAge=3600
"""


def unavailable() -> str:
    """Why Slurm cannot be started on this machine; empty: it can."""
    if missing := [name for name in ("slurmctld", "slurmd", "sbatch") if shutil.which(name) is None]:
        return f"{', '.join(missing)}: not installed (apt-get install slurm-wlm)"
    made = subprocess.run(["unshare", "--net", "--mount", "true"], capture_output=True, text=True)
    return f"no namespaces: {made.stderr}" if made.returncode else ""


class Slurm:
    """NODES nodes n0, n1, ... of 64 CPUs and 8 GPUs, as far as Slurm knows."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "state").mkdir()
        host = socket.gethostname()
        addresses = {f"n{index}": f"10.9.9.{index + 1}" for index in range(NODES)} | {host: "10.9.9.100"}
        (folder / "hosts").write_text(
            "127.0.0.1 localhost\n" + "".join(f"{to} {name}\n" for name, to in addresses.items())
        )
        nodes = [(f"NodeName=n{index} NodeHostname={host} NodeAddr=10.9.9.{index + 1} Port={17010 + index} CPUs=64 "
                  "RealMemory=1000 Gres=gpu:8")
                 for index in range(NODES)]  # fmt: skip
        partition = "PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP"
        (folder / "slurm.conf").write_text("\n".join([CONF.format(host=host, folder=folder), *nodes, partition, ""]))
        (folder / "gres.conf").write_text(f"Name=gpu File={folder}/gpu[0-7]\n")
        for index in range(8):
            (folder / f"gpu{index}").touch()
        add = " && ".join(f"ip addr add {to}/32 dev lo" for to in addresses.values())
        setup = f"ip link set lo up && {add} && mount --bind {folder}/hosts /etc/hosts && echo ready && read -r _"
        self.holder = subprocess.Popen(
            ["unshare", "--net", "--mount", "sh", "-c", setup], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.holder.stdout is not None and self.holder.stdout.readline() == "ready\n"
        self.daemons: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        """Starts the daemons, and waits until every node is there."""
        self.daemons.append(self._daemon("slurmctld", "-D"))
        for index in range(NODES):
            (self.folder / f"spool-n{index}").mkdir()
            self.daemons.append(self._daemon("slurmd", "-D", "-N", f"n{index}"))
        self._until_idle()

    def _inside(self, *command: str, cwd: Path | None = None) -> list[str]:
        inside = ["nsenter", f"--target={self.holder.pid}", "--net", "--mount", f"--wdns={cwd or self.folder}"]
        return [*inside, "env", f"SLURM_CONF={self.folder}/slurm.conf", *command]

    def _daemon(self, *command: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            self._inside(*command), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )

    def run(self, *command: str, cwd: Path | None = None) -> str:
        """The output of a command on the login node; AssertionError
        with its errors when it fails."""
        told = subprocess.run(
            self._inside(*command, cwd=cwd),
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            stdin=subprocess.DEVNULL,
        )
        assert told.returncode == 0, told.stdout + told.stderr
        return told.stdout

    def _until_idle(self) -> None:
        command = self._inside("sinfo", "-h", "-t", "idle", "-o", "%D")

        def idle() -> bool:
            told = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)
            return told.stdout.strip() == str(NODES)

        until(idle, lambda: f"Slurm did not come up:\n{(self.folder / 'slurmctld.log').read_text()[-3000:]}", look_s=1)

    def states(self) -> dict[str, str]:
        """The state of every job, by its name."""
        told = self.run("squeue", "--all", "--states=all", "--noheader", "--format=%j %T")
        return dict(line.split() for line in told.splitlines())

    def ids(self, *names: str) -> list[str]:
        """The jobs of these names, whatever became of them."""
        return self.run(
            "squeue", "--all", "--states=all", "--noheader", f"--name={','.join(names)}", "--format=%A", "--sort=i"
        ).split()

    def hold_gpus(self) -> str:
        """The id of a job that has all GPUs until it is cancelled, and runs."""
        job = self.run(
            "sbatch", "--parsable", "--job-name=other", f"--nodes={NODES}", "--gpus-per-node=8", "--wrap=sleep 86400"
        ).strip()
        until(lambda: self.states()["other"] == "RUNNING", "all GPUs are free", look_s=1)
        return job

    def close(self) -> None:
        subprocess.run(self._inside("scancel", "--user=root"), capture_output=True, timeout=DEADLINE_S)
        queue = self._inside("squeue", "-h")
        until(
            lambda: not subprocess.run(queue, capture_output=True, timeout=DEADLINE_S).stdout,
            "jobs that do not end",
            look_s=1,
        )
        for daemon in reversed(self.daemons):
            daemon.terminate()
        for daemon in self.daemons:
            daemon.wait(timeout=DEADLINE_S)
        self.holder.communicate("\n", timeout=DEADLINE_S)
