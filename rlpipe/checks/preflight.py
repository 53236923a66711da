"""The preflight: reports all that can be known to be wrong before anything is written, and before a
model is loaded.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from rlpipe.base.errors import UserError
from rlpipe.base.hashing import sha256_of
from rlpipe.checks.content import Content, label
from rlpipe.config.extras import IMPORTS, opened
from rlpipe.config.pipeline import PipelineConfig
from rlpipe.data.read_sets import hand_over
from rlpipe.stages.sampling import check_carried
from rlpipe.store.backend import check_access, open_store
from rlpipe.store.opening import find_run
from rlpipe.store.progress import Progress
from rlpipe.store.run import Run

log = logging.getLogger(__name__)
_passed: set[str] = set()  # hashes of configs
Look = tuple[str, Callable[[], str]]  # a name for its faults, and the check


def preflight(config: PipelineConfig, fork: Run | None = None) -> None:
    """UserError when the run could not succeed: a line for each fault, naming field, file or row,
    and the fix. Committed artifacts are not checked again.

    `fork`: the run that is about to be forked (`planned_fork`). A run whose last iteration is a
    redo needs nothing but the store. Not checked is whether another process holds the run, which
    may change while one waits (`rlpipe.store.lease.check_free`).
    """
    store, last = open_store(config.store), config.rl.num_iterations - 1
    check_access(store)
    run = fork or (find_run(store, config) if config.run else None) or Run(store, config)
    redo = run.redoes(last)
    content = Content(config)
    findings = _examined(content, run, data=not redo)
    if findings.faults:
        raise UserError("\n".join(findings.faults))
    if fork is not None:
        check_carried(fork)
    if config.rl.rollouts_from and not redo and last >= 0:
        opened(IMPORTS["check"], f"rl.rollouts_from={config.rl.rollouts_from!r}")(run)
    for line in findings.warnings:
        log.warning("%s", line)
    hand_over(config, content.sets)
    _passed.add(sha256_of(config.model_dump(mode="json")))


def passed_just_now(config: PipelineConfig) -> bool:
    """True when a config passed in this process; True once only.

    The command line checks before its flow does.
    """
    digest = sha256_of(config.model_dump(mode="json"))
    passed = digest in _passed
    _passed.discard(digest)
    return passed


class Findings(NamedTuple):
    """Lines of text: what was read, settings that are hardly meant, and all faults."""

    lines: list[str]
    warnings: list[str]
    faults: list[str]


def look_at(content: Content, *more: Look) -> Findings:
    """The findings on all that a config names, for a plan; `more`: what it looks at last.

    Reads no store, leaves nothing running.
    """
    return _examined(content, None, more=more)


def _examined(content: Content, run: Run | None, *, data: bool = True, more: Sequence[Look] = ()) -> Findings:
    """Checks all that a config names, in order, also after a fault; for a `run`, what it still
    needs. `data`: True when data sets are needed.
    """
    config = content.config
    findings = Findings([], _warning_lines(config), [])
    rl = config.rl
    progress = None if run is None else Progress(run)
    has_base, has_sft = (progress is not None and progress.has_base), (progress is not None and progress.sft_complete)
    num_iterations = 0 if progress is None else progress.num_committed("rl", rl.num_iterations)
    is_complete = (
        has_sft and num_iterations == rl.num_iterations and (rl.num_iterations > 0 or _is_evaluated(config, run))
    )
    looks = [("model", content.model)] if config.model.path and not has_base else []
    if data and not is_complete:
        wanted = [data_set for data_set in config.data if not (data_set.use == "sft" and has_sft)]
        looks += [(label(data_set), partial(content.data_set, data_set)) for data_set in wanted]
    if data and config.sft.validated and not has_sft:
        looks.append(("validation", content.validation))
    if rl.num_iterations and not is_complete and (rl.environment or rl.agent):
        looks.append(("environment" if rl.environment else "agent", content.player))
    if data and not has_base:
        looks.append(("tokenizer", content.tokenizer))
    for stage in config.frozen_models if not is_complete else ():
        if progress is None or not progress.has_frozen(stage):
            looks.append((stage, partial(content.frozen, stage, run)))
    tried = not num_iterations  # rewards that have scored an iteration need no trial
    if not is_complete:
        looks += [("rewards", partial(content.rewards, uses, tried)) for uses in _scored(config)]
    if rl.num_iterations and not is_complete:
        looks.append(("filters", partial(content.filters, tried)))
    if config.evaluation.gate_against:
        looks.append(("gate", partial(content.gate, run)))
    looks += [("machine", content.trainer), ("machine", content.engines)] if not is_complete else []
    for name, look in [*looks, *more]:
        try:
            findings.lines.extend(filter(None, [look()]))
        except (UserError, OSError) as error:
            fault = f"{name}: {error}" if isinstance(error, OSError) else str(error)
            # a plan may be made where nothing of it will run
            into = findings.warnings if name == "machine" and run is None else findings.faults
            into.extend([fault] if fault not in into else [])
    findings.warnings.extend([*content.doubts, *content.leaks()])
    return findings


def _is_evaluated(config: PipelineConfig, run: Run | None) -> bool:
    """True when a run without RL has no evaluation left to do."""
    return not config.sets("evaluation") or (
        run is not None and run.artifact(*run.policy_place(0), "evaluation") is not None
    )


def _scored(config: PipelineConfig) -> list[list[str]]:
    """The uses whose rollouts are scored; uses with the same rewards are in one list."""
    uses = (["rl"] if config.rl.num_iterations else []) + (["evaluation"] if config.sets("evaluation") else [])
    uses = [use for use in uses if config.rewards(use)]
    return [[use] for use in uses] if config.evaluation.rewards else [uses] if uses else []


def _warning_lines(config: PipelineConfig) -> list[str]:
    """Warnings about settings that are allowed but hardly meant."""
    samples_rewards = config.rl.num_iterations and not config.rl.rollouts_from
    if config.model.path or config.sft.num_steps or not samples_rewards:
        return []
    return [
        "RL of a new model without SFT: random weights write noise, no rollout gets a reward, and there is nothing to"
        " learn from; set sft.num_steps and give SFT data, or name a trained model as model.path"
    ]
