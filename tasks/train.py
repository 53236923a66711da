"""The task train."""

from rlpipe.stages import policy
from tasks.stage_task import stage_task

train = stage_task("train", "train {iteration:05d}")(policy.train)
