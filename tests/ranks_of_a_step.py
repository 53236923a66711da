"""A program of two ranks: one optimizer step of several microbatches, and how many numbers of whole
gradients a rank ever kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from rlpipe.config.training import RlConfig
from rlpipe.trainer.batches import Microbatch
from rlpipe.trainer.gap import Gaps
from rlpipe.trainer.packing import Rows
from rlpipe.trainer.ranks import join_ranks
from rlpipe.trainer.rl import advantages, loss_part, placed, with_frozen
from rlpipe.trainer.step import Scores, StepSettings, optimizer_step, plan_batch
from rlpipe.trainer.trainer import Trainer
from tests import trainer_world as world
from tests.batches import read_rl_batch


def whole_gradients(policy: Any) -> int:
    """Numbers of gradients that are kept unsharded between two microbatches."""
    groups = [
        module._get_fsdp_state()._fsdp_param_group for module in policy.modules() if hasattr(module, "_get_fsdp_state")
    ]
    parameters = [parameter for group in groups if group for parameter in group.fsdp_params]
    kept = [parameter.unsharded_accumulated_grad for parameter in parameters]
    kept += [parameter._unsharded_param.grad for parameter in parameters if hasattr(parameter, "_unsharded_param")]
    return sum(gradient.numel() for gradient in kept if gradient is not None)


def main(folder: Path) -> None:
    ranks = join_ranks(world.options(folder, tokens_max=128, ranks=2))
    trainer = Trainer(ranks)
    trainer.run(world.job_of("load", json.dumps(world.load_new()).encode()))
    resident = trainer.resident
    assert resident is not None
    with ranks.together():
        data = world.batch(ranks.store, f"batch-{ranks.rank}", world.rollout_rows(6, 4))
    rollouts = read_rl_batch(ranks.store, data, 1)
    settings = RlConfig.model_validate(world.RL)
    batch = with_frozen(plan_batch(ranks, resident.policy, Rows.PACKED, rollouts.steps[0]), resident.policy, None, 1.0)
    batch = placed(batch, "advantages_BT", advantages(ranks, rollouts, [batch], settings))
    part, kept = loss_part(batch, settings, Gaps(), moved=False), []

    def watched(microbatch: Microbatch, scores: Scores) -> tuple[Tensor, dict[str, Tensor]]:
        kept.append(whole_gradients(resident.policy))
        return part(microbatch, scores)

    optimizer_step(ranks, resident, batch, watched, StepSettings(settings, 0, 1.0, "test"))
    if ranks.rank == 0:
        (folder / "kept.json").write_text(
            json.dumps({"ranks": ranks.size, "microbatches": len(batch.microbatches), "kept": kept})
        )
    dist.destroy_process_group()
