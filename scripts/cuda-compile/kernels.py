"""The kernels of rlpipe/models/flex.py and rlpipe/algorithms/fused_scores.py as a card would get
them, made where there is none: `make test-cuda-compile`.

A process for each card; it prints a table of shared memory, and ends with 1 where a kernel is not
made, or one does not fit that should.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
import warnings
from collections.abc import Iterator
from typing import Any

from played import CARDS, Kernel, on_the_card, play  # before torch

import torch  # isort: skip
from torch import Tensor
from torch._inductor.utils import fresh_cache

from rlpipe.algorithms import fused_scores
from rlpipe.models import flex

HEAD_DIMS = (64, 128, 256)
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
HEADS, GROUPS = 8, 2
TOO_LARGE = {
    (card, *form) for card in ("sm_89", "sm_120") for form in (("bf16", 256), ("fp32", 128), ("fp32", 256))
}  # docs/gpu.md
SINKS = torch.zeros(HEADS)
LOGITS = (300, 151_936)  # positions and vocabulary


@dataclasses.dataclass(frozen=True)
class Case:
    """A layer of attention, forward and backward, over rows of that many tokens."""

    head_dim: int
    dtype: str
    shape: tuple[int, int] = (1, 1300)  # rows and tokens of a row
    groups: int = GROUPS
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    new: bool = True  # kernels of its own; the others are those of a case before it

    def __str__(self) -> str:
        said = [f"{self.dtype} D={self.head_dim}", f"{self.shape[0]} x {self.shape[1]} tokens"]
        said += ["GQA"] if self.groups < HEADS else []
        said += [f"window {self.window}"] if self.window else []
        said += [f"capped at {self.softcap:g}"] if self.softcap else []
        return ", ".join(said + (["sinks"] if self.sinks else []))


def cases(head_dims: tuple[int, ...], dtypes: tuple[str, ...]) -> Iterator[Case]:
    """Each head_dim and dtype, then what makes kernels of its own, and what makes none."""
    for dtype in dtypes:
        for head_dim in head_dims:
            yield Case(head_dim, dtype)
            if dtype == dtypes[0]:
                yield Case(head_dim, dtype, softcap=50.0)
    first = Case(head_dims[0], dtypes[0])
    yield dataclasses.replace(first, shape=(1, 3000), window=200, sinks=True, new=False)
    yield dataclasses.replace(first, shape=(3, 500))
    yield dataclasses.replace(first, shape=(1, 100))
    yield dataclasses.replace(first, groups=HEADS)


def attend(case: Case) -> None:
    """Both passes of the layer, by the functions that the trainer calls."""
    rows, length = case.shape
    heads = (HEADS, case.groups, case.groups)
    query, key, value = (
        torch.zeros(rows, number, length, case.head_dim, dtype=DTYPES[case.dtype], requires_grad=True)
        for number in heads
    )
    positions_RL = (torch.arange(length) % 700)[None].repeat(rows, 1)
    text_RL = flex.texts_of(positions_RL)
    first_RL = (positions_RL - (case.window or length) + 1).clamp(min=0)
    mask = flex.block_mask(text_RL, text_RL, positions_RL, first_RL)
    sinks: Tensor | None = SINKS.to(DTYPES[case.dtype]) if case.sinks else None
    with on_the_card():
        out, _ = flex.attend(
            torch.nn.Module(), query, key, value, mask, scaling=case.head_dim**-0.5, softcap=case.softcap, s_aux=sinks
        )
        out.sum().backward()


def score() -> None:
    """Logprobs and entropies of logits, and the slopes of both kinds."""
    logits, targets, of_each = (
        torch.zeros(LOGITS, dtype=torch.bfloat16),
        torch.zeros(LOGITS[0], dtype=torch.int64),
        torch.zeros(LOGITS[0]),
    )
    with on_the_card(), torch.no_grad():
        fused_scores.compiled(fused_scores.scores)(logits, targets, 0.7)
        fused_scores.compiled(fused_scores.logprob_slopes)(logits, targets, of_each, of_each, 0.7)
        fused_scores.compiled(fused_scores.entropy_slopes)(logits, targets, *[of_each] * 4, 0.7)


def of_card(name: str, chosen: list[Case]) -> int:
    """Prints a line of JSON a kernel, how many faults to the end."""
    warnings.simplefilter("error")  # as pytest has them
    for message in ("`torch.jit.script_method` is", "The .grad attribute of a Tensor that is not a leaf"):
        warnings.filterwarnings("ignore", message)
    torch.use_deterministic_algorithms(True)  # as the trainer
    made, limit, faults = play(CARDS[name]), CARDS[name].shared_max, 0
    # what `attend` takes for tensors of a CPU
    flex.flex_attention = flex.compiled()  # pyright: ignore[reportAttributeAccessIssue]
    for case in chosen:
        made.clear()
        with fresh_cache():
            attend(case)
        if bool(made) != case.new:
            faults += 1
            print(
                f"{name}: {case}: {len(made)} kernels were made, not {'some' if case.new else 'none'}", file=sys.stderr
            )
        for kernel in made:
            print(
                json.dumps({"card": name, "case": dataclasses.asdict(case), "kernel": dataclasses.asdict(kernel)}),
                flush=True,
            )
            print(f"{name}: {case}: {line(kernel, limit)}", file=sys.stderr)
        if any(kernel.shared > limit for kernel in made) != (
            case.new and (name, case.dtype, case.head_dim) in TOO_LARGE
        ):
            faults += 1
            print(f"{name}: {case}: that is not what TOO_LARGE and docs/gpu.md say", file=sys.stderr)
    made.clear()
    with fresh_cache():
        score()
    for kernel in made:
        print(f"{name}: logits of {LOGITS[0]} x {LOGITS[1]}: {line(kernel, limit)}", file=sys.stderr)
    return faults + (not made or any(kernel.shared > limit for kernel in made))


def line(kernel: Kernel, limit: int) -> str:
    said = f"{kernel.name}: {kernel.shared} of {limit} bytes shared, {kernel.warps} warps, {kernel.registers} registers"
    said += f", {kernel.spilled} bytes spilled" if kernel.spilled else ""
    return said + (", DOES NOT FIT" if kernel.shared > limit else "")


def table(made: list[dict[str, Any]]) -> str:
    """Of each card, dtype and head_dim the most shared memory of a forward and of a backward
    kernel, in KiB, bold where it does not fit."""
    columns = sorted({(one["case"]["dtype"], one["case"]["head_dim"]) for one in made})
    lines = ["| card | has | " + " | ".join(f"{dtype}, {head_dim}" for dtype, head_dim in columns) + " |"]
    lines.append("|---" * (len(columns) + 2) + "|")
    for name in dict.fromkeys(one["card"] for one in made):
        card, cells = CARDS[name], list[str]()
        for column in columns:
            most = [0, 0]
            for one in made:
                if one["card"] == name and (one["case"]["dtype"], one["case"]["head_dim"]) == column:
                    backward = "backward" in one["kernel"]["name"]
                    most[backward] = max(most[backward], one["kernel"]["shared"])
            cells.append(
                " / ".join(
                    f"**{size / 1024:.0f}**" if size > card.shared_max else f"{size / 1024:.0f}" for size in most
                )
            )
        lines.append(f"| {name} ({card.example}) | {card.shared_max >> 10} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cards", nargs="*", default=list(CARDS), choices=CARDS)
    parser.add_argument("--head-dims", nargs="*", type=int, default=HEAD_DIMS)
    parser.add_argument("--dtypes", nargs="*", default=list(DTYPES), choices=DTYPES)
    parser.add_argument("--inside", action="store_true", help="this process has the card")
    given = parser.parse_args()
    if given.inside:
        return of_card(given.cards[0], list(cases(tuple(given.head_dims), tuple(given.dtypes))))
    made: list[dict[str, Any]] = []
    faults = 0
    for card in given.cards:
        rest = ["--head-dims", *map(str, given.head_dims), "--dtypes", *given.dtypes]
        done = subprocess.run(
            [sys.executable, __file__, "--inside", "--cards", card, *rest],
            stdout=subprocess.PIPE,
            text=True,
            check=False,
        )
        made += map(json.loads, done.stdout.splitlines())
        faults += done.returncode
    print(table(made))
    return min(faults, 1)


if __name__ == "__main__":
    sys.exit(main())
