"""The reward `reasoning_gym`: is the answer right, by the verifier of the generator that made the
prompt.

Some of reasoning_gym's verifiers evaluate the answer as Python (`eval`, or sympy's `parse_expr`,
which evaluates too): a completion could run code of its own and patch the scores after it. They get
only answers of a grammar in which no attribute, string or unknown function can be written.
"""

from __future__ import annotations

import ast
import json
import re
from functools import lru_cache
from typing import Any

from rlpipe.base.errors import PromptFault
from rlpipe.base.hashing import canonical_json
from rlpipe.records.prompt import RewardPrompt

# a function name, a single letter, a number: never two letters in a row that are not listed, nor a
# dot after a letter or bracket
_FUNCTIONS = "exp|log|ln|sqrt|sin|cos|tan|cot|sec|csc|asin|acos|atan|sinh|cosh|tanh|asinh|acosh|atanh|erf|erfi|pi|Abs"
_NUMBER = r"\d+(?:\.\d*)?|\.\d+"
# a power is none of the four operations, and 9**9**9 takes for ever
_ARITHMETIC = rf"(?:{_NUMBER}|\*(?!\*)|[\s+\-/()])*+"
_FORMULA = rf"(?:{_NUMBER}|(?<![A-Za-z])(?:{_FUNCTIONS}|[A-Za-z])(?![A-Za-z_])|[\s+\-*/()])*+"
# lists of numbers and words: nothing can be called without a parenthesis
_LISTS = r"[\w\s,\[\]'\"-]*+"
EVALUATED: dict[str, re.Pattern[str]] = {
    name: re.compile(pattern, re.ASCII)
    for pattern, names in {
        _ARITHMETIC: ("countdown", "puzzle24"),
        _FORMULA: ("simple_integration", "intermediate_integration", "polynomial_multiplication"),
        _LISTS: ("string_insertion", "spiral_matrix", "binary_matrix", "n_queens"),
    }.items()
    for name in names
}


def score_answer(prompt: RewardPrompt, completion: str) -> float:
    """The verifier's score of the last `<answer>` of the completion, 0 to 1; PromptFault for a
    prompt of another source.

    Where the verifier would evaluate the answer, one outside EVALUATED's grammar counts as no
    answer.
    """
    made = prompt["metadata"].get("reasoning_gym")
    if made is None:
        raise PromptFault(f"prompt {prompt['prompt_id']}: reward reasoning_gym needs rows of a reasoning_gym source")
    entry = made["entry"]
    if isinstance(entry, str):  # Python literals: some verifiers compare tuples
        entry = ast.literal_eval(_literal(entry))
    assert "answer" in entry
    dataset = _dataset(made["dataset"], canonical_json(made["args"]))
    from reasoning_gym.utils import extract_answer

    answer = extract_answer(completion)
    grammar = EVALUATED.get(entry.get("metadata", {}).get("source_dataset", ""), EVALUATED.get(made["dataset"]))
    if answer is not None and grammar is not None and not grammar.fullmatch(answer):
        answer = None
    return float(dataset.score_answer(answer, entry))


@lru_cache(maxsize=64)
def _literal(text: str) -> ast.Expression:
    """The syntax of a Python literal: a group's rollouts, which are scored together, have one."""
    return ast.parse(text, mode="eval")


@lru_cache(maxsize=64)
def _dataset(name: str, arguments: bytes) -> Any:
    import reasoning_gym  # takes seconds, which the factory in `registry` has spent

    return reasoning_gym.create_dataset(name, **json.loads(arguments))
