"""The reward `math`: is the completion's final answer mathematically equal to the prompt's (math-verify)."""

from __future__ import annotations

import logging
import re
from typing import Any

from math_verify import parse, verify

from rlpipe.types import JsonDict

# math-verify's own timeouts are signals, which work in no thread; the pool kills the process instead. It warns once of that.
logging.getLogger("math_verify.parser").setLevel(logging.ERROR)
logging.getLogger("math_verify.grader").setLevel(logging.ERROR)


def score_math(prompt: JsonDict, completion: str) -> float:
    """1.0 when the final answers are equal, else 0.0; ValueError for a prompt without an answer.

    The final answer is the text in the last `<answer>` tags, or after the last `####`, or else what math-verify finds:
    the last `\\boxed{}`, formula or number.
    """
    if prompt["answer"] is None:
        raise ValueError(f"prompt {prompt['prompt_id']} has no answer to compare with")
    gold = _parse(_reference(prompt["answer"]))
    return float(verify(gold, _parse(_final(completion)), timeout_seconds=None))


def _parse(text: str) -> list[Any]:
    return parse(text, parsing_timeout=None)  # pyright: ignore[reportArgumentType]


def _final(text: str) -> str:
    tagged = re.findall(r"<answer>(.*?)</answer>", text, flags=re.DOTALL)
    if tagged:
        return _as_formula(tagged[-1])
    return _as_formula(text.rpartition("####")[2]) if "####" in text else _without_prices(text)


def _reference(answer: str) -> str:
    """The reference answer: GSM8K's are a whole solution that ends in `#### 42`, others a bare formula."""
    return _as_formula(answer.rpartition("####")[2])


def _as_formula(text: str) -> str:
    """Marks a bare formula as one; prose ("18 dollars") stays prose, where math-verify finds the number."""
    bare = _without_prices(text.strip())
    is_prose = re.search(r"(^|\s)[A-Za-z]{3,}", bare) is not None
    return bare if is_prose or "$" in bare or "\\boxed" in bare else f"${bare}$"


def _without_prices(text: str) -> str:
    return text.replace("\\$", "")
