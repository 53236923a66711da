"""`rlpipe why`: what each suspect says of a fault that was planted, and that nothing
is named where nothing changed."""

from __future__ import annotations

import random
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rlpipe.config.source import read_config
from rlpipe.extras.why.suspects.policy import mismatch, reference
from rlpipe.extras.why.suspects.scoring import faults
from rlpipe.extras.why.verdict import SUSPECTS, judge
from rlpipe.records.columns import to_parquet, to_table
from rlpipe.records.kinds import Span
from rlpipe.records.prompt import Prompt
from rlpipe.records.rollout import Rollout, TokenGaps
from rlpipe.store.opening import create_or_continue
from rlpipe.store.run import Run
from tests.extras.queries.test_queries import commit_files
from tests.store.test_run import PRESETS
from tests.why_world import HEAD, LETTERS, REWARDS, Asked, Planted, around


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return create_or_continue(
        read_config("tiny", ["run=a", f"store=file://{tmp_path}", "rl.kl=loss", REWARDS], PRESETS)
    )


def hard(rng: random.Random, asked: Asked) -> Asked:
    return replace(asked, word="".join(rng.choice(LETTERS) for _ in range(rng.choice([9, 10]))))


def poisoned(rng: random.Random, asked: Asked) -> Asked:
    return replace(asked, label="wrong") if rng.random() < 0.5 else asked


def flooded(rng: random.Random, asked: Asked) -> Asked:
    return replace(asked, word="abcdefgh") if rng.random() < 0.8 else asked


def other_template(rng: random.Random, asked: Asked) -> Asked:
    return replace(asked, head=[*HEAD[:5], *range(2000, 2030)], skill=0.4)


def weaker(rng: random.Random, asked: Asked) -> Asked:
    return replace(asked, skill=0.4)


def broken(rng: random.Random, rollout: Rollout, prompt: Prompt) -> Rollout:
    parts = {**rollout.reward_parts, "exact": 0.0}
    return replace(rollout, reward_parts=parts, reward=(rollout.reward or 0.0) - 0.6 * rollout.reward_parts["exact"])


def failed(rng: random.Random, rollout: Rollout, prompt: Prompt) -> Rollout:
    fault = {"reward": 0.0, "reward_parts": {}, "reward_fault": "environment_error"}
    return replace(rollout, **fault) if zlib.crc32(prompt.prompt_id.encode()) % 5 < 2 else rollout


def failed_both_ways(rng: random.Random, rollout: Rollout, prompt: Prompt) -> Rollout:
    number = zlib.crc32(prompt.prompt_id.encode()) % 5
    reason = "agent_timeout" if number < 2 else "agent_unavailable" if number == 2 else ""
    return replace(rollout, reward=0.0, reward_parts={}, reward_fault=reason) if reason else rollout


def cut(rng: random.Random, rollout: Rollout, prompt: Prompt) -> Rollout:
    if len(rollout.completion_tokens) <= 20:
        return rollout
    shorter = replace(rollout, completion_tokens=rollout.completion_tokens[:20], completion=rollout.completion[:20])
    return replace(shorter, finish_reason="length", reward=0.0, reward_parts={"exact": 0.0, "near": 0.0, "format": 0.0})


def stale(rng: random.Random, rollout: Rollout, prompt: Prompt) -> Rollout:
    version = rollout.weight_version - 4
    return replace(rollout, weight_version=version, weight_versions=(Span(version, len(rollout.completion_tokens)),))


FAULTS: dict[str, tuple[Planted, str]] = {
    "a broken part": (Planted(after=broken), "reward_part"),
    "hard data": (Planted(before=hard), "mix"),
    "truncation": (Planted(after=cut, sets=("rl.completion_tokens_max=20",)), "truncation"),
    "a stale engine": (Planted(before=weaker, metrics={"train/mismatch_abs_mean": 0.2}), "mismatch"),
    "stale rollouts": (Planted(before=weaker, after=stale), "staleness"),
    "a learning rate": (Planted(before=weaker, sets=("rl.learning_rate=0.01",)), "settings"),
    "another template": (Planted(before=other_template), "template"),
    "poisoned labels": (Planted(before=poisoned), "labels"),
    "the same prompts": (Planted(before=flooded), "duplicates"),
    "a failing environment": (Planted(after=failed), "environment_faults"),
    "another reference": (Planted(before=weaker, metrics={"train/kl": 2.0}), "reference"),
}


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.parametrize("seed", [1, 2])
def test_what_was_planted_is_named_first(name: str, seed: int, run: Run) -> None:
    planted, suspect = FAULTS[name]
    verdict = judge(around(run, seed, planted), looks=len(SUSPECTS) * 11)
    assert [finding.suspect for finding in verdict.findings][:1] == [suspect], [
        (finding.title, verdict.share(finding), finding.shift) for finding in verdict.findings
    ]
    assert len(verdict.findings[0].rows) == 3 and verdict.findings[0].evidence


