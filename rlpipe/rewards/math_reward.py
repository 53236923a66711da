"""The rewards `math` and `deepscaler`: is the final answer equal to the reference, by math-verify
where it reads both completely.

Text that math-verify reads only in part is compared as text. So a number inside of a congruence, a
time or a vector is never taken for the answer.
"""

from __future__ import annotations

import dataclasses
import logging
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from latex2sympy2_extended.math_normalization import normalize_latex
from math_verify import LatexExtractionConfig, parse

from rlpipe.algorithms.answers import LATEX_TEXT, boxed_answer, marked_answer
from rlpipe.base.errors import PromptFault
from rlpipe.records.prompt import RewardPrompt
from rlpipe.rewards.equality import all_at_once, are_equal, smallest_exponent
from rlpipe.rewards.formula import MEASURES, THOUSANDS, bare, last_unit, letters, mended, same_text, says_more, scaled
from rlpipe.rewards.magnitude import FORMULA_CHARS_MAX, is_too_long

# math-verify's own timeouts are signals, which work in no thread; the pool kills the process
# instead. It warns once of that.
logging.getLogger("math_verify.parser").setLevel(logging.ERROR)

CHARS_MAX = 10_000  # of the end of a completion: math-verify's time grows with the square, 2 s here
REFERENCES_MAX = 1024  # that are kept parsed: a group of rollouts has one
NORMAL = LatexExtractionConfig().normalization_config
# `mended` has left out the unit
FORMULA_ALONE = [LatexExtractionConfig(normalization_config=dataclasses.replace(NORMAL, units=False))]
# one sign again and again, in which the grammar looks for meaning
NO_FORMULA = re.compile(r"([^\w\s.])\1{7}")
COMMAS = re.compile(r"(?<=\d),(?=\d{3})")
ENVIRONMENTS = re.compile(
    r"\$\$([^$]+)\$\$|(?<!\\)\$((?:[^$\n\\]|\\.)+)\$|\\\(((?:[^\\]|\\(?![()]))*)\\\)|\\\[((?:[^\\]|\\(?![\[\]]))*)\\\]"
)
# with what it says: \textbf{(B) } 12
CHOICE = re.compile(r"\\(?:text\w*|mathrm|mathbf)\s*\{\s*\(([A-J])\)\s*\}\s*(\S.*)")
OTHER_CHOICE = re.compile(r"(?<![A-Za-z\\])[A-Z](?![A-Za-z])|\b(?:or|and)\b")
AND = re.compile(r"(?<![a-zA-Z\\])and(?![a-zA-Z])|\\(?:land|wedge)(?![a-zA-Z])|∧")
WORD = re.compile(r"(?:^|(?<=\s))(?!(?:and|mod|sin|cos|tan|log|exp|gcd|lcm)\b)[A-Za-z]{3,}")
# what parts a line too, beside words
SENTENCE = re.compile(r"(?<=[.;?!])\s+|\b(?:[Ss]o|[Ii]s|[Ww]e|[Ii]t|[Ii]f|[Tt]o)\b")
# a number beside it means more
IN_PART = re.compile(
    r"\\[a-zA-Z]|\d\s*:\s*\d|\d\s*(?:['\"°!]|\.\.)|[_^]|\d\s+[A-Z]\s+\d|≡|\bmod\b|\d\s*[aApP]\.?[mM]\b"
)


@dataclass(frozen=True)
class ReferenceAnswer:
    """A reference answer.

    `values` is math-verify's reading of all of it; None where it is compared as text.
    """

    text: str
    values: list[Any] | None = None
    unit: str = ""
    letters: frozenset[str] = frozenset()  # in which case it has them; none where it has no symbols
    exponent: int = 0  # of the smallest number in it that is not 0, 10 ** exponent; 0 from 1 on


def score_math(prompt: RewardPrompt, completion: str) -> float:
    """1.0 when the final answers are equal, else 0.0; PromptFault for a prompt without a readable
    answer.

    The final answer is the marked one (`marked_answer`), or else the one that math-verify finds in
    the last CHARS_MAX characters: the last formula or number.
    """
    reference = _reference(prompt)
    answer = marked_answer(completion)
    return float(
        _is_in_text(reference, completion[-CHARS_MAX:]) if answer is None else _is(reference, answer[-CHARS_MAX:])
    )


