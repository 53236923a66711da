"""`math` and `deepscaler`: the author's truth, what math-verify itself says, and what ours says, on the pairs of math_pairs.py."""

import re
from pathlib import Path

import pytest
from math_verify import parse, verify

from rlpipe.rewards.registry import resolve
from tests.math_pairs import PAIRS

DOCS = Path(__file__).parent.parent / "docs" / "rewards.md"
ROW = re.compile(r"^\| `` (.*?) `` \| `` (.*?) `` \| (yes|no) \| (yes|no) \| (yes|no) \|$", flags=re.MULTILINE)
BIG = 1_000_000


def ours(answer: str, completion: str, name: str = "math") -> bool:
    return bool(resolve(name)({"prompt_id": "p/0", "answer": answer}, completion))


def plain(answer: str, completion: str) -> bool:
    """math-verify as its README uses it: LaTeX has to be in an environment, so a bare reference is put into one."""
    marked = any(mark in answer for mark in ("$", "\\boxed", "####"))
    return bool(verify(parse(answer if marked else f"${answer}$"), parse(completion)))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_math_is_right_on_all_pairs_but_those_that_the_docs_list() -> None:
    pairs = [pair for topic in PAIRS.values() for pair in topic]
    assert len(pairs) >= 300
    assert len({pair[:2] for pair in pairs}) == len(pairs)
    found = [(answer, completion, truth, plain(answer, completion), ours(answer, completion)) for answer, completion, truth in pairs]  # fmt: skip
    listed = [
        (answer, completion, *(said == "yes" for said in rest)) for answer, completion, *rest in ROW.findall(DOCS.read_text())
    ]
    assert [row for row in found if len(set(row[2:])) > 1] == listed
    assert sum(row[2] != row[4] for row in found) < sum(row[2] != row[3] for row in found)
    assert not [row for row in found if row[4] and not row[2] and not row[3]], "a reward for what nobody thinks right"


@pytest.mark.parametrize("mark", ["(", "{", "[", "$", "-", "1+", "1 ", "\\boxed{", "\\frac{", "<answer>", "####", "answer "])
@pytest.mark.parametrize("name", ["math", "deepscaler"])
def test_a_megabyte_of_one_mark_is_wrong_and_no_error(mark: str, name: str) -> None:
    assert not ours("42", "<think></think>" + mark * (BIG // len(mark)), name)


@pytest.mark.parametrize(
    ("answer", "number"),
    [
        ("1,000 apples", "1000"),
        ("3/4 of a cake", "0.75"),
        ("10^5 meters", "100000"),
        ("\\frac{1}{2} meters", "1/2"),
        ("2,500 dollars", "2500"),
        ("18.50 dollars", "18.5"),
        ("-3 degrees", "-3"),
        ("15% of them", "15%"),
        ("12 PM noon", "12"),
        ("2 + 3 = 5 #### 5 apples", "5"),
    ],
)
def test_prose_with_one_number_is_that_number(answer: str, number: str) -> None:
    assert ours(answer, number) and not ours(answer, "4")


def test_the_answer_at_the_end_of_a_long_completion_counts() -> None:
    assert ours("42", "1 2 3 " * 20_000 + "so \\boxed{42}")
    assert ours("42", "<answer>41</answer>" + "so " * 20_000 + "<answer>42</answer>")


SEVERAL = ["from 3 to 5 apples", "3 apples and 5 pears", "2 1/2 cups", "5 km per 1 hour", "She buys 3. #### 3 or 5 apples"]


@pytest.mark.parametrize("answer", [None, "", "Paris", "####", "no number here", *SEVERAL])
def test_a_prompt_without_an_answer_to_read_is_an_error_and_not_a_zero(answer: str | None) -> None:
    with pytest.raises(ValueError, match="p/0"):
        resolve("math")({"prompt_id": "p/0", "answer": answer}, "5")


@pytest.mark.parametrize(
    ("completion", "right"),
    [
        ("<think>6 * 7</think> so \\boxed{42}", True),
        ("6 * 7</think> so \\boxed{42}", True),  # the prompt opened it
        ("<think></think>\\boxed{42}", True),
        ("<think>\\boxed{41}</think>\\boxed{41} no, \\boxed{\\frac{84}{2}}", True),
        ("<think>hm</think>\\boxed{43}", False),
        ("so \\boxed{42}", False),
        ("<think>so \\boxed{42}", False),
        ("<think>so \\boxed{42}</think>", False),
        ("<think>hm</think> 42", False),
        ("<think>hm</think> #### 42", False),
        ("<think>hm</think> \\boxed{42", False),
        ("<think>hm</think><think>\\boxed{42}", False),
        ("<think>a</think><think>b</think>\\boxed{42}", False),
        ("<think><think>a</think>\\boxed{42}", False),
        ("</think>\\boxed{}", False),
        ("", False),
    ],
)
def test_deepscaler_wants_a_closed_thinking_block_and_then_a_box(completion: str, right: bool) -> None:
    assert ours("42", completion, "deepscaler") is right
