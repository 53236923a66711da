"""The logprobs that a frozen teacher gives to the tokens of a batch: the input of distillation."""

from __future__ import annotations

import torch

from rlpipe.base.errors import UserError
from rlpipe.records.columns import to_parquet, to_table
from rlpipe.records.rollout import TEACHER_FILE, TeacherLogprobs
from rlpipe.store.artifacts import write_bytes
from rlpipe.trainer.batches import RlBatch, read_rl_batch
from rlpipe.trainer.gap import of_whole_batch
from rlpipe.trainer.jobs import JobResult, TeacherJob
from rlpipe.trainer.ranks import Ranks
from rlpipe.trainer.rl import Reference
from rlpipe.trainer.step import frozen_logprobs, plan_batch


def teach(ranks: Ranks, teacher: Reference, job: TeacherJob) -> JobResult:
    """Computes the teacher's logprobs of every scored token of a batch, and writes them; the files
    are those of rank 0. UserError when one of them is not finite.
    """
    rollouts = ranks.in_turn(lambda folder: read_rl_batch(ranks.store, job.data, 1, folder))
    planned = [plan_batch(ranks, teacher.policy, teacher.rows, step) for step in rollouts.steps]
    microbatches = [microbatch for batch in planned if batch.num_tokens for microbatch in batch.microbatches]
    logprobs = frozen_logprobs(teacher.policy, microbatches, job.temperature)
    logprobs_N = of_whole_batch(ranks, rollouts.lengths_B, zip(microbatches, logprobs, strict=True))
    result = JobResult({"num_tokens": len(logprobs_N)})
    with ranks.together():
        if unknown := int((~logprobs_N.isfinite()).sum()):
            raise UserError(
                f"rl.teacher: it gives {unknown} of {len(logprobs_N)} tokens of {job.data.folder} no finite logprob;"
                " name another teacher, in a fork"
            )
        if ranks.rank == 0:
            data = to_parquet(to_table(_records(rollouts, logprobs_N), TeacherLogprobs))
            result.teacher.append(write_bytes(ranks.store, job.folder, job.attempt, TEACHER_FILE, data))
    return result


def _records(rollouts: RlBatch, logprobs_N: torch.Tensor) -> list[TeacherLogprobs]:
    """The record of each row of the batch."""
    parts = logprobs_N.split(rollouts.lengths_B.tolist())
    rows = zip(rollouts.group_index_B, rollouts.rollout_index_B, parts, strict=True)
    return [TeacherLogprobs(int(group), int(index), part.numpy()) for group, index, part in rows]
