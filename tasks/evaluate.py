"""The task evaluate."""

from rlpipe.stages import evaluation
from tasks.stage_task import stage_task

evaluate = stage_task("evaluate", "evaluate version {version}")(evaluation.evaluate)
