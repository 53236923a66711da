"""The reward `hf:<folder>`: a sequence-classification model in a process of its own, asked in batches."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Annotated

from pydantic import Field

from rlpipe.child import ChildProcess
from rlpipe.rewards.process import ProcessScorer

LOAD_TIMEOUT_S = 900.0
LOSSES_MAX = 8  # processes replaced within one `score`


def model(
    name: str, weight: float, timeout_s: float, /, *, batch_size: Annotated[int, Field(ge=1, le=4096)] = 8,
    tokens_max: Annotated[int, Field(ge=16)] = 2048, output: Annotated[int, Field(ge=0)] = 0, device: str = "cpu",
) -> ProcessScorer:  # fmt: skip
    """The model's output number `output` for the prompt and the completion as a conversation, cut to `tokens_max` tokens.

    ValueError when the folder holds no sequence-classification model, or it has no such output.
    """
    folder = Path(name.removeprefix("hf:")).expanduser()
    _check_folder(folder, output)
    hello = {
        "name": name, "weight": weight, "folder": str(folder), "tokens_max": tokens_max, "output": output, "device": device,
    }  # fmt: skip
    launch = partial(ChildProcess, f"rl.rewards.{name}", "rlpipe.rewards.model_worker", hello, LOAD_TIMEOUT_S)
    return ProcessScorer(name, launch, timeout_s, batch_size=batch_size, losses_max=LOSSES_MAX)


def _check_folder(folder: Path, output: int) -> None:
    missing = [each for each in ("config.json", "tokenizer.json") if not (folder / each).is_file()]
    if missing or not any(folder.glob("*.safetensors")):
        raise ValueError(f"folder {folder} is no model in HF format: {', '.join(missing or ['*.safetensors'])} is missing")
    config = json.loads((folder / "config.json").read_text())
    kinds = config.get("architectures") or ["none"]
    if not kinds[0].endswith("ForSequenceClassification"):  # another kind would load, with a random head
        raise ValueError(f"folder {folder} holds a {kinds[0]}; a reward model is some ...ForSequenceClassification")
    num_outputs = len(config["id2label"]) if config.get("id2label") else config.get("num_labels", 2)
    if output >= num_outputs:
        raise ValueError(f"output={output}: the model in {folder} has the outputs 0 to {num_outputs - 1}")
