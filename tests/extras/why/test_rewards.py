"""`rlpipe why` of rewards, labels and rates: who did nothing is not named, and what was done is
proved where it can be."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rlpipe.config.source import read_config
from rlpipe.extras.why import today as today_room
from rlpipe.extras.why.around import Around, History
from rlpipe.extras.why.suspects.labels import labels
from rlpipe.extras.why.suspects.policy import rate, settings
from rlpipe.extras.why.suspects.reward_parts import reward_parts
from rlpipe.extras.why.suspects.scoring import reward_settings
from rlpipe.extras.why.today import Today
from rlpipe.extras.why.verdict import ALPHA, SUSPECTS, judge
from rlpipe.records.prompt import Prompt
from rlpipe.records.rollout import Rollout
from rlpipe.rewards.registry import resolve
from rlpipe.rewards.score import facts_of, label
from rlpipe.store.opening import create_or_continue
from rlpipe.store.run import Run
from tests.store.test_run import PRESETS
from tests.why_world import LETTERS, After, Asked, Planted, around, rewarded, store

pytestmark = pytest.mark.usefixtures("patient_reports")
KINDS = {
    "0/1": "rl.rewards={exact = 1.0}",
    "partial credit": 'rl.rewards={"tests.nearness:near" = 0.8, format = 0.2}',
    "two parts": 'rl.rewards={exact = 0.5, "tests.nearness:near" = 0.5}',
}
CASES = ["0/1", *(pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS if kind != "0/1")]
LOOKS = len(SUSPECTS)


def test_a_report_does_not_score_again_for_longer_than_it_may(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(today_room, "SECONDS_MAX", -1.0)
    run = run_of(tmp_path, KINDS["0/1"])
    whole = scored(run, around(run, 1))
    with Today(run) as today:
        assert not list(reward_parts(replace(whole, rewards_today=today))) and not today.parts(
            run.config.rl, 0, whole.groups
        )
        assert today.why_not == "-1 s were not enough for all iterations"


def run_of(tmp_path: Path, rewards: str) -> Run:
    return create_or_continue(read_config("tiny", ["run=a", f"store=file://{tmp_path}", rewards], PRESETS))


def by_code(rollout: Rollout, prompt: Prompt, run: Run) -> Rollout:
    """The rollout as the run's rewards score it."""
    facts = facts_of(rollout, [])
    parts: dict[str, float] = {}
    for name in run.config.rl.rewards:
        function = resolve(name)
        given = (prompt.for_reward(), rollout.completion)
        parts[label(name)] = float(function(*given, facts) if name == "length" else function(*given))
    return rewarded(rollout, parts, run.config)


def scored(run: Run, whole: Around) -> Around:
    """With the rewards of the run for all that was sampled."""
    groups = [
        replace(group, rollouts=[by_code(rollout, group.prompt, run) for rollout in group.rollouts])
        for group in whole.groups
    ]
    return replace(whole, groups=groups)


def garbage(rng: random.Random, rollout: Rollout, prompt: Prompt) -> Rollout:
    """What a policy says at a temperature of 2: now and then between
    tags, letters without a meaning."""
    text = "".join(rng.choice(LETTERS) for _ in range(rng.randint(1, 12)))
    text = f"<answer>{text}</answer>" if rng.random() < 0.3 else text
    return replace(rollout, completion=text, completion_tokens=rollout.completion_tokens[: len(text)])


def named(whole: Around, looks: int = LOOKS) -> list[str]:
    return [finding.suspect for finding in judge(whole, looks).findings if not finding.symptom]


@pytest.mark.parametrize("kind", CASES)
@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_reward_that_nobody_touched_is_not_named_when_the_policy_says_garbage(
    kind: str, seed: int, tmp_path: Path
) -> None:
    run = run_of(tmp_path, KINDS[kind])
    hot = scored(run, around(run, seed, Planted(after=garbage, sets=("rl.temperature=2.0",)), prompts=16, size=8))
    assert named(hot) == ["settings"], "by what is alike"
    store(hot)
    with Today(run) as today:
        again = replace(hot, rewards_today=today)
        assert not list(reward_parts(again)) and today.why_not == ""
        assert {*again.today} == {*hot.parts} and named(again) == ["settings"]


