"""What frozen teachers give to the tokens of a batch: the input of distillation.

Legend: B rows of a batch, N their scored tokens, K top tokens of the teacher.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlpipe.algorithms.divergence import top_tokens
from rlpipe.base.errors import UserError
from rlpipe.base.references import FileRecord
from rlpipe.base.values import Metrics
from rlpipe.records.columns import to_parquet, to_table
from rlpipe.records.rollout import TEACHER_FILE, TEACHER_TOP_FILE, TeacherLogprobs, TeacherTop
from rlpipe.store.artifacts import write_bytes
from rlpipe.trainer.batches import RlBatch, read_rl_batch, read_sets
from rlpipe.trainer.gap import rows_of_batch
from rlpipe.trainer.jobs import JobResult, TeacherJob
from rlpipe.trainer.model import reshard
from rlpipe.trainer.ranks import Ranks
from rlpipe.trainer.rl import Reference
from rlpipe.trainer.step import forward, plan_batch


def teach(ranks: Ranks, teachers: list[Reference], job: TeacherJob) -> JobResult:
    """Computes the teacher's logprobs of every scored token of a batch, and of its own top tokens
    there where the job asks for them, and writes them; the files are those of rank 0. UserError
    when one of them is not finite.

    Each row has the teacher of its data set: where there are several, each computes its own rows.
    """
    rollouts = ranks.in_turn(lambda folder: read_rl_batch(ranks.store, job.data, 1, folder))
    sizes = {teacher.policy.lm.config.get_text_config().vocab_size for teacher in teachers}
    if len(sizes) > 1 and job.top_k >= min(sizes):
        raise UserError(f"rl.teacher_top_k={job.top_k}: its teachers have {sizes} tokens; use less than {min(sizes)}")
    top_k = min(job.top_k, *sizes)
    if len(teachers) == 1:
        values_NC, apart = _taught(ranks, teachers[0], job, rollouts, top_k), {}
    else:
        sets_B = ranks.in_turn(lambda folder: read_sets(ranks.store, job.data, rollouts, folder))
        parts = (_of_teacher(rollouts, [job.of_set[name] == at for name in sets_B]) for at in range(len(teachers)))
        taught = zip(teachers, parts, strict=True)
        values_NC = torch.stack([_taught(ranks, teacher, job, part, top_k) for teacher, part in taught]).sum(0)
        apart = _apart(rollouts, sets_B, values_NC[:, 0].numpy())
    result = JobResult({"num_tokens": len(values_NC), **apart})
    with ranks.together():
        if unknown := int((~values_NC[:, : 1 + 2 * top_k].isfinite()).any(-1).sum()):
            raise UserError(
                f"rl.teacher: it gives {unknown} of {len(values_NC)} tokens of {job.data.folder} no finite logprob;"
                " name another teacher, in a fork"
            )
        if ranks.rank == 0:
            parts = [part.numpy() for part in values_NC.split(rollouts.lengths_B.tolist())]
            places = [*zip(rollouts.group_index_B.tolist(), rollouts.rollout_index_B.tolist(), strict=True)]
            own = [TeacherLogprobs(*at, part[:, 0]) for at, part in zip(places, parts, strict=True)]
            result.teacher.append(_written(ranks, job, TEACHER_FILE, own, TeacherLogprobs))
            if top_k:
                top = [TeacherTop(*at, *_top_columns(part, top_k)) for at, part in zip(places, parts, strict=True)]
                result.teacher.append(_written(ranks, job, TEACHER_TOP_FILE, top, TeacherTop))
    return result


def _of_teacher(rollouts: RlBatch, own_B: list[bool]) -> RlBatch:
    """The batch with the sequences of its own rows alone; the places of all others stay."""
    return replace(rollouts, steps=[[one for one in step if own_B[one.row]] for step in rollouts.steps])


def _apart(rollouts: RlBatch, sets_B: list[str], logprobs_N: np.ndarray) -> Metrics:
    """The mean of the engine's logprob, recorded while sampling, minus the teacher's, of each data
    set that has such tokens.
    """
    rows = sorted((row for step in rollouts.steps for row in step), key=lambda row: row.row)
    gap_N = np.concatenate([np.zeros(0), *(row.rollout_logprobs for row in rows)]) - logprobs_N
    set_N = np.where(np.isfinite(gap_N), np.repeat(sets_B, rollouts.lengths_B), "")
    return {f"train/teacher_kl/{name}": float(gap_N[set_N == name].mean()) for name in {*set_N.tolist()} - {""}}


def _taught(ranks: Ranks, teacher: Reference, job: TeacherJob, rollouts: RlBatch, top_k: int) -> Tensor:
    """What the teacher gives to each of the N scored tokens, fp32 on the host of every rank: the
    token's logprob, then, where it is asked for K tokens, these, their K logprobs, and the logprob
    of the rest; zeros for tokens of no sequence of `rollouts`. A collective.
    """
    planned = [plan_batch(ranks, teacher.policy, teacher.rows, step) for step in rollouts.steps]
    microbatches = [microbatch for batch in planned if batch.num_tokens for microbatch in batch.microbatches]
    beside = partial(_top_of_chunk, top_k, job.temperature) if top_k else None
    with torch.no_grad():
        scores = [forward(teacher.policy, one, job.temperature, beside=beside) for one in microbatches]
    reshard(teacher.policy)
    values = [torch.cat([logprobs_N[:, None], *top], dim=-1) for logprobs_N, _, *top in scores]
    width = 2 + 2 * top_k if top_k else 1
    return rows_of_batch(ranks, rollouts.lengths_B, zip(microbatches, values, strict=True), width)


def _top_of_chunk(top_k: int, temperature: float, logits_CV: Tensor, _place: slice) -> tuple[Tensor]:
    """K tokens (exact in fp32), their K logprobs, and that of the rest, -inf where it is none."""
    top = top_tokens(logits_CV, top_k, temperature)
    rest_C = torch.full_like(top.logprobs_NK[:, 0], -torch.inf) if top.rest_N is None else top.rest_N
    return (torch.cat([top.tokens_NK.float(), top.logprobs_NK, rest_C[:, None]], dim=-1),)


def _top_columns(values_NC: np.ndarray, top_k: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The columns of TeacherTop of a row's N tokens."""
    tokens_NK, logprobs_NK = values_NC[:, 1 : 1 + top_k], values_NC[:, 1 + top_k : -1]
    return tokens_NK.astype(np.int32).reshape(-1), logprobs_NK.reshape(-1), values_NC[:, -1]


def _written(ranks: Ranks, job: TeacherJob, name: str, rows: list[Any], record: type[Any]) -> FileRecord:
    return write_bytes(ranks.store, job.folder, job.attempt, name, to_parquet(to_table(rows, record)))
