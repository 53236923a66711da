"""The task train_segment: one segment of SFT steps."""

from rlpipe.stages import sft
from tasks.stage_task import stage_task

train_segment = stage_task("train_segment", "train segment {segment:05d}")(sft.train_segment)