def told_otherwise(whole: Around, name: str, late: bool) -> Around:
    """One part was 0 on one side: its code was another."""
    groups = []
    for group in whole.groups:
        rollouts = group.rollouts
        if (group.iteration >= whole.at) == late:
            rollouts = [rewarded(one, {**one.reward_parts, name: 0.0}, whole.config) for one in rollouts]
        groups.append(replace(group, rollouts=rollouts))
    return replace(whole, groups=groups)


@pytest.mark.slow
@pytest.mark.parametrize("late", [True, False], ids=["broken from the iteration on", "mended from the iteration on"])
@pytest.mark.parametrize("kind", CASES)
def test_code_that_gives_the_same_text_another_reward_is_proved(kind: str, late: bool, tmp_path: Path) -> None:
    """Today's code is that of one side; of a reward without any other part and of garbage that
    nothing before was like, too."""
    run = run_of(tmp_path, KINDS[kind])
    part = label(next(iter(run.config.rl.rewards)))
    # of the exact rewards garbage has 0 from either code: it proves
    # nothing, and nothing needs explaining
    planted = Planted(after=garbage) if late and kind == "partial credit" else None
    changed = told_otherwise(scored(run, around(run, 1, planted, size=8)), part, late)
    store(changed)
    with Today(run) as today:
        [finding] = reward_parts(replace(changed, rewards_today=today))
    assert finding.title == f"reward part {part} {'falls' if late else 'rises'}" and finding.shift.p < 1e-6
    whole = scored(run, changed)
    truth = np.array([one.reward for group in whole.groups for one in group.rollouts]) - changed.reward_R
    expected = truth[changed.after_R == late].mean() * (-1 if late else 1)
    assert (
        finding.explains == pytest.approx(expected, abs=0.05)
        and "scored again, the same text" in finding.evidence[late]
    )


def test_code_that_is_neither_sides_proves_nothing(tmp_path: Path) -> None:
    """A reward that was edited after the run: what the policy says has
    changed, and its code had not."""
    run = run_of(tmp_path, KINDS["0/1"])
    hot = scored(run, around(run, 1, Planted(after=garbage), size=8))
    shifted = [
        replace(group,
                rollouts=[rewarded(one, {"exact": one.reward_parts["exact"] * 0.5 - 0.1},
                                   run.config) for one in group.rollouts])
        for group in hot.groups
    ]  # fmt: skip
    edited = replace(hot, groups=shifted)
    store(edited)
    with Today(run) as today:
        assert not [finding for finding in reward_parts(replace(edited, rewards_today=today)) if finding.shift.p < 1e-3]


def test_where_code_cannot_be_called_the_report_says_so(tmp_path: Path) -> None:
    run = run_of(tmp_path, KINDS["two parts"])
    whole = told_otherwise(scored(run, around(run, 1, size=8)), "exact", True)
    store(whole)
    gone = run.config.rl.model_copy(update={"rewards": {"exact": 0.5, "gone:near": 0.5}})
    config = run.config.model_copy(update={"rl": gone})
    with Today(run) as today:
        lost = replace(whole, rewards_today=today, config=config, config_before=config)
        [finding] = reward_parts(lost)
    assert finding.title == "reward part exact falls" and "not scored again by today's code" in " ".join(
        finding.evidence
    )
    assert "gone" in today.why_not


GOES_AWAY = """
import os, pathlib

def reward(prompt, completion):
    pathlib.Path(__file__).unlink(missing_ok=True)
    os._exit(3)
"""


@pytest.mark.slow
def test_a_reward_that_is_lost_while_it_scores_again_ends_no_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "goes_away.py").write_text(GOES_AWAY)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    run = run_of(tmp_path, KINDS["0/1"])
    whole = scored(run, around(run, 1, prompts=4, size=4))
    lost = run.config.rl.model_copy(update={"rewards": {"goes_away:reward": 1.0}})
    config = run.config.model_copy(update={"rl": lost})
    with Today(run) as today:
        report = judge(replace(whole, rewards_today=today, config=config, config_before=config), LOOKS)
    assert "goes_away" in today.why_not and not report.findings


