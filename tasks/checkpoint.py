"""The task checkpoint."""

from rlpipe.stages import policy
from tasks.stage_task import stage_task

checkpoint = stage_task("checkpoint", "checkpoint {iteration:05d}")(policy.checkpoint)
