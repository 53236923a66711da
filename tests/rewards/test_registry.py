"""Reward functions: what scores, what does not, and names that do not resolve."""

from typing import Any

import pytest

from rlpipe.base.errors import UserError
from rlpipe.config.sections import DataConfig
from rlpipe.data.sources import load_prompts
from rlpipe.rewards.registry import check_names, resolve


def prompt(answer: str | None) -> dict[str, Any]:
    return {"prompt_id": "p/0", "messages": [], "answer": answer, "metadata": {}}


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        ("<answer>x</answer>", 1.0),
        ("I think\nso. <answer>x y</answer>\n", 1.0),
        ("<answer></answer>", 0.0),
        ("<answer>x</answer> and more", 0.0),
        ("<answer>x</answer><answer>y</answer>", 0.0),
        ("<answer><answer>x</answer>", 0.0),
        ("x</answer>", 0.0),
        ("<answer>x", 0.0),
        ("", 0.0),
    ],
)
def test_format(completion: str, reward: float) -> None:
    assert resolve("format")(prompt(None), completion) == reward


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        ("<answer>Abc</answer>", 1.0),
        ("<answer>x</answer><answer> abc </answer>", 1.0),
        ("<answer>abcd</answer>", 0.0),
        ("abc", 0.0),
    ],
)
def test_exact(completion: str, reward: float) -> None:
    assert resolve("exact")(prompt("abc"), completion) == reward


@pytest.mark.parametrize(
    ("answer", "completion", "reward"),
    [
        ("42", "so #### 42", 1.0),
        ("They sold 24.\n#### 72", "in May 24, so in total 72 clips", 1.0),
        ("72", "#### 24", 0.0),
        ("1,234", "#### 1234", 1.0),
        ("18", "#### 18 dollars", 1.0),
        ("18", "The price is \\$18.", 1.0),
        ("$18", "#### $18", 1.0),
        ("1/2", "thus \\boxed{0.5}", 1.0),
        ("\\frac{3}{4}", "the answer is $\\frac{6}{8}$", 1.0),
        ("x^2+1", "\\boxed{1+x^2}", 1.0),
        ("5", "<answer>5</answer>", 1.0),
        ("5", "5 or 6: <answer>6</answer>", 0.0),
        ("5", "####", 0.0),
        ("5", "", 0.0),
        ("12", "\\boxed{x^2+12}", 0.0),
        ("12", "#### x^2 + 12", 0.0),
    ],
)
def test_math(answer: str, completion: str, reward: float) -> None:
    assert resolve("math")(prompt(answer), completion) == reward


def test_math_needs_an_answer() -> None:
    with pytest.raises(ValueError, match="p/0 has no answer"):
        resolve("math")(prompt(None), "5")


def made_by(name: str, count: int) -> DataConfig:
    return DataConfig.model_validate(
        {"name": "made", "use": "rl", "source": f"reasoning_gym:{name}", "rows_max": count}
    )


@pytest.mark.parametrize("name", ["spell_backward", "rearc", "knights_knaves", "leg_counting"])
def test_reasoning_gym_scores_with_the_data_sets_own_verifier(name: str) -> None:
    reward = resolve("reasoning_gym")
    data = made_by(name, 2)
    for made in load_prompts(data, seed=5):
        assert reward(made.as_json(), f"hm <answer>{made.answer}</answer>") == 1.0
        assert reward(made.as_json(), "<answer>~</answer>") < 1.0
        assert reward(made.as_json(), str(made.answer)) < 1.0


def test_reasoning_gym_gives_part_of_the_reward() -> None:
    data = made_by("spell_backward", 1)
    made = load_prompts(data, seed=5)[0]
    assert made.answer
    almost = made.answer[:-1] + ("x" if made.answer[-1] != "x" else "y")
    assert 0 < resolve("reasoning_gym")(made.as_json(), f"<answer>{almost}</answer>") < 1


def test_a_path(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_rewards_here.py").write_text("def length(prompt, completion):\n    return len(completion)\n")
    monkeypatch.chdir(tmp_path)
    assert resolve("my_rewards_here:length")(prompt(None), "abc") == 3


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("nope", ["rl.rewards", "'nope'", "reasoning_gym, math, deepscaler, exact, format"]),
        ("no_such_module_at_all:f", ["rl.rewards", "no_such_module_at_all", "ModuleNotFoundError", "tried"]),
        ("json:nope", ["json", "has no 'nope'"]),
        ("json:__name__", ["cannot be called"]),
        ("json:", ["package.module:function"]),
        (":f", ["package.module:function"]),
    ],
)
def test_names_that_do_not_resolve(name: str, said: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        resolve(name)
    assert all(part in str(caught.value) for part in said), caught.value


def test_names_are_checked_together() -> None:
    check_names({"math": 1.0, "a.b:f": 0.5, "a.c:g": 0.5}, {})
    check_names({}, {})
    with pytest.raises(UserError, match="'nope'"):
        check_names({"math": 1.0, "nope": 1.0}, {})
    with pytest.raises(UserError, match="two rewards are called 'f'"):
        check_names({"a:f": 1.0, "b:f": 1.0}, {})