def test_a_verdict_that_the_rest_of_the_reward_refutes_is_withdrawn(tmp_path: Path) -> None:
    """A part that falls with all the others beside it was not touched, whatever the fit says."""
    run = run_of(tmp_path, "rl.rewards={exact = 0.5, length = 0.5}")
    whole = around(run, 1, size=8)
    groups = []
    for group in whole.groups:
        late = group.iteration >= whole.at
        parts = [
            {"exact": 0.0 if late else one.reward_parts["exact"], "length": 0.1 if late else 0.8}
            for one in group.rollouts
        ]
        rollouts = [rewarded(one, part, run.config) for one, part in zip(group.rollouts, parts, strict=True)]
        groups.append(replace(group, rollouts=rollouts))
    assert not list(reward_parts(replace(whole, groups=groups)))
    only = told_otherwise(
        replace(whole, groups=[
            replace(group, rollouts=[
                rewarded(one, {"exact": one.reward_parts["exact"], "length": 0.8}, run.config) for one in group.rollouts
            ]) for group in whole.groups
        ]), "exact", True)  # fmt: skip
    assert [finding.title for finding in reward_parts(only)] == ["reward part exact falls"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sets", "expected"),
    [
        ('rl.rewards={exact = 0.9, "tests.nearness:near" = 0.1}', "weights"),
        ('rl.rewards={exact = 0.5, "tests.nearness:near" = 0.5, format = 1.0}', "another reward"),
    ],
)
def test_other_weights_explain_what_they_do_to_the_same_completions(sets: str, expected: str, tmp_path: Path) -> None:
    run = run_of(tmp_path, KINDS["two parts"])
    whole = around(run, 1, Planted(sets=(sets,)), size=8)
    new = replace(run, config=whole.config)
    groups = [group if group.iteration < whole.at
              else replace(group, rollouts=[by_code(one, group.prompt, new) for one in group.rollouts])
              for group in scored(run, whole).groups]  # fmt: skip
    whole = replace(whole, groups=groups)
    store(whole)
    with Today(run) as today:
        told = replace(whole, rewards_today=today)
        [finding] = reward_settings(told)
        assert not list(reward_parts(told)) and not list(settings(told))
    parts = {name: column[whole.after_R] for name, column in told.parts.items()}
    weights = {"weights": {"exact": 0.4, "near": -0.4}, "another reward": {"format": 1.0}}[expected]
    assert finding.explains == pytest.approx(
        sum(weight * parts[name].mean() for name, weight in weights.items()), abs=0.03
    )
    assert finding.certain and finding.proof is not None and finding.proof.redo == "score"


def to_all(rng: random.Random, rollout: Rollout, prompt: Prompt) -> Rollout:
    """A policy that says one thing to whatever it is asked."""
    return replace(rollout, completion="<answer>eeee</answer>")


def mistaken(rng: random.Random, rollout: Rollout, prompt: Prompt) -> Rollout:
    """A policy that always forgets the last letter."""
    return replace(rollout, completion=f"<answer>{str(prompt.answer)[:-1]}</answer>")


@pytest.mark.parametrize("worse", [to_all, mistaken])
@pytest.mark.parametrize("kind", CASES)
def test_right_labels_are_not_named_where_the_policy_is_surely_wrong(kind: str, worse: After, tmp_path: Path) -> None:
    run = run_of(tmp_path, KINDS[kind])
    whole = scored(run, around(run, 2, Planted(after=worse), prompts=16, size=8))
    assert "labels" not in named(whole)


