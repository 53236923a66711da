"""The sizes and the speed of a model, counted and timed in a process of its own (`trial.py`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rlpipe.checks.tried_model import TriedModel, answer_of
from rlpipe.config.pipeline import PipelineConfig

BYTES = {"float32": 4, "bfloat16": 2}
PLACES = (16, 128)  # of the local engine, at least and at most


@dataclass(frozen=True)
class ModelSizes:
    """The sizes of a model, counted on its shapes as transformers builds them.
    Example: ModelSizes(5_000, 1_000, 1_000, 512, 70_000)."""

    parameters: int
    layer: int  # parameters of the largest layer
    rest: int  # and of what is in no layer: embeddings, head
    kv_token: int  # numbers that an engine keeps for a token
    # bytes that one takes beside weights, at the most; None where shapes alone do not say it
    microbatch: int | None
    # parameters of the adapter that is trained beside the model; none: all of the model is trained
    adapter: int = 0
    largest: int = 0  # numbers of the largest parameter


@dataclass(frozen=True)
class Speed:
    """Seconds, on this machine's processor, of a microbatch of `tokens_max` tokens forward and
    backward, of one forward, and of a token for each place of an engine. Example: Speed(2.1, 0.7,
    0.12, 0.98).

    `share`: what the measurement had of a core, 0 to 1; beside other work it is low, and the
    seconds are too many. `bfloat16`: how many times as fast a microbatch is in bfloat16; 0 where
    that was not tried.
    """

    train_s: float
    forward_s: float
    decode_s: float
    share: float
    bfloat16: float = 0.0


@dataclass(frozen=True)
class SizedModel(TriedModel):
    """A tried model with what a plan counts with. `speed`: or text on why there is none."""

    sizes: ModelSizes
    speed: Speed | str


def size_model(config: PipelineConfig, named: Mapping[str, object]) -> SizedModel:
    """Tries a model in a process of its own, as `try_model` does, and counts it."""
    trainer, engines = config.trainer, config.engines
    training = {
        "tokens_max": trainer.tokens_max,
        "activation_checkpointing": trainer.activation_checkpointing,
        "dtype": config.model.dtype,
        "context_ranks": trainer.context_ranks,
    }
    timed = {
        "tokens_max": trainer.tokens_max,
        "threads": trainer.threads,
        "places": places(config),
        "engine_threads": engines.threads,
    }
    on_cpu = {} if trainer.gpu_ids or engines.gpu_ids else {"timed": timed}
    return answer_of(SizedModel, "rlpipe.extras.plan.trial", config, {**named, "training": training, **on_cpu})


def places(config: PipelineConfig) -> int:
    """The number of rollouts that the local engine computes at once."""
    return min(max(config.engines.in_flight_max, PLACES[0]), PLACES[1])
