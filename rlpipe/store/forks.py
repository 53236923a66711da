"""The differences of two configs, and the points at which a run can be forked.

The points depend on what the run has committed.
"""

from __future__ import annotations

import re
import shlex

from rlpipe.base.errors import UserError
from rlpipe.config.pipeline import PipelineConfig, identity
from rlpipe.config.sections import DataConfig
from rlpipe.store.progress import Progress
from rlpipe.store.run import AT_SFT, Run

CHANGEABLE = re.compile(r"(rl|evaluation)\.|data\.\w+ \(\w+\)\.teacher:")  # in a fork


def differences(new: PipelineConfig, old: PipelineConfig) -> list[str]:
    """The fields in which two configs compute differently, one text a field.

    Example: "rl.clip_high: 0.28 -> 0.4".
    """
    after, before = identity(new), identity(old)
    data = _data_differences(new.data, old.data)
    return data + [
        f"{name}: {before[name]!r} -> {after[name]!r}"
        for name in after
        if name != "data" and after[name] != before[name]
    ]


def fixed_differences(new: PipelineConfig, old: PipelineConfig, at: int) -> list[str]:
    """The differences that a fork at iteration `at` must not have.

    The fork shares results that were computed with the old settings. Before the first iteration
    (`at` is AT_SFT) no prompt of RL was drawn: the data of RL and of evaluations may change.
    """
    if at == AT_SFT:
        new, old = (config.model_copy(update={"data": config.sets("sft")}) for config in (new, old))
    return [line for line in differences(new, old) if not CHANGEABLE.match(line)]


def _data_differences(new: list[DataConfig], old: list[DataConfig]) -> list[str]:
    """The differences field by field where the sets have the same names, in the same order; else
    the names.
    """
    names_after, names_before = ([f"{data.name} ({data.use})" for data in sets] for sets in (new, old))
    if names_after != names_before:
        return [f"data: {', '.join(names_before) or 'none'} -> {', '.join(names_after) or 'none'}"]
    return [
        f"data.{label}.{name}: {getattr(before, name)!r:.80} -> {value!r:.80}"
        for label, after, before in zip(names_after, new, old, strict=True)
        for name, value in after
        if value != getattr(before, name)
    ]


def forked_from(run: Run) -> str:
    """Text on what a fork shares. Examples: `a at 5`, `a at sft`, `a at 4, redoes train of 5`."""
    assert run.parent is not None, "only of a fork"
    at = "sft" if run.fork_at < 0 else run.fork_at
    return f"{run.parent.name} at {at}" + (f", redoes {run.redo} of {run.fork_at + 1}" if run.redo else "")


def way_to_resume(config: PipelineConfig) -> str:
    """The command that continues a run from what is stored."""
    return f"rlpipe resume {config.run}{_store_option(config)}"


def _store_option(config: PipelineConfig) -> str:
    """The option with which a command names the store; empty for the default store."""
    default = PipelineConfig.model_fields["store"].default
    return "" if config.store == default else f" --store {shlex.quote(config.store)}"


def way_to_change(run: Run, config: PipelineConfig | None = None) -> str:
    """Text for a person: how to continue from a run's results with other settings, by a fork or a
    new run.

    `config`: the settings that are wanted; None: any.
    """
    count = Progress(run).num_iterations
    points = ([count - 1] if count else []) + ([AT_SFT] if Progress(run).starts_rl else [])
    at = next((point for point in points if config is None or not fixed_differences(config, run.config, point)), None)
    if at is not None:
        kept, changed = (
            ("its SFT", ", evaluation.* or their data") if at == AT_SFT else ("all it has", " or evaluation.*")
        )
        name = "sft" if at == AT_SFT else at
        return (
            f"keep {kept} and change rl.*{changed} in a fork: rlpipe fork {run.name} --at {name} --run"
            f" NEW{_store_option(config or run.config)} --set ..."
        )
    if points:
        return "start a run of another name (--run): no fork can change them"
    return f"start a run of another name (--run): {run.name} has nothing to fork from before its SFT is complete"


def check_committed(run: Run, at: int, redo: str = "") -> None:
    """UserError when there is no iteration `at` to fork at; for AT_SFT, when SFT is not
    complete.
    """
    get_there = f"let `rlpipe run ... --run {run.name}` get there first"
    if at == AT_SFT:
        if redo:
            raise UserError(f"--at sft --redo {redo}: what is redone is an iteration; name it by its number")
        if not Progress(run).starts_rl:
            raise UserError(f"--at sft: the SFT of run {run.name} is not complete; {get_there}")
        return
    assert at >= 0, at
    count = Progress(run).num_iterations
    if at < count:
        return
    has = f"iterations 0 to {count - 1}" if count else "none"
    ways = [f"choose K from 0 to {count - 1}"] if count else []
    ways += ["share its SFT only: --at sft"] if Progress(run).starts_rl and not redo else []
    raise UserError(
        f"--at {at}: iteration {at} of run {run.name} is not committed (committed: {has});"
        f" {', or '.join([*ways, get_there])}"
    )