def test_a_label_that_was_right_before_is_right(tmp_path: Path) -> None:
    """The same words are asked again, of a policy that has forgotten them: what
    it answers now is like nothing."""
    run = run_of(tmp_path, KINDS["0/1"])
    words = ["".join(random.Random(number).choices(LETTERS, k=5)) for number in range(12)]

    def again(rng: random.Random, asked: Asked) -> Asked:
        return replace(asked, word=rng.choice(words), skill=0.99)

    def other(rng: random.Random, rollout: Rollout, prompt: Prompt) -> Rollout:
        text = "".join(random.Random(f"{prompt.answer}!").choices(LETTERS, k=5))
        return replace(rollout, completion=f"<answer>{text}</answer>")

    before = around(run, 3, Planted(before=again), at=0, prompts=16, size=8)
    late = around(run, 4, Planted(before=again, after=other), at=6, prompts=16, size=8)
    groups = [group for group in before.groups if group.iteration < 6] + [
        group for group in late.groups if group.iteration >= 6
    ]
    assert not list(labels(scored(run, replace(late, groups=groups))))


@pytest.mark.parametrize("wrong", [[6] * 6, [1, 17, 2, 15, 2, 1]], ids=["even", "uneven"])
def test_a_tenth_of_the_labels_shuffled_is_named(wrong: list[int], tmp_path: Path) -> None:
    """Of 64 an iteration.

    How evenly they fall on iterations says nothing: they may be of one file of several.
    """
    left = dict(enumerate(wrong, start=6))

    def shuffled(rng: random.Random, asked: Asked) -> Asked:
        if not left[asked.iteration]:
            return asked
        left[asked.iteration] -= 1
        return replace(asked, label="".join(rng.choices(LETTERS, k=len(asked.word))))

    run = run_of(tmp_path, KINDS["0/1"])
    skilled = around(run, 5, Planted(before=lambda rng, asked: replace(asked, skill=0.97)), at=0, prompts=64, size=4)
    late = around(
        run, 6, Planted(before=lambda rng, asked: shuffled(rng, replace(asked, skill=0.97))), prompts=64, size=4
    )
    groups = [group for group in skilled.groups if group.iteration < 6] + [
        group for group in late.groups if group.iteration >= 6
    ]
    assert named(scored(run, replace(late, groups=groups)), 11 * LOOKS)[:1] == [
        "labels"
    ]  # as where it looks for the iteration


def test_labels_that_were_wrong_all_along_are_no_change_when_the_policy_becomes_sure(tmp_path: Path) -> None:
    """Hardly a group agrees before, every one does after: so many more agree on
    something else than the label."""
    run = run_of(tmp_path, KINDS["0/1"])

    def asked(rng: random.Random, asked: Asked) -> Asked:
        label = "".join(rng.choices(LETTERS, k=len(asked.word))) if rng.random() < 0.2 else ""
        return replace(asked, skill=0.4 if asked.iteration < 6 else 0.99, label=label)

    for seed in range(6):
        whole = around(run, seed, Planted(before=asked), at=0, prompts=64, size=4)
        assert not list(labels(scored(run, replace(whole, at=6))))


def falling(run: Run, far: float, at: int) -> Around:
    worse = Planted(before=lambda rng, asked: replace(asked, skill=0.1), metrics={"train/proximal_kl": far})
    whole = around(run, 2, worse, at=at, prompts=16, size=8)
    metrics = {number: {**values, "train/proximal_kl": far} for number, values in whole.metrics.items()}
    return scored(run, replace(whole, metrics=metrics))


def test_a_rate_that_still_rises_is_named_when_the_reward_falls(tmp_path: Path) -> None:
    config = [
        "run=a",
        f"store=file://{tmp_path}",
        "rl.warmup_steps=20",
        "rl.num_steps=2",
        "rl.learning_rate=3e-3",
        KINDS["0/1"],
    ]
    run = create_or_continue(read_config("tiny", config, PRESETS))
    finding = judge(falling(run, 0.5, 6), LOOKS).findings[0]
    assert finding.suspect == "rate" and "step 12 of 20 of its warm-up" in finding.title
    assert not list(rate(falling(run, 1e-4, 6))), "updates that go nowhere ruin nothing"
    assert not list(rate(around(run, 2, at=6))), "a reward that rises"
    nothing_trained = falling(run, 0.5, 6)
    metrics = {number: {**values, "train/learning_rate": 0.0} for number, values in nothing_trained.metrics.items()}
    [finding] = rate(replace(nothing_trained, metrics=metrics))
    assert finding.proof is not None and finding.proof.sets == ["rl.learning_rate=0.001"], (
        "a rate that a config may have"
    )
    late = create_or_continue(read_config("tiny", [*config, "run=b", "rl.warmup_steps=2"], PRESETS))
    assert not list(rate(falling(late, 0.5, 6))), "it has risen"


