"""Stored rollouts as rows for SFT: which are taken, and what is said of the others."""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from pathlib import Path

import pytest

from rlpipe.base.errors import UserError
from rlpipe.config.pipeline import stored_tree
from rlpipe.config.sections import DataConfig
from rlpipe.config.source import read_config
from rlpipe.data.conversations import encode_talk
from rlpipe.data.sources import load_conversations
from rlpipe.extras.samples.rows import chosen
from rlpipe.store.opening import create_or_continue
from rlpipe.store.run import Run
from tests.agent_world import tokenizer_in
from tests.extras.queries.test_queries import commit_files
from tests.paths import PRESETS
from tests.why_world import REWARDS, around, store

ITERATIONS, GROUPS = 4, 6


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("samples")
    sets = ["run=a", f"store=file://{folder}", "rl.kl=loss", f"rl.num_iterations={ITERATIONS}", REWARDS]
    made = create_or_continue(read_config("tiny", sets, PRESETS))
    store(around(made, 5, None, count=ITERATIONS, size=GROUPS, at=2))
    return made


def told(capsys: pytest.CaptureFixture[str]) -> Counter[str]:
    """The counts of the last line that was printed, with the number of rows."""
    line = capsys.readouterr().out.splitlines()[-1]
    counts = Counter({reason: int(number) for reason, number in re.findall(r"(\w+) (\d+)(?:,|$)", line)})
    return counts + Counter(rows=int(re.findall(r": (\d+) rollouts of", line)[0]))


def test_every_rollout_is_a_row_or_counted_with_its_reason(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    everything = chosen(run="a", store=run.store.url)
    total = sum(told(capsys).values())
    for arguments in ({"best": 1}, {"reward_min": 0.5}, {"best": 2, "reward_min": 0.9}):
        rows = chosen(run="a", store=run.store.url, **arguments)
        counts = told(capsys)
        assert sum(counts.values()) == total and counts["rows"] == len(rows) < len(everything)
        assert [row for row in everything if row in rows] == rows


def test_the_best_of_a_prompt_has_the_highest_reward(run: Run) -> None:
    around_it = around(run, 5, None, count=ITERATIONS, size=GROUPS, at=2)
    rewards: dict[str, dict[str, float]] = defaultdict(dict)
    for group in around_it.groups:
        for rollout in group.rollouts:
            question = str(group.prompt.messages[-1]["content"])
            rewards[question][rollout.completion] = max(
                rollout.reward or 0.0, rewards[question].get(rollout.completion, -1)
            )
    best = chosen(run="a", store=run.store.url, best=1)
    assert len(best) == len({row["messages"][-2]["content"] for row in best}) == len(rewards)
    for row in best:
        known = rewards[row["messages"][-2]["content"]]
        assert known[row["messages"][-1]["content"]] == max(known.values())


def test_rows_of_one_text_come_once_and_iterations_can_be_named(run: Run) -> None:
    rows = chosen(run="a", store=run.store.url)
    texts = [str(row["messages"]) for row in rows]
    assert len(set(texts)) == len(texts)
    early = chosen(run="a", store=run.store.url, last=1)
    late = chosen(run="a", store=run.store.url, first=2)
    assert early == rows[: len(early)] and {str(row) for row in rows} == {str(row) for row in [*early, *late]}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"reward_min": 99.0}, r"none of its rollouts is left \(.*below_reward_min"),
        ({"last": 4}, "iterations 0 to 4 are not all there; it has 0 to 3"),
        ({"first": 3, "last": 2}, "are not all there"),
        ({"run": "b"}, "no run 'b'"),
    ],
)
def test_what_cannot_be_taken_is_said(arguments: dict[str, object], message: str, run: Run) -> None:
    with pytest.raises(UserError, match=message):
        chosen(**{"run": "a", "store": run.store.url, **arguments})  # type: ignore[arg-type]


def test_a_config_names_them_as_a_data_set(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    sets = [
        "data.short_words.source=run:a", "data.short_words.completion_template=", f"store={run.store.url}",
        "data.short_words.args={best = 1}", "data.short_words.part=all",
    ]  # fmt: skip
    config = read_config("tiny", sets, PRESETS)
    assert stored_tree(config)["data"][0]["source"] == "run:a", "as it was written, wherever the store is"
    talks = load_conversations(config.sets("sft")[0], 0)
    assert [[*talk.messages] for talk in talks] == [
        row["messages"] for row in chosen(run="a", store=run.store.url, best=1)
    ]


def test_rollouts_of_several_turns_are_rows_with_their_tokens_and_masks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    where, world = f"store=file://{tmp_path}/store", "rl.environment=rlpipe.extras.environments.calculator:Calculator"
    made = create_or_continue(read_config("tiny", ["run=a", where, "rl.num_iterations=1", REWARDS, world], PRESETS))
    stored = around(made, 5, None, count=1, size=GROUPS, at=0)
    store(stored)
    tokenizer = tokenizer_in(tmp_path / "tokenizer")
    document = (tmp_path / "tokenizer" / "tokenizer.json").read_bytes()
    commit_files(made, ("base", 0, "tokenizer"), {"tokenizer.json": document})
    named = ["data.short_words.source=run:a", "data.short_words.args={}", "data.short_words.part=all"]
    data = read_config("tiny", [*named, where], PRESETS)
    talks = load_conversations(data.sets("sft")[0], 0)
    rollouts = {one.completion: one for group in stored.groups for one in group.rollouts}
    for talk in talks:
        rollout = rollouts[talk.messages[-1]["content"]]
        assert talk.sampled is not None
        asked = len(rollout.prompt_tokens)
        assert talk.sampled.tokens == [*rollout.prompt_tokens, *rollout.completion_tokens]
        assert talk.sampled.loss_mask == [0] * asked + [*rollout.loss_mask]
        fits = talk._replace(sampled=talk.sampled._replace(tokens=[token % 100 for token in talk.sampled.tokens]))
        assert encode_talk(tokenizer, fits) == (fits.sampled.tokens, talk.sampled.loss_mask)  # pyright: ignore
        with pytest.raises(UserError, match="a token of 'sampled' is not one of"):
            encode_talk(tokenizer, talk)
        with pytest.raises(UserError, match="sampled with another vocabulary"):
            encode_talk(tokenizer, talk._replace(sampled=talk.sampled._replace(vocabulary="0" * 64)))
    assert talks[0].as_json() != talks[0]._replace(sampled=None).as_json(), "the digest of the set knows the tokens"


@pytest.mark.parametrize(
    "sampled",
    [[1, 2], {"tokens": [1]}, {"tokens": [1], "loss_mask": [1, 0], "vocabulary": "a"},
     {"tokens": [1], "loss_mask": [2], "vocabulary": "a"}, {"tokens": ["1"], "loss_mask": [1], "vocabulary": "a"}],
)  # fmt: skip
def test_sampled_tokens_that_cannot_be_are_refused(sampled: object, tmp_path: Path) -> None:
    row = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "sampled": sampled}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    data = DataConfig(name="x", use="sft", source=f"{tmp_path}/rows.jsonl")
    with pytest.raises(UserError, match=r"rows\.jsonl:1: 'sampled' (must have|needs)"):
        load_conversations(data, 0)