def score_deepscaler(prompt: RewardPrompt, completion: str) -> float:
    """DeepScaleR's score: 1.0 when the last box after the thinking block is equal to the answer,
    else 0.0.

    The block must be closed, once; its opening tag may be in the prompt, where many chat templates
    put it. PromptFault as in `score_math`.
    """
    reference = _reference(prompt)
    thinking, closed, rest = completion.partition("</think>")
    if not closed or thinking.count("<think>") > 1 or "<think>" in rest or "</think>" in rest:
        return 0.0
    answer = boxed_answer(rest)
    return float(answer is not None and _is(reference, answer[-CHARS_MAX:]))


def _reference(prompt: RewardPrompt) -> ReferenceAnswer:
    if prompt["answer"] is None:
        raise PromptFault(f"prompt {prompt['prompt_id']} has no answer to compare with")
    try:
        return read_reference(prompt["answer"])
    except ValueError as error:
        raise PromptFault(f"prompt {prompt['prompt_id']}: {error}") from error


@lru_cache(REFERENCES_MAX)
def read_reference(answer: str) -> ReferenceAnswer:
    """Reads the reference answer as a value, or as text to compare. ValueError where neither is
    possible, or it says several things.

    Those of GSM8K are a whole solution that ends in `#### 42`, others a formula, bare or in a box
    or in `$`.
    """
    text = answer.rpartition("####")[2].strip()
    text = bare(boxed_answer(text) or text)
    formulas = _formulas(text)
    if len(formulas) == 1:
        text = formulas[0]
    elif not formulas and _is_prose(text) and not MEASURES.fullmatch(text):
        return _of_prose(text)
    spelled = same_text(text)
    if len(formulas) > 1:
        values = _parsed(text) if all(map(_whole, formulas)) else None
    else:
        values = _whole(text)
    if not re.search(r"\w", spelled):
        raise ValueError(f"there is no formula, number or word in the answer {answer[:80]!r}")
    symbols = letters(text) if values and values[0].free_symbols else frozenset[str]()
    return ReferenceAnswer(spelled, values, last_unit(text), symbols, smallest_exponent(values[0]) if values else 0)


def _of_prose(text: str) -> ReferenceAnswer:
    """The number in words with one number, such as "18 dollars"."""
    values = _parsed(_cleaned(text))
    if not values:
        raise ValueError(
            f"math-verify finds no formula or number in the answer {text[:80]!r}; the rewards exact and reasoning_gym"
            " compare text"
        )
    if not _is_one_number(text, values):
        raise ValueError(
            f"the answer {text[-80:]!r} is prose with several numbers, and which of them is the answer cannot be told; "
            "write it as one value or formula"
        )
    return ReferenceAnswer(same_text(text), values, last_unit(text), exponent=smallest_exponent(values[0]))


def _is(reference: ReferenceAnswer, answer: str) -> bool:
    """True when a text that is only an answer equals the reference."""
    text = bare(answer)
    if _in_other_case(reference.letters, letters(text)):
        return False
    if (choice := CHOICE.fullmatch(text)) and not OTHER_CHOICE.search(choice[2]):
        return _is(reference, choice[1] if len(reference.text) == 1 else choice[2])
    if reference.text == same_text(text):
        return True
    if reference.values is None:
        # the base of a number is in the question too
        based = re.fullmatch(r"(\d+)_\w+", reference.text)
        return based is not None and same_text(text) == based[1] and "_" not in text
    if _formulas(text):
        return _is_in_text(reference, text)
    unit, text = last_unit(text), text.replace("\\$", "").replace("$", "")
    if unit and reference.unit and unit != reference.unit:
        return False
    if _is_prose(text):
        values = _parsed(_cleaned(text)) if re.search(r"\d", text) else []
        return bool(values) and _is_one_number(text, values) and _equals(reference, values)
    return _equals(reference, _whole(text) or [])


def _equals(reference: ReferenceAnswer, values: list[Any]) -> bool:
    assert reference.values is not None
    return bool(values) and are_equal(reference.values, values, reference.exponent)


