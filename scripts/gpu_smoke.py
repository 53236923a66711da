"""The first run on a machine with GPUs: SFT and RL of a small model, killed in the middle, resumed,
verified, and measured.

usage: .venv/bin/python scripts/gpu_smoke.py --first [PART ...] [--device cpu]
           the first ten minutes: scripts/gpu_first.py
       .venv/bin/python scripts/gpu_smoke.py [--gpus 1 2] [--engines-python VENV/bin/python]
           [--preset smollm2|tiny] [--device cpu]

On every number of GPUs, trainer and engines share them (`engines.place = "elsewhere"`, a host that
this script starts). `--device cpu` does the same with so many ranks and engines on this processor.
Prints a table to paste. See docs/gpu.md.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from rlpipe.store.backend import open_store
from rlpipe.store.opening import open_existing
from rlpipe.store.run import Run
from scripts.gpu_commands import DEADLINE_S, Commands, kill
from scripts.gpu_first import PARTS, first

ITERATIONS = 4
SMALL = [
    "sft.num_steps=8", "sft.segment_steps=4", "sft.decay_steps=8", "sft.warmup_steps=2",
    f"rl.num_iterations={ITERATIONS}", "rl.num_steps=2",
    "rl.warmup_steps=2", "rl.filters={}", "evaluation.every=0", "evaluation.prompts_max=16", "checkpoint.state_every=2",
    "tracking.uri=",
    "trainer.threads=1", "engines.threads=1", "engines.place=elsewhere",
]  # fmt: skip
OF_DEVICE = {
    "cpu": ["sft.batch_size=8", "rl.num_prompts=4", "rl.group_size=4", "rl.shard_prompts=4", "trainer.tokens_max=512"],
    "gpu": [
        "sft.batch_size=64", "rl.num_prompts=64", "rl.group_size=8", "rl.shard_prompts=16", "trainer.tokens_max=16384",
        "model.dtype=bfloat16", "trainer.activation_checkpointing=true",
    ],
}  # fmt: skip
COLUMNS = (
    "GPUs", "mismatch (mean / worst)", "train tokens/s, SFT", "train tokens/s, RL", "rollout tokens/s", "MFU, SFT",
    "peak memory a rank, GiB",
    "killed after", "resumed in s", "verify",
)  # fmt: skip


@dataclass(frozen=True)
class Smoke:
    """What was asked for."""

    preset: str
    device: str
    engines_python: str
    folder: Path

    def sets(self, count: int) -> list[str]:
        """What differs from the preset with so many devices."""
        sets = [
            f"trainer.ranks={count}",
            f"engines.count={count}",
            *SMALL,
            *OF_DEVICE[self.device],
            f"store={self.folder}/store",
        ]
        if self.device == "gpu":
            ids = json.dumps(list(range(count)))
            sets += [f"trainer.gpu_ids={ids}", f"engines.gpu_ids={ids}"]
        if self.engines_python:  # they leave the trainer its half
            sets += ["engines.kind=sglang", f"engines.python={self.engines_python}"]
            sets += ['engines.flags=["--mem-fraction-static", "0.4"]'] if self.device == "gpu" else []
        return sets

    def row(self, count: int) -> dict[str, str]:
        """Runs with so many devices; what the table says of it."""
        run, rlpipe = f"smoke-{self.device}-{count}", Commands(self.folder)
        arguments = [
            "run",
            self.preset,
            "--run",
            run,
            *[part for entry in self.sets(count) for part in ("--set", entry)],
        ]
        with rlpipe.running("host", "--run", run, "--store", rlpipe.store):
            with rlpipe.running(*arguments) as flow:
                rlpipe.until_committed(flow, f"runs/{run}/rl/00001/iteration.json")
                kill(flow)
            resumed_s = rlpipe.complete(*arguments)
        with rlpipe.running("verify", run, "--store", rlpipe.store) as verify:
            verified = "0 faults" if verify.wait(timeout=DEADLINE_S) == 0 else "FAULTS"
        return self._measured(open_existing(open_store(rlpipe.store), run), count) | {
            "killed after": "iteration 1", "resumed in s": f"{resumed_s:.0f}", "verify": verified
        }  # fmt: skip

    def _measured(self, run: Run, count: int) -> dict[str, str]:
        records = [record for index in range(ITERATIONS) if (record := run.iteration(index)) is not None]
        mismatches = [record.metrics["train/mismatch_abs_mean"] for record in records]
        rollout = [record.metrics.get("throughput/rollout_tokens_per_s", 0.0) for record in records]
        sft = [run.committed("sft", segment, "policy")[1].metrics for segment in range(run.config.sft.num_segments)]
        rl = [run.policy(version)[1].metrics for version in range(1, len(records) + 1)]
        sft_per_s, rl_per_s = (
            sum(part["train/num_tokens_processed"] for part in parts) / sum(part["train_s"] for part in parts)
            for parts in (sft, rl)
        )
        mfu = [part["train/mfu"] for part in sft if "train/mfu" in part]
        return {
            "GPUs": f"{count}" if self.device == "gpu" else f"{count} (CPU)",
            "mismatch (mean / worst)": f"{sum(mismatches) / len(mismatches):.2g} / {max(mismatches):.2g}",
            "train tokens/s, SFT": f"{sft_per_s:.0f}",
            "train tokens/s, RL": f"{rl_per_s:.0f}",
            "rollout tokens/s": f"{max(rollout):.0f}",
            "MFU, SFT": f"{max(mfu):.1%}" if mfu else "-",
            "peak memory a rank, GiB": f"{max(part['train/peak_memory_gib'] for part in [*sft, *rl]):.2f}",
        }


def gpus_here() -> list[str]:
    """The names of this machine's GPUs."""
    import torch

    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]


