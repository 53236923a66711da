"""The disk and the hours of a plan, from the model's shapes, from what the config keeps, and from
passes that were timed on this machine."""

from __future__ import annotations

import math
import shutil
from dataclasses import dataclass

from rlpipe.base.values import size_text
from rlpipe.checks.content import Lengths
from rlpipe.config.pipeline import PipelineConfig
from rlpipe.extras.plan.sizes import BYTES, ModelSizes, Speed, places
from rlpipe.store.backend import open_store
from rlpipe.store.cache import BYTES_MAX
from rlpipe.store.retention import kept_states, kept_versions

STATE_BYTES = 12  # a trained parameter: fp32 weight, and AdamW's two moments
# of a sampled token in rollouts, scores and batch together, with its text and
# logprobs: measured on preset tiny
TOKEN_BYTES = 30
# policies in scratch while a run is at work: what was published, and what engines load and have
COPIES = 3
GAIN_MIN = 1.2  # of bfloat16, below which nobody need hear of it
SHARE_MIN = 0.8  # of a core, in a measurement on a quiet machine
BUSY = "; TOO LONG: other work kept this processor busy, of which the measurement had {:.0%} of a core"


@dataclass(frozen=True)
class DiskNeed:
    """Bytes that a run leaves in the store at most, and those in scratch while it is at work."""

    policy: int
    state: int
    rollouts: int  # of an iteration
    base: int
    sft: int
    rl: int
    scratch: int

    @property
    def total(self) -> int:
        return self.base + self.sft + self.rl


