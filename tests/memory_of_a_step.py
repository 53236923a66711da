"""What one optimizer step really takes, in a process of its own: prints the bytes of memory that it
adds at its peak. Pages of a file (moments that are off the device) are not counted: the system
keeps as many of them as nobody else wants.

A step of a small model goes before it: what a process takes once, at its first step, is no model's
(35 to 60 MiB on an Intel Xeon).

Arguments: a folder, whether activations are recomputed (0 or 1), `trainer.offload`,
and the model's config as JSON.
"""

from __future__ import annotations

import gc
import json
import sys
import threading
from functools import partial
from pathlib import Path

import numpy as np

from rlpipe.base.values import JsonDict
from rlpipe.config.training import SftConfig
from rlpipe.trainer.jobs import LoadJob, job_of
from rlpipe.trainer.packing import sequence_of
from rlpipe.trainer.ranks import Ranks
from rlpipe.trainer.sft import _cross_entropy
from rlpipe.trainer.state import load
from rlpipe.trainer.step import StepSettings, optimizer_step, plan_batch
from tests import trainer_world as world

TOKENS, LENGTH = 1024, 256


def resident() -> int:
    """Bytes of this process's own memory."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("RssAnon:", "RssShmem:")))


class Peak(threading.Thread):
    """Looks every millisecond while a step computes."""

    def __init__(self) -> None:
        super().__init__()
        self.most, self._over = 0, threading.Event()

    def run(self) -> None:
        while not self._over.wait(0.001):  # short: it looks a thousand times a second
            self.most = max(self.most, resident())

    def ended(self) -> int:
        self._over.set()
        self.join()
        return self.most


def step(ranks: Ranks, model: JsonDict) -> int:
    """The most bytes of memory while it computes."""
    job = job_of("load", json.dumps(world.load_new(model=model)).encode())
    assert isinstance(job, LoadJob)
    held, _ = load(ranks, job)
    tokens, scored = np.arange(LENGTH) % world.VOCAB, np.arange(1, LENGTH)
    sequences = [sequence_of(tokens, scored) for _ in range(TOKENS // LENGTH)]
    batch = plan_batch(ranks, held.policy, held.rows, sequences)
    how = StepSettings(SftConfig(learning_rate=1e-4), 0, 1.0, "memory", entropy_trained=False)
    peak = Peak()
    peak.start()
    optimizer_step(ranks, held, batch, partial(_cross_entropy, batch.num_tokens), how)
    return peak.ended()


def main(folder: str, recomputed: str, offload: str, model: str) -> None:
    ranks = world.one_rank(Path(folder), tokens_max=TOKENS, activation_checkpointing=recomputed == "1", offload=offload)
    step(ranks, world.MODEL)
    gc.collect()
    before = resident()
    print(step(ranks, json.loads(model)) - before)


if __name__ == "__main__":
    main(*sys.argv[1:])
