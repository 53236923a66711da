"""The calculator: what it computes, what it refuses, how a rollout goes,
and the data that goes with it."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlpipe.data.sources import in_part
from rlpipe.extras.environments.calculator import EXPRESSION_CHARS_MAX, Calculator, calculate, demonstrations, problems
from rlpipe.extras.environments.protocol import Step

NUMBERS = st.integers(-999, 999).map(str)


@given(st.lists(st.tuples(st.sampled_from("+-*"), NUMBERS), max_size=12), NUMBERS, st.sampled_from(["", " "]))
def test_it_computes_what_python_computes(rest: list[tuple[str, str]], first: str, space: str) -> None:
    expression = first + "".join(f"{space}{operator}{space}{number}" for operator, number in rest)
    if len(expression) <= EXPRESSION_CHARS_MAX:
        assert calculate(expression) == eval(expression)


@pytest.mark.parametrize(
    "expression",
    ["", " ", "+", "-", "3+", "*3", "3 4", "3--", "3---4", "2**8", "8/2", "(3)", "1.5", "0x10",
     "1e3", "abs(1)", "__import__('os')",
     "٣*٤", "3\n\n*", "9" * 101, "[" * 1_000_000],
)  # fmt: skip
def test_anything_else_is_refused(expression: str) -> None:
    with pytest.raises(ValueError):
        calculate(expression)


@given(st.text(max_size=120))
def test_no_text_does_worse_than_being_refused(text: str) -> None:
    try:
        assert isinstance(calculate(text), int)
    except ValueError:
        return
    assert re.fullmatch(r"[\d+\-*\s]+", text)


def started(answer: str = "148") -> Calculator:
    environment, messages = Calculator(), [{"role": "user", "content": "Calculate 37*4"}]
    assert environment.start({"prompt_id": "p/0", "messages": messages, "answer": answer, "metadata": {}}) == messages
    return environment


def test_a_call_is_answered_and_an_answer_judged() -> None:
    environment = started()
    called = environment.step("<tool>37*4</tool>")
    assert called == Step([{"role": "tool", "content": "148"}], metrics={"tool_calls": 1.0, "tool_used": 1.0})
    assert environment.step("<tool>37*</tool>") == Step(
        [{"role": "tool", "content": "error"}], metrics={"tool_calls": 1.0}
    )
    assert environment.step("so <answer> 148 </answer>") == Step(done=True, reward=1.0)


@pytest.mark.parametrize(
    ("completion", "reward"),
    [("<answer>148</answer>", 1.0), ("<answer>147</answer>", 0.0), ("<answer></answer>", 0.0), ("148", 0.0), ("", 0.0),
     ("<answer>147</answer><answer>148</answer>", 0.0), ("<answer>1</answer><tool>37*4</tool>", 0.0),
     ("<tool>37*4", 0.0)],
)  # fmt: skip
def test_what_ends_a_rollout(completion: str, reward: float) -> None:
    assert started().step(completion) == Step(done=True, reward=reward)


def test_the_data_is_right_and_demonstrations_of_held_out_problems_are_held_out() -> None:
    rows = problems(3, 200)
    assert rows == problems(3, 200) != problems(4, 200)
    for row in rows:
        a, b = map(int, re.findall(r"\d+", row["prompt"]))
        assert row["answer"] == str(a * b) and 10 <= min(a, b) <= max(a, b) <= 999
    shown = demonstrations(3, 1000, tool_share=0.3, low=10, high=20)
    with_tool = [row["messages"] for row in shown if len(row["messages"]) == 4]
    assert 0.2 < len(with_tool) / len(shown) < 0.4
    for messages in with_tool:
        environment = started(messages[-1]["content"].removeprefix("<answer>").removesuffix("</answer>"))
        assert environment.step(messages[1]["content"]).messages == [messages[2]]
        assert environment.step(messages[3]["content"]) == Step(done=True, reward=1.0)
        # the split goes by the question, not by what the calculator says
        assert in_part(messages, "heldout", 0.1) == in_part(messages[:1], "heldout", 0.1)
