"""The task sample_prompts."""

from rlpipe.stages import sampling
from tasks.stage_task import stage_task

sample_prompts = stage_task("sample_prompts", "sample_prompts {iteration:05d} round {round_index}")(sampling.sample_prompts)