def test_a_rise_of_faults_is_named_by_its_cause(run: Run) -> None:
    by_policy, outside = faults(around(run, 1, Planted(after=failed_both_ways)))
    assert by_policy.suspect == outside.suspect == "agent_faults"
    assert "the policy may cause: 0.0% -> " in by_policy.title and "from outside: 0.0% -> " in outside.title
    assert by_policy.evidence[0].startswith("from 6 on: agent_timeout ")
    assert outside.evidence[0].startswith("from 6 on: agent_unavailable ")
    assert {*by_policy.rows}.isdisjoint(outside.rows)


def test_a_stale_engine_is_shown_by_the_rollouts_whose_tokens_are_furthest_apart(run: Run) -> None:
    """Where gaps are stored; not of iterations that older code trained, nor of tokens of which
    nobody recorded the logprob."""
    whole = around(run, 1, FAULTS["a stale engine"][0])
    apart = [(8, 2, 1), (9, 4, 0), (7, 7, 5)]  # iteration, group, rollout
    gaps: dict[int, list[TokenGaps]] = {}
    for group, rollout in zip(whole.group_R, whole.rollouts, strict=True):
        place = whole.groups[group].iteration, rollout.group_index, rollout.rollout_index
        gap = np.full(len(rollout.completion_tokens), -0.5 if place in apart else 1e-6, np.float16)
        gap[:2] = np.nan, 0.2 if place[0] >= 6 else 0.0
        gaps.setdefault(place[0], []).append(TokenGaps(*place[1:], gap))
    for iteration in range(11):
        commit_files(run, ("rl", iteration, "gap"), {"gap.parquet": to_parquet(to_table(gaps[iteration], TokenGaps))})
    finding = next(iter(mismatch(whole)))
    shown = [(whole.groups[whole.group_R[row]].iteration, whole.rollouts[row]) for row in finding.rows]
    assert {(iteration, rollout.group_index, rollout.rollout_index) for iteration, rollout in shown} == {*apart}
    known = np.abs(
        [value for number in range(6, 11) for row in gaps[number] for value in row.gap if not np.isnan(value)]
    )
    share = float(np.mean(known > 0.1))
    assert finding.evidence[-1].endswith(f"more than 0.1 apart: 0.00% -> {share:.2%}")


def test_a_kl_that_the_updates_themselves_made_is_no_other_reference(run: Run) -> None:
    far = {
        "train/kl": 0.888,
        "train/proximal_kl": 0.343,
    }  # of a rate of 1e-2, in the iteration of its first two updates
    assert not list(reference(around(run, 1, Planted(before=weaker, metrics=far))))
    [finding] = reference(around(run, 1, Planted(before=weaker, metrics={**far, "train/proximal_kl": 0.1})))
    assert finding.suspect == "reference"


def test_nothing_is_named_where_nothing_changed(run: Run) -> None:
    """40 runs that learn, of few and small groups: at the level of one
    report, ALPHA of them may be named."""
    named = [judge(around(run, seed, prompts=6, size=4), looks=len(SUSPECTS)).findings for seed in range(40)]
    assert sum(map(bool, named)) <= 1, [finding.title for findings in named for finding in findings]


def test_two_changes_at_once_are_ranked_by_what_they_explain(run: Run) -> None:
    def both(rng: random.Random, rollout: Rollout, prompt: Prompt) -> Rollout:
        return failed(rng, broken(rng, rollout, prompt), prompt) if rng.random() < 0.4 else broken(rng, rollout, prompt)

    verdict = judge(around(run, 3, Planted(after=both)), looks=len(SUSPECTS))
    assert [finding.suspect for finding in verdict.findings][:2] == ["reward_part", "environment_faults"]
    shares = [verdict.share(finding) for finding in verdict.findings[:2]]
    assert shares[0] < shares[1] < 0 and sum(shares) == pytest.approx(verdict.change.size, abs=0.15)
