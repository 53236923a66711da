"""The rewards `math`, `deepscaler` and `reasoning_gym`: is the answer right, by a library that knows.

Some of reasoning_gym's verifiers evaluate the answer as Python (`eval`, or sympy's `parse_expr`, which is one): a completion could run code of
its own and patch the scores after it. What may reach those is a grammar in which no attribute, string or unknown function can be written.
"""

from __future__ import annotations

import ast
import json
import logging
import re
from functools import lru_cache
from typing import Any

from math_verify import parse, verify

from rlpipe.algorithms.answers import BOX, last_answer, last_box
from rlpipe.records.prompt import RewardPrompt
from rlpipe.types import canonical_json

# math-verify's own timeouts are signals, which work in no thread; the pool kills the process instead. It warns once of that.
logging.getLogger("math_verify.parser").setLevel(logging.ERROR)
logging.getLogger("math_verify.grader").setLevel(logging.ERROR)

LATEX_TEXT = re.compile(r"\\(?:text\w*|mathrm|mbox)\s*\{[^{}]*\}")  # words inside a formula
THOUSANDS = re.compile(r"(?<=\d)\\[,;:! ](?=\d{3}(?!\d))")  # LaTeX spaces between groups of digits: 1\,234
COMMAS = re.compile(r"(?<=\d),(?=\d{3})")
CHARS_MAX = 10_000  # of the end of a completion: math-verify's time grows with the square, 2 s here

# a function name, a single letter, a number: never two letters in a row that are not listed, nor a dot after a letter or bracket
_FUNCTIONS = "exp|log|ln|sqrt|sin|cos|tan|cot|sec|csc|asin|acos|atan|sinh|cosh|tanh|asinh|acosh|atanh|erf|erfi|pi|Abs"
_NUMBER = r"\d+(?:\.\d*)?|\.\d+"
_ARITHMETIC = rf"(?:{_NUMBER}|\*(?!\*)|[\s+\-/()])*+"  # a power is none of the four operations, and 9**9**9 takes for ever
_FORMULA = rf"(?:{_NUMBER}|(?<![A-Za-z])(?:{_FUNCTIONS}|[A-Za-z])(?![A-Za-z_])|[\s+\-*/()])*+"
_LISTS = r"[\w\s,\[\]'\"-]*+"  # lists of numbers and words: nothing can be called without a parenthesis
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
    """The verifier's score of the last `<answer>` of the completion, 0 to 1; ValueError for a prompt of another source.

    Where the verifier would evaluate the answer, one outside EVALUATED's grammar counts as none.
    """
    made = prompt["metadata"].get("reasoning_gym")
    if made is None:
        raise ValueError(f"prompt {prompt['prompt_id']}: reward reasoning_gym needs rows of a reasoning_gym source")
    entry = made["entry"]
    if isinstance(entry, str):  # Python literals: some verifiers compare tuples
        entry = ast.literal_eval(entry)
    assert "answer" in entry
    dataset = _dataset(made["dataset"], canonical_json(made["args"]))
    from reasoning_gym.utils import extract_answer

    answer = extract_answer(completion)
    grammar = EVALUATED.get(entry.get("metadata", {}).get("source_dataset", ""), EVALUATED.get(made["dataset"]))
    if answer is not None and grammar is not None and not grammar.fullmatch(answer):
        answer = None
    return float(dataset.score_answer(answer, entry))


@lru_cache(maxsize=64)
def _dataset(name: str, arguments: bytes) -> Any:
    import reasoning_gym  # takes seconds, which the factory in `registry` has spent

    return reasoning_gym.create_dataset(name, **json.loads(arguments))


def score_math(prompt: RewardPrompt, completion: str) -> float:
    """1.0 when the final answers are equal, else 0.0; ValueError for a prompt without an answer that can be read.

    The final answer is the text in the last `<answer>` tags, or after the last `####`, or else what math-verify finds in the
    last CHARS_MAX characters: the last `\\boxed{}`, formula or number.
    """
    return float(_equal(_gold(prompt), _final(completion)))


def score_deepscaler(prompt: RewardPrompt, completion: str) -> float:
    """As DeepScaleR scores: 1.0 when the last `\\boxed{}` after the thinking block is equal to the answer, else 0.0.

    The block has to be closed, once; its opening tag may be in the prompt, where many chat templates put it. ValueError as in
    `score_math`.
    """
    gold = _gold(prompt)
    thinking, closed, answer = completion.partition("</think>")
    if not closed or thinking.count("<think>") > 1 or "<think>" in answer or "</think>" in answer:
        return 0.0
    box = last_box(answer[answer.rfind(BOX) :]) if BOX in answer else None  # one that is not closed is no answer
    return float(box is not None and _equal(gold, _as_formula(box)))


def _gold(prompt: RewardPrompt) -> list[Any]:
    if prompt["answer"] is None:
        raise ValueError(f"prompt {prompt['prompt_id']} has no answer to compare with")
    reference = _reference(prompt["answer"])
    gold = _parse(reference)
    if not gold:
        raise ValueError(
            f"prompt {prompt['prompt_id']}: math-verify finds no formula or number in the answer {prompt['answer'][:80]!r}; "
            "the rewards exact and reasoning_gym compare text"
        )
    read = COMMAS.sub("", gold[-1])  # the text of the value, which comes first
    rest = COMMAS.sub("", reference).replace(read, "", 1)
    if _is_prose(reference) and (re.search(r"\d", rest) or re.search(r"\d\s+\d", read)):
        raise ValueError(
            f"prompt {prompt['prompt_id']}: the answer {prompt['answer'][-80:]!r} is prose with several numbers, and which of "
            "them is the answer cannot be told; write it as one value or formula"
        )
    return gold


def _equal(gold: list[Any], final: str) -> bool:
    return bool(verify(gold, _parse(final[-CHARS_MAX:]), timeout_seconds=None, allow_set_relation_comp=True))


def _parse(text: str) -> list[Any]:
    return parse(text, parsing_timeout=None)  # pyright: ignore[reportArgumentType]


def _final(text: str) -> str:
    tagged = last_answer(text)
    if tagged is not None:
        return _as_formula(tagged)
    return _as_formula(text.rpartition("####")[2]) if "####" in text else _cleaned(text)


def _reference(answer: str) -> str:
    """The reference answer: GSM8K's are a whole solution that ends in `#### 42`, others a bare formula."""
    return _as_formula(answer.rpartition("####")[2])


def _as_formula(text: str) -> str:
    """Marks a bare formula as one; prose ("18 dollars") stays prose, where math-verify finds the number."""
    bare = _cleaned(text.strip())
    return bare if _is_prose(bare) or "$" in bare or "\\boxed" in bare else f"${bare}$"


def _is_prose(text: str) -> bool:
    """Whether it holds words outside of formulas; what has its formulas marked is none."""
    words = re.search(r"(^|\s)[A-Za-z]{3,}", LATEX_TEXT.sub("", text)) is not None
    return words and "$" not in text and "\\boxed" not in text


def _cleaned(text: str) -> str:
    """Without what math-verify stumbles over: prices in LaTeX, typographic minus signs, spaces between thousands."""
    return THOUSANDS.sub("", text.replace("\\$", "").replace("\u2212", "-"))