def main() -> None:
    """Exits with 1 when something failed, with 2 when what is asked for is not there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["gpu", "cpu"], default="gpu")
    parser.add_argument("--gpus", type=int, nargs="+", help="numbers of GPUs to try; with --device cpu of ranks")
    parser.add_argument(
        "--preset", choices=["smollm2", "tiny"], default="smollm2", help="smollm2 needs `make smollm2` first"
    )
    parser.add_argument(
        "--engines-python", default="", help="of a virtual environment with SGLang; without it the local engine samples"
    )
    parser.add_argument("--folder", type=Path, help="for store and logs; a new one without it")
    parser.add_argument(
        "--first",
        nargs="*",
        metavar="PART",
        help=f"one GPU, no download, no SGLang: {', '.join(PARTS)}; all without a name",
    )
    asked = parser.parse_args()
    if unknown := sorted({*(asked.first or [])} - {*PARTS}):
        print(f"gpu_smoke: --first {unknown[0]}: the parts are {', '.join(PARTS)}", file=sys.stderr)
        raise SystemExit(2)
    names = gpus_here() if asked.device == "gpu" else []
    counts = asked.gpus or [count for count in (1, 2) if asked.device == "cpu" or count <= max(len(names), 1)]
    if min(counts) < 1 or (asked.device == "gpu" and max(counts) > len(names)):
        print(
            f"gpu_smoke: --gpus {max(counts)}: this machine has {len(names)} GPUs that torch sees; "
            "ask for fewer, or for --device cpu",
            file=sys.stderr,
        )
        raise SystemExit(2)
    folder = (asked.folder or Path(tempfile.mkdtemp(prefix="gpu-smoke-"))).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    if asked.first is not None:
        raise SystemExit(first(asked.first or [*PARTS], asked.device, folder))
    smoke = Smoke(asked.preset, asked.device, asked.engines_python, folder)
    print(
        f"{names[0] if names else 'CPU'}, preset {smoke.preset}, engines: "
        f"{'SGLang' if smoke.engines_python else 'local'}; store and logs: {folder}",
        flush=True,
    )
    rows = [smoke.row(count) for count in counts]
    print("| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS), sep="\n")
    for row in rows:
        print("| " + " | ".join(row[column] for column in COLUMNS) + " |")
    raise SystemExit(any(row["verify"] != "0 faults" for row in rows))


if __name__ == "__main__":
    main()
