"""Reward arguments: what they do, and what is refused before anything starts."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlpipe.base.errors import UserError
from rlpipe.rewards.pool import check_rewards
from rlpipe.rewards.registry import resolve

PROMPT = {"prompt_id": "p/0", "messages": [], "answer": "5", "metadata": {}}


def facts(num_tokens: int = 0, environment: Any = None) -> dict[str, Any]:
    return {"num_tokens": num_tokens, "finish_reason": "stop", "environment": environment}


@pytest.mark.parametrize(
    ("completion", "reward"),
    [("<think>a\nb</think>c", 1.0), ("  <think></think>x\n", 1.0), ("<think>", 0.0), ("", 0.0), ("(" * 1_000_000, 0.0)],
)
def test_format_by_a_pattern(completion: str, reward: float) -> None:
    assert resolve("format", {"pattern": "<think>.*</think>.+"})(PROMPT, completion) == reward


@pytest.mark.parametrize("mark", ["<answer>", "</answer>", "[", "<answer>x"])
def test_format_and_exact_of_a_megabyte(mark: str) -> None:
    for name in ("format", "exact"):
        assert resolve(name)(PROMPT, mark * (1_000_000 // len(mark))) == 0.0
    assert resolve("exact")(PROMPT, mark * 100_000 + "<answer> 5</answer>") == 1.0


@pytest.mark.parametrize(
    ("args", "rewards"),
    [
        ({"target": 10}, {0: 0.0, 5: 0.5, 10: 1.0, 15: 0.5, 20: 0.0, 1000: 0.0}),
        ({"max": 10}, {0: 1.0, 10: 1.0, 11: 0.0}),
    ],
)
def test_length(args: dict[str, Any], rewards: dict[int, float]) -> None:
    reward = resolve("length", args)
    assert {tokens: reward(PROMPT, "x" * 5000, facts(tokens)) for tokens in rewards} == rewards


def test_overlong_is_dapos() -> None:
    reward = resolve("overlong", {"tokens_max": 100, "buffer": 20, "factor": 0.5})
    expected = {0: 0.0, 80: 0.0, 81: -0.025, 90: -0.25, 100: -0.5, 120: -1.0}
    assert {tokens: reward(PROMPT, "", facts(tokens)) for tokens in expected} == pytest.approx(expected)


@given(st.integers(2, 5000), st.integers(0, 10_000), st.data())
def test_overlong_never_rewards_and_never_rises_with_length(
    tokens_max: int, num_tokens: int, data: st.DataObject
) -> None:
    reward = resolve("overlong", {"tokens_max": tokens_max, "buffer": data.draw(st.integers(1, tokens_max - 1))})
    here, next_one = (reward(PROMPT, "", facts(tokens)) for tokens in (num_tokens, num_tokens + 1))
    assert next_one <= here <= 0


def test_environment_is_what_it_gave() -> None:
    reward = resolve("environment")
    assert reward(PROMPT, "", facts(environment={"reward": 0.25, "turns": 2})) == 0.25
    for said in (None, {}, [], "1.0"):
        with pytest.raises(ValueError, match="p/0: no environment gave"):
            reward(PROMPT, "", facts(environment=said))


@pytest.fixture
def functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "argued.py").write_text(
        "def plain(prompt, completion): return 1.0\n"
        "def scaled(prompt, completion, *, scale, shift=0.0): return scale * len(completion) + shift\n"
        "def told(prompt, completion, rollout): return rollout['num_tokens']\n"
        "def both(prompt, completion, *, rollout, scale=1.0): return scale * rollout['num_tokens']\n"
        "def short(prompt): return 1.0\n"
    )
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("functions")
def test_a_path_takes_its_arguments_and_the_facts() -> None:
    assert resolve("argued:scaled", {"scale": 2.0})(PROMPT, "abc") == 6.0
    assert resolve("argued:both", {"scale": 2.0})(PROMPT, "abc", rollout=facts(7)) == 14.0


@pytest.mark.slow
@pytest.mark.usefixtures("functions")
@pytest.mark.parametrize(
    ("rewards", "args", "said"),
    [
        (["math"], {"exact": {}}, ["rl.reward_args.exact", "rl.rewards has no 'exact', but math"]),
        (["format"], {"format": {"regex": "x"}}, ["rl.reward_args.format.regex", "no such argument", "has: pattern"]),
        (["math"], {"math": {"x": 1}}, ["rl.reward_args.math.x", "has: none"]),
        (["format"], {"format": {"pattern": 3}}, ["rl.reward_args.format.pattern=3", "string"]),
        (["format"], {"format": {"pattern": "(a"}}, ["rl.reward_args.format", "pattern='(a'", "no regular expression"]),
        (["length"], {}, ["rl.reward_args.length", "give one of the two"]),
        (["length"], {"length": {"target": 3, "max": 4}}, ["target=3, max=4"]),
        (["length"], {"length": {"target": True}}, ["rl.reward_args.length.target=True"]),
        (["length"], {"length": {"max": 0}}, ["rl.reward_args.length.max=0", "greater than or equal to 1"]),
        (["overlong"], {"overlong": {"buffer": 3}}, ["rl.reward_args.overlong.tokens_max", "required"]),
        (["overlong"], {"overlong": {"tokens_max": 3, "buffer": 3}}, ["buffer=3 must be below tokens_max=3"]),
        (["overlong"], {"overlong": {"tokens_max": 3, "buffer": 1, "factor": "2"}}, ["overlong.factor='2'", "number"]),
        (["argued:scaled"], {}, ["rl.reward_args.argued:scaled", "missing", "'scale'"]),
        (["argued:scaled"], {"argued:scaled": {"scale": 1, "sift": 2}},
         ["rl.reward_args.argued:scaled.sift", "shift=0.0"]),
        (["argued:told"], {"argued:told": {"rollout": 1}},
         ["rl.reward_args.argued:told.rollout", "rlpipe itself gives"]),
        (["argued:short"], {}, ["argued:short(prompt)"]),
        (["code"], {"code": {"total_s": "8"}}, ["rl.reward_args.code.total_s='8'", "number"]),
        (["code"], {"code": {"total_s": 10.0}}, ["rl.reward_args.code.total_s=10 is not below rl.reward_timeout_s=10"]),
        (["remote"], {}, ["rl.reward_args.remote.url", "required"]),
        (["remote"], {"remote": {"url": "here:80"}}, ["url='here:80' is no URL"]),
        # a host that a template left empty
        (["remote"], {"remote": {"url": "http:///v1"}}, ["url='http:///v1' is no URL"]),
        (["remote"], {"remote": {"url": "http://me:s3cret@here"}}, ["url holds a user or password"]),
        (["remote"], {"remote": {"url": "$NO_SUCH_NAME"}}, ["the environment variable NO_SUCH_NAME is not set"]),
        (["remote"], {"remote": {"url": "http://here", "key_env": "NO_SUCH_NAME"}}, ["key_env='NO_SUCH_NAME'"]),
        (["remote"], {"remote": {"url": "http://here", "concurrency": 0}}, ["rl.reward_args.remote.concurrency=0"]),
        (["judge"], {"judge": {"url": "http://here/v1", "model": "m"}}, ["rl.reward_args.judge.rubric", "required"]),
        (["judge"], {"judge": {"url": "http://here/v1", "model": "m", "rubric": "r", "scale": -1.0}},
         ["judge.scale=-1.0"]),
        (["hf:nowhere"], {}, ["rl.reward_args.hf:nowhere", "config.json, tokenizer.json is missing"]),
    ],
)  # fmt: skip
def test_what_is_refused(rewards: list[str], args: dict[str, Any], said: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        check_rewards(dict.fromkeys(rewards, 1.0), args, 10.0)
    assert all(part in str(caught.value) for part in said), caught.value
    assert "s3cret" not in str(caught.value)


def test_weights_are_finite() -> None:
    with pytest.raises(UserError, match=r"rl\.rewards\.math=nan"):
        check_rewards({"math": float("nan")}, {}, 10.0)
