"""The settings of an artifact: the values of the config fields that affect its kind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

from rlpipe.base.values import JsonDict
from rlpipe.config.pipeline import RETIRED, RETIRED_MARKS, PipelineConfig, marks, stored_tree

PHASES = {"model": "base", "sft": "sft", "rl": "rl"}  # by section, the phase whose policies it affects
# by kind, the use of the data sets that it is made from
USES = {"data": "sft", "selection": "sft", "prompts": "rl", "imported": "rl", "evaluation": "evaluation"}

# by kind, the fields that come last in a manifest, in the order of older code; the others are in
# that of the config, and so is every new one: the hash of the settings does not depend on the order
LAST = {
    "data": "context_tokens_max validation_fraction",
    "selection": "context_tokens_max validation_fraction patience num_steps segment_steps",
    "policy": "beta1 num_steps batch_size segment_steps objective proximal clip_low clip_high dual_clip aggregation kl"
    " kl_coef kl_estimator estimator gamma entropy_coef importance importance_low importance_high temperature"
    " completion_tokens_max",
    "prompts": "context_tokens_max completion_tokens_max",
    "imported": "group_size data",
    "rollouts": "temperature shard_prompts oversampling train_stale_tokens rollouts_from completion_tokens_max top_p"
    " top_k environment environment_args turns_max agent branches num_prompts groups_min rewards reward_args"
    " reward_fallback filters mask_truncated",
    "batch": "estimator gamma groups_min rounds_max on_too_few staleness_max mask_truncated curriculum pass_threshold"
    " reward_fallback branches",
    "evaluation": "rl.rewards reward_args reward_fallback rl.completion_tokens_max rl.top_p top_k environment"
    " environment_args turns_max agent completion_tokens_max top_p rewards temperature context_tokens_max",
}


class Effect(NamedTuple):
    """A field that affects artifacts of a kind. Without a name: the whole section."""

    section: str
    name: str
    kind: str
    condition: str  # empty: always

    @property
    def place(self) -> int:
        """The place in LAST, which may name a section, too; 0 for the others."""
        names = {self.name or self.section, f"{self.section}.{self.name}"}
        last = LAST.get(self.kind, "").split()
        return next((place for place, name in enumerate(last, 1) if name in names), 0)


CONDITIONS: dict[str, Callable[[PipelineConfig, Effect], bool]] = {
    "over-sampled": lambda config, _: config.rl.oversampling > 1,
    "validated": lambda config, _: config.sft.validated,
    "dropping": lambda config, effect: config.drops(USES[effect.kind]),  # rows that are too long
    "curriculum": lambda config, _: config.rl.curriculum != "none",
    "left out": lambda config, _: config.rl.leaves_out,
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
    chosen = [
        effect for effect in known if effect.kind == kind and (kind != "policy" or PHASES[effect.section] == phase)
    ]
    return sorted(chosen, key=lambda effect: effect.place)


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
            if section == "data":
                settings["data"] = [data for data in tree["data"] if data["use"] == USES[kind]]
            else:  # a stored config may lack a field
                settings |= {f"{section}.{key}": value for key, value in tree[section].items() if name in ("", key)}
    return settings
