"""The task generate."""

from rlpipe.stages import sampling
from tasks.stage_task import stage_task

generate = stage_task("generate", "generate {iteration:05d} round {round_index} shard {shard}")(sampling.generate)
