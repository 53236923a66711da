"""Runs `rlpipe` as a user does: as a process, in a folder of its own.

Shared by the end-to-end tests.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from rlpipe.store.backend import Store, open_store
from rlpipe.store.opening import open_existing
from rlpipe.store.policy_files import stored_policy
from tests.deadlines import DEADLINE_S, PIPELINE_S, until
from tests.prefect_home import new_home

BIN = Path(sys.executable).parent
# a pipeline of every kind of stage in well under a minute; it learns nothing and must not need to
MINI = [
    "sft.num_steps=12", "sft.segment_steps=4", "sft.decay_steps=12", "sft.warmup_steps=2", "sft.batch_size=16",
    "data.short_words.rows_max=400", "data.all_words.rows_max=100", "data.words.rows_max=300",
    "rl.num_iterations=5", "rl.num_prompts=8", "rl.group_size=4", "rl.shard_prompts=4", "rl.num_steps=2",
    "rl.warmup_steps=2",
    "rl.filters={}", "evaluation.every=2", "evaluation.prompts_max=8", "checkpoint.state_every=2",
    "engines.count=1", "trainer.threads=1",
]  # fmt: skip

# rows that take SLOW_S to read: in the preflight, and again in the SFT
# longer than a service waits that may be idle for IDLE_S, for a run that nobody works on
SLOW_S = 55.0
IDLE_S = 5
STARTED: list[subprocess.Popen[str]] = []  # by a test: none outlives it (conftest.py)
SLOW_WORDS = f"""
import itertools, time
def rows(rows_max, **_):
    time.sleep({SLOW_S})
    words = ("".join(letters) for letters in itertools.product("abcdefg", repeat=4))
    return [{{"prompt": f"Spell {{word}}", "answer": word[::-1]}} for word in itertools.islice(words, rows_max)]
"""


@dataclass
class Folder:
    """A working directory with a store, and the environment its commands run in.

    `inside` goes before a command: another node.

    A run has MLflow only when it is `tracked`, and a Prefect server of its own when no
    PREFECT_API_URL is in `environment`: each takes a quarter of a short run's time.
    """

    path: Path
    store: str
    environment: dict[str, str] = field(default_factory=dict)
    inside: tuple[str, ...] = ()
    tracked: bool = False

    def start(self, *arguments: str, stdout: Path | None = None) -> subprocess.Popen[str]:
        """`rlpipe ARGUMENTS` in a process group of its own. `stdout`: a file for it alone."""
        home = {}
        if "HOME" not in self.environment:  # a PREFECT_HOME has the database
            home["PREFECT_HOME"] = str(self.path / "prefect")
            if "PREFECT_API_URL" not in self.environment:
                new_home(self.path / "prefect")
        environment = {**os.environ, **home, **self.environment}
        log = (self.path / "output.log").open("a")
        with log, log if stdout is None else stdout.open("w") as out:
            process = subprocess.Popen([*self.inside, str(BIN / "rlpipe"), *arguments],
                                       cwd=self.path, env=environment, stdout=out,
                                       stderr=log, text=True, start_new_session=True)  # fmt: skip
        STARTED.append(process)
        return process

    def rlpipe(self, *arguments: str, stdout: Path | None = None) -> tuple[int, str]:
        """Exit code and output of `rlpipe ARGUMENTS`; as `start`."""
        log = self.path / "output.log"
        before = log.stat().st_size if log.exists() else 0
        process = self.start(*arguments, stdout=stdout)
        try:
            code = process.wait(timeout=PIPELINE_S)
        finally:
            kill_group(process)
        return code, log.read_bytes()[before:].decode()

    def run_arguments(self, run: str, *sets: str, preset: str = "tiny") -> list[str]:
        """The arguments of `rlpipe run PRESET` for a run in this folder."""
        tracking = f"sqlite:///{self.path}/mlflow.db" if self.tracked else ""
        overrides = [f"store={self.store}", f"tracking.uri={tracking}", *sets]
        return ["run", preset, "--run", run, *[part for each in overrides for part in ("--set", each)]]

    def complete(self, run: str, *sets: str, preset: str = "tiny") -> str:
        """Runs to the end and returns the output; AssertionError with the output when it fails."""
        code, output = self.rlpipe(*self.run_arguments(run, *sets, preset=preset))
        assert code == 0, output[-4000:]
        return output

    def open_store(self) -> Store:
        return open_store(self.store)

    def final_sha256(self, run: str, num_iterations: int) -> str:
        """The sha256 of the final policy's safetensors, whole, however it is stored."""
        store = self.open_store()
        ref, _ = open_existing(store, run).policy(num_iterations)
        return stored_policy(store, ref).files["model.safetensors"].sha256

    def evaluation(self, run: str, version: int) -> dict[str, float]:
        found = open_existing(self.open_store(), run)
        if version == 0:
            return found.committed("sft", found.config.sft.num_segments - 1, "evaluation")[1].metrics
        return found.committed("rl", version - 1, "evaluation")[1].metrics

    def said(self) -> str:
        """The end of what the commands have printed."""
        return (self.path / "output.log").read_text()[-4000:]

    def wait_for(self, run: str, key: str, process: subprocess.Popen[str]) -> None:
        """Returns when `runs/<run>/<key>` exists; AssertionError when the process ends first."""
        store, whole = self.open_store(), f"runs/{run}/{key}"
        until(
            lambda: store.exists(whole),
            lambda: f"{key}: {self.said()}",
            running=process,
            within_s=PIPELINE_S,
            look_s=0.05,
        )


@dataclass(frozen=True)
class Undisturbed:
    """A run `a` of MINI that nothing happens to, three iterations longer:
    what it ends with at 5 and at 8."""

    folder: Folder
    duration_s: float  # until its fifth iteration

    def sha256(self, num_iterations: int = 5) -> str:
        return self.folder.final_sha256("a", num_iterations)


def run_undisturbed(folder: Folder) -> float:
    """Makes the run of Undisturbed; returns its duration_s."""
    started = time.monotonic()
    process = folder.start(*folder.run_arguments("a", *MINI, "rl.num_iterations=8"))
    try:
        folder.wait_for("a", "rl/00004/iteration.json", process)
        duration_s = time.monotonic() - started
        assert process.wait(timeout=PIPELINE_S) == 0, folder.said()
    finally:
        kill_group(process)
    assert folder.rlpipe("verify", "a", "--store", folder.store)[0] == 0
    return duration_s


def kill_group(process: subprocess.Popen[str]) -> None:
    """SIGKILL to the whole process group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(timeout=DEADLINE_S)


def read_record(folder: Folder, run: str, iteration: int) -> dict[str, object]:
    return json.loads(folder.open_store().read(f"runs/{run}/rl/{iteration:05d}/iteration.json"))
