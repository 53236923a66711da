"""Evaluation metrics: pass@k against drawing every subset, the majority's
answer, names that MLflow can keep."""

from __future__ import annotations

import itertools
import json
import statistics
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlpipe.algorithms.answers import STDERR, answer_text, majority_passes, pass_at_k, set_metrics
from rlpipe.base.values import JsonDict
from rlpipe.records.rollout import Group
from rlpipe.report.curves import _drawn, evaluation_changes, with_errors
from rlpipe.store.audit import by_number
from tests.rows import rollout


@given(st.lists(st.booleans(), min_size=1, max_size=8), st.data())
def test_pass_at_k_is_the_mean_over_all_subsets(passed: list[bool], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(passed)))
    subsets = list(itertools.combinations(passed, k))
    assert pass_at_k(len(passed), sum(passed), k) == pytest.approx(sum(map(any, subsets)) / len(subsets), abs=1e-12)


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("a <answer>1</answer> b <answer>\n 2 </answer>", "2"),
        (r"so \boxed{3} and <answer>4</answer>", "4"),
        (r"first \boxed{1}, then \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"\boxed{5} and \boxed{never closed", "5"),
        ("two\n#### 7\nthree\n####  8 \nend", "8"),
        ("  plain\n", "plain"),
        ("<answer>cut off", "<answer>cut off"),
        ("\\boxed{42}\n#### Check\n6 * 7 = 42", "42"),
        ("\\boxed{42}\n##### 7", "42"),
        ("\\boxed{42}\n#### 2. Check", "42"),
        ("\\boxed{42}\n####", "42"),
        ("\\boxed{41}\n#### 42", "42"),
        ("#### 1\nfirst\n#### 2\nso \\boxed{42}", "42"),
        ("so #### $42$.", "$42$"),
        ("so #### 72 clips", "72 clips"),
        ("\\boxed{71} #### 72 clips", "71"),
        ("no box\n#### Step 1\nso 5", "no box\n#### Step 1\nso 5"),
        (r"\fbox{42}", "42"),
        (r"\boxed 42.", "42"),
        (r"\boxed {42}", "42"),
        (r"\boxed{42} \boxed{} \fbox{ }", "42"),
        (r"\boxed{1} and $\boxed{2}$", "1, 2"),
        (r"\boxed{1} \boxed{2}", "2"),
        (r"\boxed{\boxed{5}}", "5"),
        (r"\boxed{\left\{ x \right.}", r"\left\{ x \right."),
        (r"<answer>so \boxed{5}</answer>", "5"),
        ("", ""),
    ],
)
def test_which_text_is_the_answer(completion: str, answer: str) -> None:
    assert answer_text(completion) == answer


def test_the_most_frequent_answer_counts_and_of_equals_the_first() -> None:
    assert majority_passes(["a", "b", "b"], [False, True, False])  # one completion with that answer passed
    assert not majority_passes(["a", "b", "b"], [True, False, False])
    assert majority_passes(["a", "b", "b", "a"], [True, False, False, True])
    assert not majority_passes(["b", "a", "b", "a"], [False, True, False, True])


def rows_of(rewards: dict[str, list[float]], answers: dict[str, list[str]], parts: JsonDict) -> Group:
    """Rollout 0 (greedy) first."""
    return [
        rollout({"prompt_id": prompt, "rollout_index": index, "reward": reward, "completion": answers[prompt][index],
                 "completion_tokens": [1] * (index + 1), "reward_parts": json.dumps(parts)})
        for prompt, told in rewards.items() for index, reward in enumerate(told)
    ]  # fmt: skip


def test_the_metrics_of_a_set_by_hand() -> None:
    rewards = {"p": [1.0, 0.0, 1.0, 0.0, 0.0], "q": [0.0, 1.0, 1.0, 1.0, 0.5]}
    answers = {"p": ["2", "1", "2", "1", "3"], "q": ["x", "y", "y", "<answer>y</answer>", "z"]}
    assert set_metrics("s", rows_of(rewards, answers, {"format": 0.5}), 1.0) == {
        "s_greedy": 0.5,
        "s_pass_at_1": 0.5,
        "s_reward_mean": 4.5 / 8,
        "s_length_tokens_mean": 3.5,
        "s_pass_at_2": pytest.approx((1 - 3 / 6 + 1) / 2),  # p: 3 of its 6 pairs have no pass
        "s_pass_at_4": 1.0,
        "s_maj_at_4": 0.5,
        "s_format_rate": 0.5,
        # half the distance of the two prompts, as there are two
        "s_greedy_stderr": pytest.approx(1 / 2),
        "s_pass_at_1_stderr": pytest.approx((3 / 4 - 1 / 4) / 2),
        "s_reward_mean_stderr": pytest.approx((3.5 / 4 - 1 / 4) / 2),
        "s_pass_at_2_stderr": pytest.approx(3 / 6 / 2),
        "s_pass_at_4_stderr": 0.0,
        "s_maj_at_4_stderr": pytest.approx(1 / 2),
    }
    assert not [
        name for name in set_metrics("s", rows_of({"p": [1.0, 0.0]}, {"p": ["", ""]}, {}), 1.0) if STDERR in name
    ]


