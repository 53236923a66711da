"""The tasks that come before the first step: tokenizer, base model, SFT data."""

from rlpipe.stages import base, sft
from tasks.stage_task import stage_task

prepare_tokenizer = stage_task("prepare_tokenizer", "prepare the tokenizer")(base.base_tokenizer)
prepare_model = stage_task("prepare_model", "prepare the base model")(base.base_policy)
prepare_probe = stage_task("prepare_probe", "score the probe with the base model")(base.base_probe)
prepare_sft_data = stage_task("prepare_sft_data", "tokenise the conversations")(sft.prepare_sft_data)
