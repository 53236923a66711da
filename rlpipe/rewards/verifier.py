"""The reward `reasoning_gym`: a data set's own verifier on the text between the answer tags."""

from __future__ import annotations

import ast
from functools import lru_cache
from typing import Any

import reasoning_gym
from reasoning_gym.utils import extract_answer

from rlpipe.types import JsonDict, canonical_json


def score_answer(prompt: JsonDict, completion: str) -> float:
    """The verifier's score of the last `<answer>` of the completion, 0 to 1; KeyError for a prompt of another source."""
    made = prompt["metadata"]["reasoning_gym"]
    entry = made["entry"]
    if isinstance(entry, str):  # Python literals: some verifiers compare tuples
        entry = ast.literal_eval(entry)
    assert "answer" in entry
    dataset = _dataset(made["dataset"], canonical_json(made["args"]))
    return float(dataset.score_answer(extract_answer(completion), entry))


@lru_cache(maxsize=64)
def _dataset(name: str, arguments: bytes) -> Any:
    import json

    return reasoning_gym.create_dataset(name, **json.loads(arguments))
