"""`math` and `deepscaler`: the author's truth, what math-verify itself says, and what ours says, on
the pairs of math_pairs.py and of math_hard_pairs.py, whose references are easily read in part."""

import re

import pytest
from math_verify import parse, verify

from rlpipe.rewards.math_reward import read_reference
from rlpipe.rewards.references import references_line
from rlpipe.rewards.registry import resolve
from tests.math_hard_pairs import HARD, HELD_OUT, ORDINARY, pairs, verdict
from tests.math_pairs import PAIRS
from tests.paths import ROOT

DOCS = ROOT / "docs" / "rewards.md"
ROW = re.compile(r"^\| `` (.*?) `` \| `` (.*?) `` \| (yes|no) \| (yes|no) \| (yes|no) \|$", flags=re.MULTILINE)
BIG = 1_000_000


def ours(answer: str, completion: str, name: str = "math") -> bool:
    return bool(resolve(name)({"prompt_id": "p/0", "answer": answer}, completion))


def plain(answer: str, completion: str) -> bool:
    """math-verify as its README uses it: LaTeX has to be in an environment, so a bare reference is
    put into one. Without its limits of 5 s: a busy machine takes longer."""
    marked = any(mark in answer for mark in ("$", "\\boxed", "####"))
    gold, given = (parse(text, parsing_timeout=None) for text in (answer if marked else f"${answer}$", completion))
    return bool(verify(gold, given, timeout_seconds=None))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_math_is_right_on_all_pairs_but_those_that_the_docs_list() -> None:
    pairs = [pair for topic in PAIRS.values() for pair in topic]
    assert len(pairs) >= 300
    assert len({pair[:2] for pair in pairs}) == len(pairs)
    found = [(answer, completion, truth, plain(answer, completion), ours(answer, completion)) for answer,
             completion, truth in pairs]  # fmt: skip
    listed = [
        (answer, completion, *(said == "yes" for said in rest))
        for answer, completion, *rest in ROW.findall(DOCS.read_text())
    ]
    assert [row for row in found if len(set(row[2:])) > 1] == listed
    assert sum(row[2] != row[4] for row in found) < sum(row[2] != row[3] for row in found)
    assert not [row for row in found if row[4] and not row[2] and not row[3]], "a reward for what nobody thinks right"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(("name", "thinking"), [("math", ""), ("deepscaler", "<think>hm</think>")])
def test_no_wrong_answer_to_what_is_easily_read_in_part(name: str, thinking: str) -> None:
    """deepscaler wants a box: of the others it is asked whether the wrong ones are wrong."""
    reward = resolve(name)
    marked = [
        pair
        for pair in pairs(HARD)
        if name == "math" or ("box" in pair[2] and not ("####" in pair[2] or "<answer>" in pair[2]))
    ]
    assert len(marked) >= 300
    given = {pair: verdict(reward, pair[1], thinking + pair[2]) for pair in marked}
    assert [pair for pair, reward in given.items() if reward is None] == []
    assert [pair for pair, reward in given.items() if reward == 1.0 and not pair[3]] == [], "a wrong answer"
    refused = [pair[1:3] for pair, reward in given.items() if reward == 0.0 and pair[3]]
    known = [(r"33\frac{1}{3}\%", r"\frac13"), (r"\gcd(12,18)=6", "6")]
    assert refused == [(reference, f"So the answer is $\\boxed{{{answer}}}$.") for reference, answer in known], (
        "as docs/rewards.md says"
    )


@pytest.mark.slow
def test_of_the_held_out_pairs_no_wrong_answer_is_right() -> None:
    given = {pair: verdict(resolve("math"), pair[1], pair[2]) for pair in pairs(HELD_OUT)}
    assert len(given) >= 570 and sum(not pair[3] for pair in given) >= 260
    assert [pair for pair, reward in given.items() if reward is None] == []
    assert [pair for pair, reward in given.items() if reward == 1.0 and not pair[3]] == [], "a wrong answer"
    refused = [pair[1:3] for pair, reward in given.items() if reward == 0.0 and pair[3]]
    assert len(refused) <= 21, refused


@pytest.mark.parametrize("digits", ["7319" * 2250, "12" * 1500, "1" * 3000, "12" * 190])
def test_many_digits_are_no_pattern_to_look_for(digits: str) -> None:
    assert not ours("5", f"\\boxed{{0.{digits}}}"), "it took minutes"


