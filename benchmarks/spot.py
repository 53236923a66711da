"""Engines on spot machines: hosts of a run get a notice and leave,
others come, and what that costs.

    .venv/bin/python benchmarks/spot.py FOLDER [--hosts 6] [--taken 2] [--every-s 60] [--away-s 20]
        [--iterations 4]

Runs the preset `tiny` twice, its engines in `rlpipe host` processes: undisturbed, and with
`--taken` of them ended by SIGTERM every `--every-s` seconds, for which others start `--away-s`
later. Engines sleep in each step (benchmarks/slow), so that on two cores the speed of a host is its
own. Prints what a host samples a second while it is there and the run samples, and how that
compares; a host is there from when its engine serves to its notice. And the final sha256 of both
runs, which are the same.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from rlpipe.base.manifests import moment_of
from rlpipe.store.artifacts import read_manifest
from rlpipe.store.audit import manifests
from rlpipe.store.opening import open_existing
from tests.pipeline import Folder, kill_group

SLOW = Path(__file__).parent / "slow"
STEP_S = "0.02"
JOIN_DEADLINE_S = 300.0
GRACE_S = 30.0  # what a machine has between its notice and its end
SETTINGS = [
    "engines.place=elsewhere", "engines.count=1", "engines.in_flight_max=16", "trainer.threads=1",
    "model.context_tokens_max=256", "sft.num_steps=8", "sft.segment_steps=8", "sft.decay_steps=8", "sft.warmup_steps=2",
    "data.short_words.rows_max=400",
    "data.words.rows_max=300", "rl.completion_tokens_max=192", "rl.num_prompts=512", "rl.group_size=8",
    "rl.shard_prompts=64", "rl.filters={}",
    "evaluation.every=0", "evaluation.prompts_max=8",
]  # fmt: skip
Span = tuple[float, float]  # of the clock, seconds


@dataclass(eq=False)
class SpotHost:
    """A machine with `rlpipe host` on it.

    `from_s`: when its engine served first, 0 before that; `to_s`: its notice, 0 before that.
    """

    folder: Path
    process: subprocess.Popen[str]
    from_s: float = 0.0
    to_s: float = 0.0

    def look(self) -> None:
        """Notes that its engine serves."""
        logs = self.folder.glob(".rlpipe/engines-a-*/*/*-0.log")
        if not self.from_s and any("serving" in log.read_text() for log in logs):
            self.from_s = time.time()


@dataclass
class Stand:
    """A run whose engines are spot hosts."""

    folder: Folder
    iterations: int
    hosts: list[SpotHost] = field(default_factory=list)

    @property
    def present(self) -> list[SpotHost]:
        return [host for host in self.hosts if not host.to_s]

    def come(self, count: int) -> None:
        for _ in range(count):
            own = Folder(self.folder.path / f"host-{len(self.hosts)}", self.folder.store, self.folder.environment)
            own.path.mkdir()
            self.hosts.append(SpotHost(own.path, own.start("host", "--run", "a", "--store", self.folder.store)))

    def take(self, count: int) -> None:
        """A notice to the oldest hosts, and the end of those machines once their grace is over."""
        taken = self.present[:count]
        for host in taken:
            host.to_s = time.time()
            host.process.send_signal(signal.SIGTERM)
        for host in taken:
            try:
                host.process.wait(timeout=GRACE_S)
            except subprocess.TimeoutExpired:
                print("a host did not leave within its grace time")
                kill_group(host.process)

    def go(self, count: int, taken: int, every_s: float, away_s: float) -> None:
        """The whole run; `taken` of `count` hosts are taken away every `every_s`."""
        self.come(count)
        flow = self.folder.start(*self.folder.run_arguments("a", *SETTINGS, f"rl.num_iterations={self.iterations}"))
        try:
            self._until_joined(flow, count)
            take_at, come_at = time.monotonic() + every_s, 0.0
            while flow.poll() is None:
                time.sleep(0.2)
                for host in self.present:
                    host.look()
                if come_at and time.monotonic() > come_at:
                    self.come(taken)
                    come_at = 0.0
                if taken and time.monotonic() > take_at:
                    self.take(taken)
                    take_at, come_at = take_at + every_s, time.monotonic() + away_s
            assert flow.returncode == 0, (self.folder.path / "output.log").read_text()[-4000:]
        finally:
            for host in self.hosts:
                host.to_s = host.to_s or time.time()
                kill_group(host.process)
            kill_group(flow)

    def _until_joined(self, flow: subprocess.Popen[str], count: int) -> None:
        deadline = time.monotonic() + JOIN_DEADLINE_S
        while sum(host.from_s > 0 for host in self.hosts) < count:
            assert time.monotonic() < deadline and flow.poll() is None, "the hosts did not join"
            time.sleep(0.2)
            for host in self.hosts:
                host.look()

    def sampled(self) -> tuple[int, float]:
        """Tokens that were sampled for training from the second iteration on, and for how many
        seconds of all hosts together."""
        run, spans, num_tokens = open_existing(self.folder.open_store(), "a"), list[Span](), 0
        for folder in manifests(run):
            if "/rollouts/" in folder and "/rl/00000/" not in folder:  # hosts join in the first
                manifest = read_manifest(run.store, folder)
                spans.append(
                    (
                        moment_of(manifest.started_at, folder).timestamp(),
                        moment_of(manifest.ended_at, folder).timestamp(),
                    )
                )
                num_tokens += manifest.metrics["num_tokens"]
        there = [(host.from_s, host.to_s) for host in self.hosts if host.from_s]
        return num_tokens, sum(
            max(0.0, min(span[1], to_s) - max(span[0], from_s)) for span in merged(spans) for from_s, to_s in there
        )


def merged(spans: list[Span]) -> list[Span]:
    """The same time without overlaps."""
    whole: list[Span] = []
    for start, end in sorted(spans):
        if whole and start <= whole[-1][1]:
            whole[-1] = (whole[-1][0], max(whole[-1][1], end))
        else:
            whole.append((start, end))
    return whole


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--hosts", type=int, default=6)
    parser.add_argument("--taken", type=int, default=2)
    parser.add_argument("--every-s", type=float, default=60.0)
    parser.add_argument("--away-s", type=float, default=20.0)
    parser.add_argument("--iterations", type=int, default=4)
    arguments = parser.parse_args()
    rates, sha256s = [], []
    for name, taken in (("undisturbed", 0), ("disturbed", arguments.taken)):
        path = (arguments.folder / name).resolve()
        path.mkdir(parents=True)
        python_path = f"{SLOW}:{os.environ.get('PYTHONPATH', '')}".rstrip(":")
        folder = Folder(path, f"file://{path}/store", {"PYTHONPATH": python_path, "SLOW_STEP_S": STEP_S})
        stand = Stand(folder, arguments.iterations)
        stand.go(arguments.hosts, taken, arguments.every_s, arguments.away_s)
        num_tokens, host_s = stand.sampled()
        notices = len(stand.hosts) - arguments.hosts if taken else 0
        rates.append(num_tokens / host_s)
        sha256s.append(folder.final_sha256("a", arguments.iterations))
        print(f"{name}: {num_tokens} tokens in {host_s:.0f} s of hosts, {rates[-1]:.1f} tokens/s of a host; "
              f"about {notices} notices; final sha256 {sha256s[-1]}", flush=True)  # fmt: skip
    print(f"throughput of a host that was there: {rates[1] / rates[0]:.3f} of the undisturbed run's")
    print(f"final policies: {'the same' if sha256s[0] == sha256s[1] else 'NOT the same'}")
    sys.exit(0 if sha256s[0] == sha256s[1] else 1)


if __name__ == "__main__":
    main()
