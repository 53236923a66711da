"""Evaluations: settings of their own where they are given, the same bytes where not; which version
is evaluated, and what a plan refuses."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from flows.evaluate import version_to_evaluate
from rlpipe.base.errors import UserError
from rlpipe.base.manifests import Manifest, StageResult
from rlpipe.base.references import ArtifactRef
from rlpipe.checks.content import Content
from rlpipe.checks.preflight import look_at
from rlpipe.config.pipeline import PipelineConfig
from rlpipe.config.source import read_config
from rlpipe.engines.client import Completion, logprobs_of, tokens_of
from rlpipe.engines.pool import GroupRequest
from rlpipe.loop.session import Session
from rlpipe.records.prompt import Prompt
from rlpipe.records.rollout import SCORES, Rollout
from rlpipe.report.curves import evaluation_points, evaluations
from rlpipe.rewards.registry import check_names
from rlpipe.stages.evaluation import evaluate
from rlpipe.stages.generation import generate
from rlpipe.store.artifacts import commit, read_records
from rlpipe.store.opening import create_or_continue
from rlpipe.store.run import BEFORE_SFT, Run
from tests.paths import PRESETS

OWN = [
    "evaluation.completion_tokens_max=40",
    "evaluation.temperature=0.6",
    "evaluation.top_p=0.95",
    "evaluation.rewards={exact = 2.0}",
]
AS_RL = ["rl.rewards={length = 1.0}", "rl.reward_args={length = {max = 3}}", "rl.top_p=0.8"]


JUDGED = """
def judge(prompt, completion):
    if prompt["prompt_id"] == "1":
        raise ConnectionError("the judge is away")
    return 1.0
