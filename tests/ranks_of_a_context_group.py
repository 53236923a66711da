"""A program of four ranks: RL and SFT of small models where 1, 2 and 4 ranks share each row, and
how far apart they come out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from rlpipe.base.references import ArtifactRef
from rlpipe.base.values import JsonDict
from rlpipe.trainer.ranks import Ranks, join_ranks
from rlpipe.trainer.step import Resident
from rlpipe.trainer.trainer import Trainer
from tests import trainer_world as world

SHARED = (1, 2, 4)
LOUD: JsonDict = {"kl": "loss", "kl_coef": 0.3, "entropy_coef": 0.01, "importance_high": 1.05, "learning_rate": 1e-3}
OPTIONS: dict[str, JsonDict] = {
    "ppo": {"num_steps": 2},
    "gspo": {"num_steps": 1, "objective": "gspo", "aggregation": "sequence_mean",
             "importance": "sequence_truncate", "importance_high": 1.1},
    "kl in the reward": {"num_steps": 2, "kl": "reward", "kl_estimator": "k1", "aggregation": "fixed_length"},
}  # fmt: skip
PLAIN: JsonDict = world.MODEL | {"model_type": "llama", "tie_word_embeddings": False}
WINDOWS: JsonDict = world.MODEL | {
    "model_type": "gemma3_text", "num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 8,
    "query_pre_attn_scalar": 16,
}  # fmt: skip
EXPERTS: JsonDict = world.MODEL | {
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}
LATENT: JsonDict = {
    **world.MODEL, "model_type": "deepseek_v3", "head_dim": 8, "num_key_value_heads": 4, "q_lora_rank": 16,
    "kv_lora_rank": 16, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16, "v_head_dim": 16, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 1, "moe_intermediate_size": 32, "n_shared_experts": 1, "tie_word_embeddings": False,
}  # fmt: skip
MODELS: dict[str, JsonDict] = {
    "qwen3": world.MODEL, "llama": PLAIN, "gemma3_text": WINDOWS, "qwen3_moe": EXPERTS, "deepseek_v3": LATENT,
}  # fmt: skip


def whole(resident: Resident, values: list[Tensor]) -> dict[str, Tensor]:
    """Rows of all ranks put together, of what is kept beside each trained parameter."""
    return {
        name: DTensor.from_local(value, parameter.device_mesh, parameter.placements, shape=parameter.shape,
                                 stride=parameter.stride()).full_tensor()
        for (name, parameter), value in zip(resident.policy.trained(), values, strict=True)
    }  # fmt: skip


def outcome(ranks: Ranks, model: JsonDict, kind: str, data: ArtifactRef, changes: JsonDict) -> JsonDict:
    trainer = Trainer(ranks)
    world.run(trainer, "load", world.load_new(model=model))
    metrics = world.run(trainer, "train", world.train("new", "one", kind, data, changes))["metrics"]
    resident = trainer.resident
    assert resident is not None
    moments = [resident.optimizer.state[shard]["exp_avg"] for shard in resident.shards.values()]
    weights = [shard.detach() for shard in resident.shards.values()]
    return {
        "metrics": metrics,
        "rows": resident.rows.name,
        "moments": whole(resident, moments),
        "weights": whole(resident, weights),
        "gaps": [gap for row in resident.gaps or [] for gap in row.gap.tolist()],  # on the first rank
    }


def distance(here: dict[str, Tensor], there: dict[str, Tensor]) -> float:
    """The largest |difference| / |value| of a parameter."""
    return max(
        float((here[name].double() - there[name].double()).norm() / there[name].double().norm()) for name in there
    )


def main(folder: Path, *names: str) -> None:
    """`names`: of models, each followed by options (sft or one of OPTIONS) after a colon.

    Example: "llama:sft,gspo".
    """
    worlds = {
        count: join_ranks(world.options(folder, tokens_max=128, ranks=4, context_ranks=count)) for count in SHARED
    }
    first, seen = worlds[1], []

    def on_all(ref: ArtifactRef | None) -> ArtifactRef:
        return ArtifactRef.from_json(first.gather(ref and ref.as_json())[0])

    is_first = first.rank == 0
    data = on_all(world.batch(first.store, "batch", world.rollout_rows(6, 4)) if is_first else None)
    conversations = on_all(world.conversations(first.store, "conversations", 24) if is_first else None)
    for name, options in (text.split(":") for text in names):
        model = MODELS[name]
        trainer = Trainer(first)
        world.run(trainer, "load", world.load_new(seed=2, model=model))
        records = world.run(trainer, "save", world.save("new", f"policy-{name}", None))["policy"]
        reference = on_all(world.saved(first.store, f"policy-{name}", records) if is_first else None)
        for option in options.split(","):
            of_rl = ("rl", data, {**LOUD, **OPTIONS.get(option, {}), "reference": reference.as_json()})
            kind, source, changes = ("sft", conversations, {"num_steps": 2}) if option == "sft" else of_rl
            alone = outcome(first, model, kind, source, changes)
            for count in SHARED[1:]:
                shared = outcome(worlds[count], model, kind, source, changes)
                line: dict[str, Any] = {"model": name, "option": option, "ranks": count, "rows": shared["rows"]}
                line |= {part: distance(shared[part], alone[part]) for part in ("moments", "weights")}
                line["gaps"] = [shared["gaps"], alone["gaps"]]
                seen.append(line | {"alone": alone["metrics"], "metrics": shared["metrics"]})
    if is_first:
        (folder / "context_group.json").write_text(json.dumps(seen))
    torch.distributed.barrier()
    dist.destroy_process_group()