@given(st.lists(st.integers(0, 6), min_size=2, max_size=30))
def test_the_standard_error_is_over_prompts_of_the_estimator_of_each(passed: list[int]) -> None:
    told = {f"p{place}": [0.0] + [1.0] * right + [0.0] * (6 - right) for place, right in enumerate(passed)}
    metrics = set_metrics("s", rows_of(told, {name: ["a"] * 7 for name in told}, {}), 1.0)
    for k in (1, 2, 4):
        scores = [pass_at_k(6, right, k) for right in passed]
        exact = statistics.stdev(scores) / len(scores) ** 0.5
        assert metrics[f"s_pass_at_{k}_stderr"] == pytest.approx(exact, abs=1e-12)
        assert metrics[f"s_pass_at_{k}"] == pytest.approx(statistics.fmean(scores), abs=1e-12)


def test_rollouts_that_are_left_out_change_nothing_of_the_others() -> None:
    rewards = {"p": [1.0, 0.0, 1.0, 0.0, 0.0], "q": [0.0, 1.0, 1.0, 1.0, 0.5]}
    answers = {"p": ["2", "1", "2", "1", "3"], "q": ["x", "y", "y", "y", "z"]}
    whole = rows_of(rewards, answers, {})
    fewer = set_metrics(
        "s", [row for row in whole if (row.prompt_id, row.rollout_index) not in {("p", 4), ("q", 0)}], 1.0
    )
    assert fewer["s_greedy"] == 1.0 and fewer["s_pass_at_1"] == 4 / 7
    assert fewer["s_pass_at_2"] == pytest.approx((1 - 1 / 3 + 1) / 2)  # p: 1 of 3 pairs has no pass
    # only q has four
    assert fewer["s_pass_at_4"] == fewer["s_maj_at_4"] == 1.0
    assert set_metrics("s", [], 1.0) == {}


@given(
    st.integers(1, 64), st.lists(st.from_regex(r"[a-z0-9_]{1,6}", fullmatch=True), min_size=1, max_size=4, unique=True)
)
def test_no_name_is_lost_or_the_path_of_another(num_completions: int, sets: list[str]) -> None:
    told = {"p": [0.0] * (num_completions + 1)}
    rows, others = (
        rows_of({prompt: told["p"]}, {prompt: ["a"] * (num_completions + 1)}, {"format": 1.0}) for prompt in "pq"
    )
    names = [f"evaluation/{name}" for each in sets for name in set_metrics(each, rows + others, 1.0)]
    assert len(set(names)) == len(names)
    assert not [(one, other) for one in names for other in names if other.startswith(f"{one}/")]
    powers = [
        int(name.rsplit("_", 1)[1])
        for name in names
        if name.startswith(f"evaluation/{sets[0]}_pass_at_") and not name.endswith(STDERR)
    ]
    assert powers[0] == 1
    assert all(k <= num_completions for k in powers)
    assert 2 * powers[-1] > num_completions


def test_a_metric_is_printed_with_its_standard_error_and_one_of_an_older_run_without() -> None:
    new = {"s_greedy": 0.9344, "s_greedy_stderr": 0.0182, "s_length_tokens_mean": 7.25}
    assert with_errors(new) == {"s_greedy": "0.934 ± 0.018", "s_length_tokens_mean": "7.250"}
    changes = evaluation_changes([(0, {"s_greedy": 0.5}), (3, new)])
    assert changes == {"s_greedy": "0.500 -> 0.934 ± 0.018"}
    assert _drawn(set(new)) == ["s_greedy"]


def test_what_is_drawn_of_many_k() -> None:
    names = {f"s_pass_at_{2**power}" for power in range(7)} | {
        "s_greedy",
        "s_maj_at_64",
        "s_reward_mean",
        "t_pass_at_1",
    }
    assert _drawn(names) == ["s_greedy", "s_maj_at_64", "s_pass_at_1", "s_pass_at_64", "t_pass_at_1"]
    assert sorted(["s_pass_at_16", "s_pass_at_2"], key=by_number) == ["s_pass_at_2", "s_pass_at_16"]


@pytest.mark.parametrize(
    "mark",
    [
        "\\boxed{",
        "<answer>",
        "####",
        "{",
        "}",
        "\\boxed{}",
        "\\boxed{1},",
        "\\boxed 1",
        "\\boxed  ",
        "#### 1\n",
        "#### a\n",
    ],
)
def test_a_megabyte_of_one_mark_is_read_in_one_pass(mark: str) -> None:
    assert answer_text(mark * (1_000_000 // len(mark)) + " \\boxed{7}").endswith("7")


def test_boxes_in_one_another_are_not_copied() -> None:
    depth = 20_000
    text = "\\boxed{" * depth + "7" + "}" * depth
    tracemalloc.start()
    assert answer_text(text) == "7"
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < 100 * len(text)  # what each holds, together, is half a depth of texts