"""


def config(tmp_path: Path, *sets: str) -> PipelineConfig:
    small = ["sft.num_steps=0", "data.words.rows_max=60", "evaluation.prompts_max=2"]
    return read_config("tiny", ["run=a", f"store=file://{tmp_path}/store", "tracking.uri=", *small, *sets], PRESETS)


@dataclass
class ToldPool:
    """Remembers what it was asked; every completion is the answer 1."""

    version: int = 0
    groups: list[GroupRequest] = field(default_factory=list)

    async def generate(
        self, groups: list[GroupRequest], on_group: object = None, enough: object = None
    ) -> list[list[Completion]]:
        self.groups = groups
        return [
            [Completion(tokens_of([5]), logprobs_of([-0.5]), "stop", [(0, 1)], "e") for _ in group.params]
            for group in groups
        ]

    async def close(self) -> None: ...


class ToldTokenizer:
    stop_token_ids = (9,)

    def check_calls(self, messages: list[dict[str, str]]) -> None: ...

    def encode_prompt(self, messages: list[dict[str, str]]) -> list[int]:
        return [1] * 70

    def decode(self, tokens: list[int]) -> str:
        return "<answer>1</answer>"


async def evaluated(tmp_path: Path, *sets: str) -> tuple[ToldPool, StageResult, Session]:
    session: Any = Session(create_or_continue(config(tmp_path, *sets)), tmp_path / "work")
    session.pool, session.data.tokenizer = ToldPool(), ToldTokenizer()
    session.data.prompts = lambda _: [
        [Prompt(str(index), "words", [{"role": "user", "content": "?"}], str(index)) for index in (1, 2)]
    ]
    try:
        return session.pool, await evaluate(session, policy=ArtifactRef("x", "0" * 64), version=0), session
    finally:
        await session.close()


async def test_an_evaluation_samples_and_scores_by_its_own_settings(tmp_path: Path) -> None:
    pool, result, session = await evaluated(tmp_path, *AS_RL, *OWN)
    for group in pool.groups:
        greedy, *sampled = group.params
        assert (greedy.temperature, greedy.max_new_tokens, greedy.top_p) == (0.0, 40, 0.95)
        assert [(one.temperature, one.max_new_tokens, one.top_p) for one in sampled] == [(0.6, 40, 0.95)] * 2
    rollouts = read_records(session.run.store, result.ref, "evaluation.parquet", Rollout, SCORES)
    assert {(rollout.prompt_id, rollout.reward) for rollout in rollouts} == {("1", 2.0), ("2", 0.0)}
    assert result.metrics["words_pass_at_1"] == 0.5


async def test_one_without_settings_is_sampled_and_scored_as_rl(tmp_path: Path) -> None:
    pool, result, _ = await evaluated(tmp_path, *AS_RL)
    assert {(one.max_new_tokens, one.top_p) for group in pool.groups for one in group.params} == {(16, 0.8)}
    assert [one.temperature for one in pool.groups[0].params] == [0.0, 1.0, 1.0]
    assert result.metrics["words_pass_at_1"] == 1.0  # the length is right


async def test_a_service_that_is_away_lowers_no_evaluation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "judged.py").write_text(JUDGED)
    monkeypatch.chdir(tmp_path)
    _, result, _ = await evaluated(tmp_path, 'rl.rewards={"judged:judge" = 1.0}')
    assert (result.metrics["words_pass_at_1"], result.metrics["words_fault_reward_unavailable"]) == (1.0, 3)
    _, result, _ = await evaluated(tmp_path / "scored", 'rl.rewards={"judged:judge" = 1.0}', "rl.faults={outside = 0}")
    assert result.metrics["words_pass_at_1"] == 0.5


def test_own_settings_are_named_and_rl_s_settings_do_not_matter_then(tmp_path: Path) -> None:
    plain, own = (evaluate.settings(config(tmp_path, *AS_RL, *sets)) for sets in ([], OWN))
    assert not {name for name in plain if name.startswith("evaluation.")} - {
        f"evaluation.{name}" for name in ("prompts_max", "num_completions", "pass_threshold")
    }
    replaced = {"rl.completion_tokens_max", "rl.top_p", "rl.rewards"}
    assert set(plain) - set(own) == replaced
    assert {name: own[name] for name in set(own) - set(plain)} == {
        "evaluation.completion_tokens_max": 40, "evaluation.temperature": 0.6, "evaluation.top_p": 0.95,
        "evaluation.rewards": {"exact": 2.0},
    }  # fmt: skip
    assert generate.settings(config(tmp_path, *OWN)) == generate.settings(config(tmp_path))


@pytest.mark.slow
def test_prompts_need_room_for_the_evaluation_s_own_length(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"leaves no room for a prompt beside evaluation\.completion_tokens_max=128"):
        config(tmp_path, "evaluation.completion_tokens_max=128")
    (fault,) = look_at(Content(config(tmp_path, "evaluation.completion_tokens_max=120"))).faults
    assert (
        "data set words" in fault and "model.context_tokens_max less evaluation.completion_tokens_max leaves 8" in fault
    )


@pytest.mark.slow
def test_own_rewards_are_tried_on_the_evaluation_sets_alone(tmp_path: Path) -> None:
    findings = look_at(Content(config(tmp_path, "evaluation.rewards={exact = 1.0}")))
    assert [line.split("; ")[1] for line in findings.lines if line.startswith("rewards: ")] == [
        "tried on data.words (rl)", "tried on data.words (evaluation)"
    ]  # fmt: skip
    nobody = '{"no_such:reward" = 1.0}'
    (fault,) = look_at(
        Content(config(tmp_path, "rl.num_iterations=0", f"rl.rewards={nobody}", f"evaluation.rewards={nobody}"))
    ).faults
    assert "evaluation.rewards" in fault and "'no_such:reward' does not import" in fault
    with pytest.raises(UserError, match=r"evaluation\.rewards: the reward 'environment'.*set rl\.environment"):
        config(tmp_path, "evaluation.rewards={environment = 1.0}")


def test_arguments_of_a_reward_that_evaluations_alone_have_are_no_fault(tmp_path: Path) -> None:
    args = ("rl.reward_args={length = {max = 3}, format = {}}", "rl.rewards={format = 1.0}")
    own = config(tmp_path, *args, "evaluation.rewards={length = 1.0}")
    assert (own.reward_args("rl"), own.reward_args("evaluation")) == ({"format": {}}, {"length": {"max": 3}})
    check_names(own.rewards("rl"), own.reward_args("rl"))
    shared = config(tmp_path, *args)
    with pytest.raises(UserError, match=r"rl\.reward_args\.length: rl\.rewards has no 'length'"):
        check_names(shared.rewards("rl"), shared.reward_args("rl"))


def committed(run: Run, phase: str, iteration: int, stage: str, metrics: dict[str, float]) -> None:
    moment = "2026-03-04T05:06:07.000+00:00"
    manifest = Manifest(run.name, phase, iteration, stage, {}, "0", {}, [], metrics, 0, "x", moment, moment)
    commit(run.store, run.folder(phase, iteration, stage), manifest)


def test_without_rl_the_base_model_and_the_result_of_sft_are_what_is_compared(tmp_path: Path) -> None:
    run = create_or_continue(config(tmp_path, "sft.num_steps=2", "sft.segment_steps=1", "rl.num_iterations=0"))
    assert evaluations(run, 0) == [] and evaluation_points(run, 0) == []
    with pytest.raises(UserError, match="run a has no policy yet"):
        version_to_evaluate(run, None)
    committed(run, "base", 0, "policy", {})
    assert version_to_evaluate(run, None) == BEFORE_SFT
    for segment in range(2):
        committed(run, "sft", segment, "policy", {})
    committed(run, "base", 0, "evaluation", {"words_greedy": 0.25})
    committed(run, "sft", 1, "evaluation", {"words_greedy": 0.5})
    assert evaluations(run, 0) == [(BEFORE_SFT, {"words_greedy": 0.25}), (0, {"words_greedy": 0.5})]
    points = [(point.step, point.metrics) for version in (BEFORE_SFT, 0) for point in evaluation_points(run, version)]
    assert points == [
        (-1, {"evaluation/words_greedy": 0.25, "before_sft/words_greedy": 0.25}),
        (0, {"evaluation/words_greedy": 0.5}),
    ]
    assert version_to_evaluate(run, None) == 0 and version_to_evaluate(run, BEFORE_SFT) == BEFORE_SFT
    with pytest.raises(UserError, match="version 1 of run a is not committed: there are -1 to 0"):
        version_to_evaluate(run, 1)
    with pytest.raises(UserError, match="no data set of use = 'evaluation'"):
        version_to_evaluate(Run(run.store, run.config.model_copy(update={"data": []})), 0)
