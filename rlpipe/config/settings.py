"""The settings of an artifact: the values of the config fields that affect its kind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

from rlpipe.base.values import JsonDict
from rlpipe.config.faults import LEFT_OUT
from rlpipe.config.pipeline import RETIRED, RETIRED_MARKS, PipelineConfig, marks, stored_tree

PHASES = {"model": "base", "sft": "sft", "rl": "rl"}  # by section, the phase whose policies it affects
# by kind, the use of the data sets that it is made from
USES = {
    "data": "sft", "selection": "sft", "prompts": "rl", "imported": "rl", "teacher_logprobs": "rl",
    "evaluation": "evaluation",
}  # fmt: skip
OF_ONE_KIND = {name for section, name, _ in marks(str) if section == "data" and name}  # fields of data sets


class Effect(NamedTuple):
    """A field that affects artifacts of a kind. Without a name: the whole section."""

    section: str
    name: str
    kind: str
    condition: str  # empty: always


CONDITIONS: dict[str, Callable[[PipelineConfig, Effect], bool]] = {
    "over-sampled": lambda config, _: config.rl.oversampling > 1,
    "validated": lambda config, _: config.sft.validated,
    "dropping": lambda config, effect: config.drops(USES[effect.kind]),  # rows that are too long
    "curriculum": lambda config, _: config.rl.curriculum != "none",
    "left out": lambda config, _: LEFT_OUT in config.rl.faults.values(),
    "agent": lambda config, _: bool(config.rl.agent),
    "branches": lambda config, _: config.rl.branches == "all",
    "not 1": lambda config, _: config.evaluation.temperature != 1.0,  # as older runs had
    # a field of [evaluation] that is given, and the one of [rl] that is used where none is
    "own": lambda config, effect: getattr(config.evaluation, effect.name) not in (None, {}),
    "shared": lambda config, effect: getattr(config.evaluation, effect.name) in (None, {}),
}


@cache
def effects(phase: str, kind: str) -> list[Effect]:
    """The fields that affect artifacts of a kind; the phase matters for policies."""
    retired = [(section, name, mark) for section in RETIRED for name, mark in RETIRED_MARKS if name in RETIRED[section]]
    known = [Effect(*field, *mark.partition(" if ")[::2]) for *field, mark in [*marks(str), *retired]]
    known += [effect._replace(name="reward_fallback") for effect in known if effect.name == "faults"]  # in older runs
    return [effect for effect in known if effect.kind == kind and (kind != "policy" or PHASES[effect.section] == phase)]


def artifact_settings(
    config: PipelineConfig, phase: str, kind: str, judged_by: Sequence[PipelineConfig] | None = None
) -> JsonDict:
    """Returns the settings of an artifact, flat.

    Example: {"seed": 0, "rl.num_prompts": 64, ...}.

    `judged_by`: the configs of which one has to meet the condition of a field; None: this config.
    """
    tree, judges = stored_tree(config), [config] if judged_by is None else judged_by
    settings: JsonDict = {"seed": config.seed}
    for effect in effects(phase, kind):
        section, name, _, condition = effect
        if not condition or any(CONDITIONS[condition](judge, effect) for judge in judges):
            sets = [data for data in tree["data"] if data["use"] == USES.get(kind)]
            if section == "data" and name:
                settings |= {f"data.{data['name']}.{name}": data[name] for data in sets if name in data}
            elif section == "data":
                settings["data"] = [{key: data[key] for key in data if key not in OF_ONE_KIND} for data in sets]
            else:  # a stored config may lack a field
                settings |= {f"{section}.{key}": value for key, value in tree[section].items() if name in ("", key)}
    return settings
