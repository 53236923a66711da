"""Proves that an engine serves the weights that it has loaded; its version label proves nothing.

Three conditions must hold. First, its logprobs of the probe are near the trainer's; those of a
wrong model differ by 1 or more. In bfloat16 this cannot detect one small step: engine and trainer
round differently by more than a step changes the logprobs, so the old policy is as near as the new
one. So where the files differ from those before, an engine that reloaded is also compared with
itself. Second, the checksum of the weights in its memory, if it has one, must have changed; third,
its logprobs must have changed as the trainer's have.
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
# the largest |engine - trainer| of the probe's logprobs: of the mean; with experts in bfloat16 of
# the median
TOLERANCE = {"float32": 1e-4, "bfloat16": 0.3}
# fields of a model's config.json
EXPERTS = re.compile(r"(moe_)?num(_local)?_experts|n_(routed_)?experts")
# The least ratio of an engine's change to its distance from the trainer's change (both mean
# |logprob|). It is 0 with old weights and 0.6 to 1.2 with new ones, measured in bfloat16 with steps
# from 1e-6 to 1e-4, where the distance to the trainer's new and old logprobs cannot tell them apart
MOVED_MIN = 0.1
# The distance from the trainer's change that rounding alone may cause: at a tiny learning rate (the
# first step of a warm-up, the last of a schedule) only some bits of the weights change, and the
# trainer's logprobs may change at one token, the engine's at none
UNSEEN = {"float32": 1e-6, "bfloat16": 1e-3}


@dataclass(frozen=True)
class ProbeAnswer:
    """The answers of an engine when it was proved. `scored`: its logprobs of the probe; `checksum`:
    of the weights in its memory, empty for an engine without checksums.
    """

    version: int
    probe: Probe
    scored: list[float]
    checksum: str


async def prove(client: EngineClient, weights: Weights, model: ModelConfig, before: ProbeAnswer | None) -> ProbeAnswer:
    """Proves that the engine serves `weights`, and returns its answers. EngineError when it does
    not.

    `before`: its previous answers since its start.
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
    """Describes the distance of an engine's logprobs from the trainer's if it is too large; empty
    otherwise.

    With experts, rounding decides between two of nearly equal weight, and changes the token's
    logprob by much, also with the right weights: in bfloat16 for many tokens, but not for most.
    Hence the median.
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
    """Describes the evidence that an engine still has the weights of `before`, though the files of
    the new ones differ; empty without evidence.

    With an adapter the trainer's logprobs are not compared: an engine has it merged into the base,
    where rounding may remove small changes.
    """
    # other files may have the same weights: the hub's, and those that the trainer saved after an
    # iteration without steps
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
    """True when the model in `folder` has experts."""
    config = json.loads((folder / "config.json").read_text())
    fields = {**config, **(config.get("text_config") or {})}
    return any(EXPERTS.fullmatch(name) and isinstance(value, int) and value > 1 for name, value in fields.items())
