"""The settings of every stage by phase and kind, as the declarations say them."""

from __future__ import annotations

from rlpipe.base.values import JsonDict
from rlpipe.config.pipeline import PipelineConfig
from rlpipe.config.settings import artifact_settings
from rlpipe.loop.stage import Stage
from rlpipe.stages import base, evaluation, filtering, generation, policy, sampling, scoring, sft

STAGES: dict[tuple[str, str], Stage] = {
    ("base", "tokenizer"): base.base_tokenizer, ("base", "policy"): base.base_policy,
    ("base", "probe"): base.base_probe,
    ("data", "data"): sft.prepare_sft_data, ("data", "selection"): sft.select_segment,
    ("sft", "policy"): sft.train_segment,
    ("rl", "prompts"): sampling.sample_prompts, ("rl", "rollouts"): generation.generate,
    ("rl", "scores"): scoring.score,
    ("rl", "batch"): filtering.filter_groups, ("rl", "policy"): policy.checkpoint,
    **{(phase, "evaluation"): evaluation.evaluate for phase in ("base", "sft", "rl")},
}  # fmt: skip
RL_KINDS = [kind for phase, kind in STAGES if phase == "rl"] + ["state", "gap"]


def stage_settings(config: PipelineConfig, phase: str, stage: str) -> JsonDict:
    kind = stage.split("/", 1)[0]
    if kind in ("state", "gap"):
        return artifact_settings(config, phase, "policy")
    return STAGES[phase, kind].settings(config)
