"""The task filter."""

from rlpipe.stages import scoring
from tasks.stage_task import stage_task

filter_groups = stage_task("filter", "filter {iteration:05d} round {round_index}")(scoring.filter_groups)