HUGE = [
    "3^{4^{92}}",
    "10^{10^{10}}",
    "2^{2^{2^{100}}}",
    "9^{9^{9^9}}",
    "(10^{9})!",
    r"\binom{10^9}{10^8}",
    "(1, 9^{9^{9^9}})",
    "2^{1000000000}",
]
MULTIPLIED_OUT = [
    "(x+1)^{10000}",
    "((x+1)^{50}+1)^{50}",
    "(x+y+z)^{200}",
    "(x+1)^9(y+1)^9(z+1)^9",
    r"\sum_{k=1}^{10^9} k^k",
    r"\prod_{k=1}^{10^8} k",
    "1e10000000000",
]


@pytest.mark.parametrize("formula", HUGE + MULTIPLIED_OUT)
def test_what_is_too_long_to_be_worked_out_is_compared_as_text(formula: str) -> None:
    assert read_reference(formula).values is None
    for completion in (
        f"\\boxed{{{formula}}}",
        f"so ${formula}$",
        f"so {formula}",
        f"${formula}$ and so $\\text{{no}}$",
    ):
        assert not ours("42", completion) and not ours("2^{1000}", completion)
    assert ours(formula, f"\\boxed{{{formula}}}") and not ours(formula, "\\boxed{42}")


@pytest.mark.parametrize(
    ("reference", "same", "other"),
    [
        ("2^{1000}", "1024^{100}", "1024^{101}"),
        ("10^{100}", "100^{50}", "10^{99}"),
        ("2^{2023}", "2 \\cdot 2^{2022}", "2^{2022}"),
        ("100!", "100 \\cdot 99!", "99!"),
        ("3^{2^{10}}", "3^{1024}", "3^{20}"),
        ("2023^{2023}", "2023 \\cdot 2023^{2022}", "2023^{2022}"),
        ("(x+1)^{100}", "(1+x)^{100}", "(x+1)^{99}"),
        (r"e^{-\frac{(x-1)^2}{2}}", r"\exp(-\frac{(x-1)^2}{2})", r"e^{-\frac{(x+1)^2}{2}}"),
        (r"\sum_{k=1}^{2023} k", "2047276", "2023"),
    ],
)
def test_large_powers_are_compared_by_value(reference: str, same: str, other: str) -> None:
    assert read_reference(reference).values is not None
    assert ours(reference, f"\\boxed{{{same}}}") and not ours(reference, f"\\boxed{{{other}}}")


def test_ordinary_references_are_compared_by_value() -> None:
    assert len(set(ORDINARY)) >= 150
    assert [reference for reference in ORDINARY if read_reference(reference).values is None] == []


def test_what_plan_says_of_references() -> None:
    assert references_line(["42", "1,000", "so\n#### -3.5", *ORDINARY[:10]]) == ""
    told = references_line([r"x \equiv 3 \pmod 7", "10:30 am", "42", "Paris", r"\frac{1}{2}"])
    assert told.startswith(
        "of 5 references, 2 are compared as text (the first: 'x \\\\equiv 3 \\\\pmod 7') and 1 cannot be scored, "
        "reward_prompt"
    )
    assert "'Paris': math-verify finds no formula or number" in told
    assert references_line(["7"] * 100_000) == ""


def test_a_reference_is_as_text_where_numbers_of_it_would_be_lost() -> None:
    lost = [
        r"x \equiv 3 \pmod 7",
        "10:30 am",
        r"45^\circ 30'",
        "5 ft 3 in",
        r"1,2,\ldots,10",
        "1011_2",
        "1:2:3",
        "P(X=3)=0.25",
        "12 R 5",
    ]
    assert [reference for reference in lost if read_reference(reference).values is not None] == []
    assert all(ours(reference, f"\\boxed{{{reference}}}") for rows in HARD.values() for reference, *_ in rows)


@pytest.mark.parametrize(
    "mark", ["(", "{", "[", "$", "-", "1+", "1 ", "\\boxed{", "\\frac{", "<answer>", "####", "answer "]
)
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


SEVERAL = [
    "from 3 to 5 apples",
    "3 apples and 5 pears",
    "2 1/2 cups",
    "5 km per 1 hour",
    "She buys 3. #### 3 or 5 apples",
]


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
