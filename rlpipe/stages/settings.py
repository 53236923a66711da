"""Which config fields each stage's result depends on: what `settings_sha256` covers. Where and how fast are not in it."""

from __future__ import annotations

from rlpipe.config import OptimizerConfig, PipelineConfig, RlConfig
from rlpipe.types import JsonDict

OPTIMIZER = [f"{name}" for name in OptimizerConfig.model_fields]
SAMPLING = ["completion_tokens_max", "top_p", "top_k"]
TRAINING = [
    *OPTIMIZER, "num_steps", "objective", "clip_low", "clip_high", "aggregation", "kl_coef", "kl_estimator", "entropy_coef",
    "importance", "importance_low", "importance_high", "temperature", "completion_tokens_max",
]  # fmt: skip
ENOUGH = ["num_prompts", "groups_min", "rewards", "reward_fallback", "filters"]  # what ends a round that is over-sampled
RL_FIELDS = {
    "prompts": ["num_prompts", "oversampling"],
    "rollouts": ["group_size", "temperature", "shard_prompts", "oversampling", "train_stale_tokens", *SAMPLING],
    "scores": ["rewards", "reward_fallback"],
    "batch": ["filters", "estimator", "groups_min", "rounds_max", "on_too_few", "staleness_max"],
    "policy": TRAINING,
    "state": TRAINING,
    "evaluation": ["rewards", "reward_fallback", *SAMPLING],
}
assert all(name in RlConfig.model_fields for names in RL_FIELDS.values() for name in names), "a stage names no config field"


def stage_settings(config: PipelineConfig, phase: str, stage: str) -> JsonDict:
    """The settings of one stage, flat. Example: {"seed": 0, "rl.num_prompts": 64, ...}."""
    kind = stage.split("/", 1)[0]
    tree = config.model_dump(mode="json")
    settings: JsonDict = {"seed": config.seed}
    if phase == "base":
        return settings | {f"model.{key}": value for key, value in tree["model"].items()}
    if phase == "data" or kind == "prompts":
        use = "sft" if phase == "data" else "rl"
        settings["data"] = [entry for entry in tree["data"] if entry["use"] == use]
    if phase == "data":
        return settings | {"model.context_tokens_max": config.model.context_tokens_max}
    if kind == "evaluation":
        settings["data"] = [entry for entry in tree["data"] if entry["use"] == "evaluation"]
        settings |= {
            f"evaluation.{key}": tree["evaluation"][key] for key in ("prompts_max", "num_completions", "pass_threshold")
        }
    if phase == "sft" and kind in ("policy", "state"):
        names = [*OPTIMIZER, "num_steps", "batch_size", "segment_steps"]
        return settings | {f"sft.{name}": tree["sft"][name] for name in names}
    names = RL_FIELDS[kind] + (ENOUGH if kind == "rollouts" and config.rl.oversampling > 1 else [])
    return settings | {f"rl.{name}": tree["rl"][name] for name in names}