def disk_of(config: PipelineConfig, sizes: ModelSizes) -> DiskNeed:
    """The bytes of policies, states and rollouts, by the model's shapes and by what `[checkpoint]`
    keeps."""
    checkpoint, num_iterations, width = config.checkpoint, config.rl.num_iterations, BYTES[config.model.dtype]
    trained = sizes.adapter or sizes.parameters
    policy, state, rollouts = trained * width, trained * STATE_BYTES, rollout_bytes(config)
    num_policies = (
        len(kept_versions(checkpoint, num_iterations, [])) if checkpoint.keep_policies_last else num_iterations
    )
    with_state = range(checkpoint.state_every - 1, num_iterations, checkpoint.state_every)
    num_states = len(kept_states(checkpoint, with_state, []))
    return DiskNeed(
        policy=policy,
        state=state,
        rollouts=rollouts,
        base=sizes.parameters * width,
        sft=-(-config.sft.num_steps // config.sft.segment_steps) * (policy + state),
        rl=num_policies * policy + num_states * state + num_iterations * rollouts,
        scratch=COPIES * policy + state + (min(BYTES_MAX, num_iterations * rollouts) if is_remote(config) else 0),
    )


def disk_lines(config: PipelineConfig, sizes: ModelSizes) -> list[str]:
    """The lines that say how much an iteration and the whole run leave in the store, at most, and
    how much scratch takes meanwhile."""
    disk, checkpoint = disk_of(config, sizes), config.checkpoint
    bounded = checkpoint.keep_policies_last or config.rl.num_iterations < 2
    lines = [
        (
            f"disk, estimated: an iteration makes a policy of {size_text(disk.policy)}, at most"
            f" {size_text(disk.rollouts)} of rollouts, and every {checkpoint.state_every} iterations a state of"
            f" {size_text(disk.state)}"
        ),
        (
            f"  in all at most {size_text(disk.total)} in the store (base {size_text(disk.base)}, SFT"
            f" {size_text(disk.sft)}, RL"
            f" {size_text(disk.rl)}{'' if bounded else '; checkpoint.keep_policies_last and keep_states bound it'}),"
            f" and {size_text(disk.scratch)} in scratch until the run ends"
        ),
    ]
    free = _free_bytes(config)
    if free is not None and free < disk.total:
        lines.append(
            f"WARNING store={config.store}: its disk has {size_text(free)} free, and the run may keep"
            f" {size_text(disk.total)}"
        )
    return lines


def rollout_bytes(config: PipelineConfig) -> int:
    """Bytes of an iteration's rollouts at most, those of all sampling rounds."""
    rl = config.rl
    return TOKEN_BYTES * rl.completion_tokens_max * rl.round_groups * rl.group_size * rl.rounds_max


def is_remote(config: PipelineConfig) -> bool:
    """True when the store is no folder of this machine: a node then caches what it reads there."""
    return "://" in config.store and not config.store.startswith("file:")


def _free_bytes(config: PipelineConfig) -> int | None:
    """Free bytes of the disk of a store on this machine; None for a store elsewhere."""
    if is_remote(config):
        return None
    local = open_store(config.store).local
    assert local is not None, config.store
    there = next(folder for folder in (local, *local.parents) if folder.is_dir())
    return shutil.disk_usage(there).free


def time_lines(config: PipelineConfig, speed: Speed | str, lengths: Lengths) -> list[str]:
    """Seconds of an iteration and hours of the run, of what was timed; why not, where nothing was
    and `speed` says why.
    """
    if isinstance(speed, str):
        return [f"time: not estimated, {speed}"]
    sft, rl, longest = config.sft, config.rl, config.model.context_tokens_max
    sft_s = (
        speed.train_s * sft.num_steps * sft.batch_size * (lengths.conversation or longest) / config.trainer.tokens_max
    )
    prompt = lengths.prompt or longest - rl.completion_tokens_max
    tokens = rl.num_prompts * (prompt + rl.group_size * rl.completion_tokens_max)  # a group's prompt is computed once
    # as the trainer makes them: proximal logprobs that no step needs are not computed
    # (rlpipe/trainer/rl.py)
    passes = (rl.proximal == "trainer" and (rl.num_steps > 1 or rl.kl == "reward")) + (rl.kl != "none")
    train_s = (speed.train_s + passes * speed.forward_s) * tokens / config.trainer.tokens_max
    started = 0 if rl.rollouts_from else rl.round_groups * rl.group_size
    sample_s = _sampling_s(config, speed, started, rl.completion_tokens_max)
    evaluation_s = _evaluations_s(config, speed)
    total_s = sft_s + rl.num_iterations * (train_s + sample_s) + evaluation_s
    lines = [
        f"time, estimated from passes of this model on this processor just now: an iteration trains {train_s:,.1f} s"
        f" and samples {sample_s:,.1f} s; in all {total_s / 3600:,.2f} h (SFT {sft_s / 3600:,.2f}, evaluations"
        f" {evaluation_s / 3600:,.2f}) when all completions have full length; rewards and what lies between the stages"
        " come on top" + (BUSY.format(speed.share) if speed.share < SHARE_MIN else "")
    ]
    if speed.bfloat16 >= GAIN_MIN:
        lines.append(f"  with model.dtype = 'bfloat16' this processor trains {speed.bfloat16:.1f} times as fast")
    return lines


def _evaluations_s(config: PipelineConfig, speed: Speed) -> float:
    """Seconds of all evaluations: at the start, every `evaluation.every` iterations and at the
    end."""
    evaluation, sets = config.evaluation, config.sets("evaluation")
    count = 1 + (math.ceil(config.rl.num_iterations / evaluation.every) if evaluation.every else 1)
    completions = evaluation.prompts_max * (1 + evaluation.num_completions) * len(sets)
    return count * _sampling_s(config, speed, completions, config.completion_tokens_max("evaluation"))


def _sampling_s(config: PipelineConfig, speed: Speed, rollouts: int, tokens: int) -> float:
    """Seconds to sample rollouts that all have `tokens` tokens:
    `decode_s * tokens * ceil(rollouts / (engines * places))`, as each engine samples as many at
    once as it has places."""
    engines = config.engines.count * config.engines.nodes
    return speed.decode_s * tokens * math.ceil(rollouts / (engines * places(config)))