def _in_other_case(expected: frozenset[str], given: frozenset[str]) -> bool:
    """True when one has only R and the other only r: two different radii."""
    return any(
        letter.swapcase() in given and not {letter} & given and letter.swapcase() not in expected for letter in expected
    )


def _is_in_text(reference: ReferenceAnswer, text: str) -> bool:
    """True when a text without a marked answer ends in the reference: its last formula, or
    number.
    """
    formulas = _formulas(text)
    if formulas and is_too_long(formulas[-1]):
        return reference.text == same_text(formulas[-1])
    for formula in filter(is_too_long, formulas):
        text = text.replace(formula, "")
    text = scaled(re.sub(r"</?answer>", "", text)).strip()
    line = text.rpartition("\n")[2].replace("**", "")
    if reference.values is None or not (formulas or WORD.search(LATEX_TEXT.sub("", line))):
        return any(_is(reference, text) for text in [*formulas[-1:], line] if not _formulas(text))
    values = _parsed(_cleaned(text))
    if not (_equals(reference, values) or _equals(reference, _read_again(values))):
        return False
    number = values[-1]  # as text
    for formula in formulas:
        if normalize_latex(formula, NORMAL) == number:
            return _is(reference, formula)
    line = LATEX_TEXT.sub(r"\\text{}", line)
    if measured := MEASURES.search(line):
        return _is(reference, measured[0])
    for part in reversed(WORD.split(SENTENCE.sub(" then ", line))):
        before, here, after = COMMAS.sub("", part).rpartition(COMMAS.sub("", number))
        if here and (re.search(r"\d", before + after) or IN_PART.search(part) or re.match(r"[A-Za-z+&|]", after)):
            return _is(reference, part.strip(" \t.,:;*"))
        if here and not re.fullmatch(r"-?[\d.,]+", number):
            return _is(reference, number)
        if here:
            unit = last_unit(number + line.rpartition(number)[2][:20])
            return not (unit and reference.unit) or unit == reference.unit
    return True


def _read_again(values: list[Any]) -> list[Any]:
    """The value of the text that math-verify cut out of another, where it differs from its first
    reading: "3/5." was read as a float. Else empty.
    """
    whole = _whole(values[-1]) if values else None
    return whole if whole is not None and whole[0] != values[0] else []


def _whole(formula: str) -> list[Any] | None:
    """math-verify's value of a formula, if it covers all of the text; else None."""
    if len(formula) > FORMULA_CHARS_MAX or is_too_long(text := mended(formula)) or NO_FORMULA.search(text):
        return None
    values = parse(f"${text}$", FORMULA_ALONE, parsing_timeout=None)  # pyright: ignore[reportArgumentType]
    if len(values) != 2 or isinstance(values[0], str) or says_more(text, values[1]):
        return None
    return [all_at_once(values[0]), values[1]] if AND.search(formula) else values


def _parsed(text: str) -> list[Any]:
    """The reading of a text by math-verify: [the value, the text of it (or of something else that
    it tried before)]; empty where it finds nothing, or a formula that is too long."""
    values = parse(text, parsing_timeout=None)  # pyright: ignore[reportArgumentType]
    return [] if values and is_too_long(values[-1]) else values


def _formulas(text: str) -> list[str]:
    """The marked formulas of a text."""
    return [next(filter(None, groups)) for groups in ENVIRONMENTS.findall(text) if any(groups)]


def _is_one_number(text: str, values: list[Any]) -> bool:
    read = COMMAS.sub("", values[-1])
    rest = COMMAS.sub("", _cleaned(text)).replace(read, "", 1)
    return not re.search(r"\d", rest) and not re.search(r"\d\s+\d", read)


def _is_prose(text: str) -> bool:
    """True when it has words outside of formulas; a text with marked formulas is not prose."""
    words = WORD.search(LATEX_TEXT.sub("", text)) is not None and not re.fullmatch(r"[A-Z]+", text)
    return words and "$" not in text and "\\boxed" not in text


def _cleaned(text: str) -> str:
    """The text without forms that math-verify cannot read: prices in LaTeX, typographic minus
    signs, spaces between thousands.
    """
    text = re.sub(r"(\d/\d+)\.(?!\d)", r"\1", text)  # a fraction that ends a sentence
    return THOUSANDS.sub("", text.replace("\\$", "").replace("\u2212", "-"))
