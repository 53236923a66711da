"""Proves that an engine serves the weights that it was given: a label that says so proves nothing.

Three things have to hold. Its answer to the probe is near the trainer's: a wrong model is off by 1
or more. In bfloat16 that tells nothing of one small step, as engine and trainer round differently
by more than a step moves the answer, and the old policy's answer is as near as the new one's. So an
engine that reloaded is held against itself, where the files differ from those before: the checksum
of the weights in its memory, where it has one, is another one than before; and its answer moved as
the trainer's did, not as that of an engine that did not move at all.
"""

from __future__ import annotations

import json
import logging
import math
import re
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median

from rlpipe.base.errors import EngineError
from rlpipe.config.model import ModelConfig
from rlpipe.engines.client import EngineClient
from rlpipe.engines.weights import Probe, Weights

log = logging.getLogger(__name__)
# |engine - trainer| of the probe's logprobs: the mean; where there are
# experts, in bfloat16, the median
TOLERANCE = {"float32": 1e-4, "bfloat16": 0.3}
EXPERTS = re.compile(r"(moe_)?num(_local)?_experts|n_(routed_)?experts")  # of a model's config.json
# Least part of what it misses the trainer's move by that an engine's answer moves by. With old
# weights it moves by nothing, with new ones by 0.6 to 1.2 of it: seen of steps from 1e-6 to 1e-4 in
# bfloat16, where nearness to the trainer's new or old answer was a toss of a coin
MOVED_MIN = 0.1
# What it misses that by, on average, where rounding alone may be why: behind a tiny learning rate
# (a warm-up's first step, a schedule's last) some bits of the weights change, and the trainer's
# answer moves at one token where an engine's moves at none
UNSEEN = {"float32": 1e-6, "bfloat16": 1e-3}


@dataclass(frozen=True)
class ProbeAnswer:
    """The answer of an engine when it was proved. `scored`: logprobs of the probe; `checksum`: of
    the weights in its memory, empty where it has none."""

    version: int
    probe: Probe
    scored: list[float]
    checksum: str


async def prove(client: EngineClient, weights: Weights, model: ModelConfig, before: ProbeAnswer | None) -> ProbeAnswer:
    """The engine's answer, which proves that it serves `weights`; EngineError where it does not.

    `before`: what it answered last, since it was started.
    """
    if (reported := await client.weight_version()) != weights.version:
        raise EngineError(f"{client.name} reports weight version {reported}, not {weights.version}")
    scored = await client.score(weights.probe.tokens, len(weights.probe.logprobs))
    answer = ProbeAnswer(weights.version, weights.probe, scored, await client.checksum())
    fault = off(answer, model.dtype, has_experts(weights.folder))
    if not fault and before is not None and before.version == weights.differs_from:
        fault = stale(answer, before, model)
    if fault:
        raise EngineError(f"{client.name} says that it serves weight version {weights.version}, but {fault}")
    return answer


def off(answer: ProbeAnswer, dtype: str, experts: bool) -> str:
    """Says how far an engine's logprobs are from the trainer's, where that is too far; empty
    otherwise.

    Where two experts are nearly as good as each other, rounding decides which one a token goes to,
    and that token's logprob is off by much: with right weights too, in bfloat16 for many tokens,
    but not for most.
    """
    distances = [
        abs(logprob - expected) for logprob, expected in zip(answer.scored, answer.probe.logprobs, strict=True)
    ]
    of_most = experts and dtype == "bfloat16"
    distance, tolerance = (median if of_most else fmean)(distances), TOLERANCE[dtype]
    if math.isfinite(fmean(distances)) and distance <= tolerance:
        return ""
    name = "the median of them" if of_most else "on average"
    return f"its logprobs of the probe are {distance:.3g} away from the trainer's, {name} (at most {tolerance:g})"


def stale(answer: ProbeAnswer, before: ProbeAnswer, model: ModelConfig) -> str:
    """Why an engine must have the weights that it had `before`, though their files differ from the
    new ones; empty where it need not.

    The trainer's answer of an adapter is not asked: an engine has it merged, and rounds away what
    is too small for the weights.
    """
    # other files with the same weights: those of the hub, and what the trainer
    # saved when it left all steps out
    if answer.probe == before.probe:
        return ""
    if answer.checksum and answer.checksum == before.checksum:
        return f"its weights have the checksum of version {before.version}: it did not load"
    if model.adapter != "none" or answer.probe.tokens != before.probe.tokens:
        return ""
    moved = [new - old for new, old in zip(answer.scored, before.scored, strict=True)]
    wanted = [new - old for new, old in zip(answer.probe.logprobs, before.probe.logprobs, strict=True)]
    by, missed = fmean(map(abs, moved)), fmean(abs(step - want) for step, want in zip(moved, wanted, strict=True))
    if missed > UNSEEN[model.dtype] and by < MOVED_MIN * missed:
        return (
            f"its logprobs of the probe moved by {by:.3g} since version {before.version}, those of the trainer by "
            f"{fmean(map(abs, wanted)):.3g}: it has the old weights"
        )
    return ""


def has_experts(folder: Path) -> bool:
    """True when the layers of the model in `folder` choose among experts."""
    config = json.loads((folder / "config.json").read_text())
    fields = {**config, **(config.get("text_config") or {})}
    return any(EXPERTS.fullmatch(name) and isinstance(value, int) and value > 1 for name, value in fields.items())