@pytest.mark.slow
def test_a_reward_that_falls_step_by_step_while_the_rate_rises_has_a_cause(tmp_path: Path) -> None:
    """No iteration has a jump then: the sides differ by less than the
    noise that the trend looks like."""
    sets = ["rl.warmup_steps=20", "rl.num_steps=2", "rl.learning_rate=3e-3", KINDS["partial credit"]]
    run = create_or_continue(read_config("tiny", ["run=a", f"store=file://{tmp_path}", *sets], PRESETS))
    slow = Planted(
        lambda rng, asked: replace(asked, skill=0.95 - 0.02 * asked.iteration), metrics={"train/proximal_kl": 0.05}
    )
    whole = scored(run, replace(around(run, 2, slow, at=0, prompts=32, size=8), at=5))
    looks = LOOKS * 11
    assert whole.reward_change.p * looks > ALPHA
    [finding] = judge(whole, looks).findings
    assert finding.suspect == "rate" and finding.evidence[0].startswith("the reward falls step by step: 0.9")
    assert finding.explains is not None and whole.reward_drift.size < finding.explains < 0
    rising = replace(slow, before=lambda rng, asked: replace(asked, skill=0.6 + 0.02 * asked.iteration))
    assert named(scored(run, replace(around(run, 2, rising, at=0, prompts=32, size=8), at=5))) == []


def test_a_symptom_counts_half_where_an_iteration_is_chosen(tmp_path: Path) -> None:
    """A rate ruins the rollouts of the next iteration, which then are all cut off: that iteration
    has the symptom, this one the cause."""
    verdict = judge(falling(run_of(tmp_path, KINDS["0/1"]), 0.5, 1), LOOKS)
    symptom = replace(verdict, findings=[replace(verdict.findings[0], symptom=True)])
    assert symptom.score == (verdict.score[0] / 2, verdict.score[1]) and verdict.score[0] > 0


def test_a_rate_that_ruins_the_policy_from_the_first_step_on_is_named(tmp_path: Path) -> None:
    run = create_or_continue(read_config("tiny",
                                         ["run=a", f"store=file://{tmp_path}", "rl.warmup_steps=0",
                                          "rl.learning_rate=2e-3", KINDS["0/1"]], PRESETS))  # fmt: skip
    finding = judge(falling(run, 0.5, 1), LOOKS).findings[0]
    assert finding.suspect == "rate" and finding.title.startswith("the reward falls from the first updates on")
    assert finding.proof is not None and finding.proof.at == -1, "a fork of SFT"


def test_what_follows_from_a_changed_setting_is_no_second_change(tmp_path: Path) -> None:
    run = run_of(tmp_path, KINDS["0/1"])
    [finding] = settings(around(run, 1, Planted(sets=("rl.learning_rate=0.01",))))
    assert finding.title == "rl.learning_rate: 0.0002 -> 0.01"
    assert "learning rate of the last step: 0.0002 -> 0.01" in finding.evidence
    [finding] = settings(around(run, 1, Planted(sets=("rl.clip_high=0.4",), metrics={"train/learning_rate": 0.01})))
    assert finding.title == "rl.clip_high: 0.28 -> 0.4, and 1 more"


def test_history_gives_what_is_around_an_iteration_todays_code(tmp_path: Path) -> None:
    run = run_of(tmp_path, KINDS["two parts"])
    store(scored(run, around(run, 1, size=4)))
    with Today(run) as today:
        around_6 = History(run, today).around(6)
        for name, column in around_6.today.items():
            known = np.isfinite(column)
            assert known.sum() == len(column) and np.abs(column - around_6.parts[name]).max() == 0
