"""The first ten minutes on a machine with a GPU: what is right, what fits and how fast, without a
download and without SGLang.

Every part (scripts/gpu_parts.py) is a process with its own time limit, and one that fails does not
stop the others. Models are new ones, of their configs alone. See docs/gpu.md.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from scripts.gpu_commands import ROOT, kill

# in the order in which they run: what the ones before show makes sense of the ones behind
PARTS = {
    "kernels": 180, "lora": 120, "offload": 180, "qwen3-0.6b": 180, "qwen3-1.7b": 180, "qwen3-4b": 300,
    "run": 300, "killed": 300, "apart": 300,
}  # fmt: skip
NOT_ON_CPU = ("qwen3-1.7b", "qwen3-4b")  # small shapes are one shape


@dataclass(frozen=True)
class Outcome:
    """What a part came to. `figures`: by name; `fault`: why there are none, the end of its log."""

    part: str
    seconds: float
    figures: dict[str, float | str]
    fault: str = ""

    @property
    def line(self) -> str:
        """Its row in the table."""
        told = (
            ", ".join(f"{name} {value}" for name, value in self.figures.items())
            or f"FAILED: {self.fault.splitlines()[-1]}"
        )
        return f"| {self.part} | {self.seconds:.0f} | {told} |"


def first(parts: list[str], device: str, folder: Path) -> int:
    """Runs the parts one after the other and prints the table; 1 when one of them failed.

    `device`: gpu or cpu.
    """
    outcomes: list[Outcome] = []
    for part in (part for part in parts if device == "gpu" or part not in NOT_ON_CPU):
        outcomes.append(run_part(part, device, folder))
        print(outcomes[-1].line, flush=True)
        (folder / "first.json").write_text(json.dumps([asdict(outcome) for outcome in outcomes], indent=1))
    print("\n| part | seconds | what it showed |", "|---|---|---|", *(outcome.line for outcome in outcomes), sep="\n")
    return int(any(outcome.fault for outcome in outcomes))


def run_part(part: str, device: str, folder: Path) -> Outcome:
    """Runs a part in a process of its own, which is killed with all that
    it started when its time is up."""
    result, log = folder / f"{part}.json", folder / f"{part}.log"
    command = [sys.executable, "-m", "scripts.gpu_parts", part, device, str(folder)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path[1:]])}
    began = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=output, stderr=output, start_new_session=True
        )  # fmt: skip
        try:
            code = process.wait(timeout=PARTS[part])
            fault = (
                "" if code == 0 else f"{log.read_text(errors='replace')[-2000:].strip()}\nexit code {code}, see {log}"
            )
        except subprocess.TimeoutExpired:
            fault = f"not done after {PARTS[part]} s, see {log}"
        finally:
            kill(process)
    return Outcome(part, round(time.monotonic() - began, 1), {} if fault else json.loads(result.read_text()), fault)
