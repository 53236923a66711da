"""The output of a run on the terminal: a bar, a line per segment or iteration, and warnings and
errors. The log folder has all of it.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from prefect.logging import get_run_logger
from prefect.runtime import deployment
from tqdm import tqdm

from flows.printing import echo_above
from rlpipe.base.manifests import IterationRecord
from rlpipe.base.values import Metrics
from rlpipe.report.curves import with_errors

LOG_NAME = "flows.log"
# Prefect logs these for the failed task and for every flow around it; the last line of `rlpipe run`
# says it once, with the advice
SAID_AT_THE_END = ("Encountered exception during execution", "Finished in state", "Crash detected!")


_run: ContextVar[str] = ContextVar("run", default="")  # empty where there is one at a time


@contextlib.contextmanager
def named_lines(run: str) -> Iterator[None]:
    """Puts the name of a run before each line and bar of the body."""
    token = _run.set(f"{run}: " if run else "")
    try:
        yield
    finally:
        _run.reset(token)


class OneLine(logging.Formatter):
    """Level and message, without the traceback."""

    def format(self, record: logging.LogRecord) -> str:
        return f"{record.levelname} {record.getMessage()}".rstrip()


def _is_shown(record: logging.LogRecord) -> bool:
    return not (record.name.startswith("prefect.") and record.getMessage().startswith(SAID_AT_THE_END))


def log_to(folder: Path) -> None:
    """Sends further log lines to the terminal, without tracebacks, and with them to `flows.log` in
    the folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    terminal, file = logging.StreamHandler(sys.stderr), logging.FileHandler(folder / LOG_NAME, delay=True)
    terminal.setFormatter(OneLine())
    terminal.addFilter(_is_shown)
    terminal.setLevel(logging.WARNING)  # flow runs log more than that, for the UI
    file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[terminal, file], force=True)


def bar(title: str, total: int, done: int, unit: str) -> tqdm[Any]:
    """A progress bar on stderr; without a terminal, only the lines are written."""
    # disable=None: only where stderr is no terminal
    title = _run.get() + title
    return tqdm(total=total, initial=done, desc=title, unit=unit, disable=None, leave=False, dynamic_ncols=True)


def say(line: str) -> None:
    """Prints a line above the bars, and logs it in the flow run; on a worker's terminal it comes
    from the log.
    """
    if not of_deployment():
        echo_above(f"{_run.get()}{line}")
    get_run_logger().info(line)


@functools.cache
def of_deployment() -> bool:
    """True when this process runs a deployment's flow run, the only flow run of such a process. The
    result is cached: without a deployment, Prefect asks its server every time. The outermost flow
    asks first; its row exists on the server by then.
    """
    return bool(deployment.id)


def segment_line(segment: int, step: int, metrics: Metrics) -> str:
    line = (
        f"SFT segment {segment:3d}  step {step:5d}  loss {metrics['train/loss']:.4f}  grad norm"
        f" {metrics['train/grad_norm']:.3f}"
    )
    validation = metrics.get("train/validation_loss")
    return line if validation is None else f"{line}  validation loss {validation:.4f}"


def iteration_line(record: IterationRecord) -> str:
    """One line on an iteration for a person who watches the run."""
    metrics = record.metrics
    line = (
        f"RL iteration {record.iteration:3d}  reward {metrics['rollout/reward_mean']:.3f}  pass"
        f" {metrics['rollout/pass_rate']:.3f}  groups {metrics['rollout/groups_kept']:3d}  length"
        f" {metrics['rollout/length_tokens_mean']:5.1f}  mismatch {metrics['train/mismatch_abs_mean']:.1e} "
        f" {metrics['time/iteration_s']:.1f} s"
    )
    if "train/teacher_kl" in metrics:
        line += f"  teacher KL {metrics['train/teacher_kl']:.4f}"
    if not metrics["train/num_tokens"]:
        line += f"  nothing was trained{_dropped(metrics)}"
    shown = with_errors(record.evaluation)
    evaluation = "  ".join(f"{name} {shown[name]}" for name in shown if name.endswith(("_greedy", "_pass_at_1")))
    return f"{line}  | {evaluation}" if evaluation else line


def _dropped(metrics: Metrics) -> str:
    """The reasons why groups were dropped, with counts. Example: (low_reward 4, zero_std_0.0 2)."""
    prefix = "rollout/groups_dropped_"
    reasons = {name.removeprefix(prefix): count for name, count in metrics.items() if name.startswith(prefix) and count}
    return f" ({', '.join(f'{reason} {count}' for reason, count in reasons.items())})" if reasons else ""
