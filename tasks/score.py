"""The task score."""

from rlpipe.stages import scoring
from tasks.stage_task import stage_task

score = stage_task("score", "score {iteration:05d} round {round_index}")(scoring.score)
