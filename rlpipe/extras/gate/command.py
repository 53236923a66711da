"""The command `rlpipe gate`, and the gate of `post-train`: the rules, the table, and the prompts
that got worst.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

import numpy as np

from rlpipe.base.errors import UserError
from rlpipe.config.pipeline import PipelineConfig
from rlpipe.config.source import override_config
from rlpipe.extras.gate.pairs import Evaluated, check_alike, data_of, opponent
from rlpipe.extras.gate.statistics import CONFIDENCE, Difference, difference
from rlpipe.report.show import text_line
from rlpipe.store.run import Run
from rlpipe.store.run_record import last_started
from rlpipe.stored.remaking import committed_version

WORST_SHOWN = 3
PROMPTS_MIN = 2
HEADER = ["metric", "before", "after", "difference", "interval", "better", "worse", "sign p", "rule"]


@dataclass(frozen=True)
class Rule:
    """A rule of the gate on one metric: passed when the lower bound is at least `bound`."""

    metric: str
    bound: float
    text: str  # as the user wrote it
    passed: bool


@dataclass(frozen=True)
class WorsePrompt:
    """A prompt on which the new policy scores lower, and a completion of each policy: the greedy
    ones for the metric greedy, else the first sampled ones.
    """

    metric: str
    prompt_id: str
    prompt: str
    before: float
    after: float
    completion_before: str
    completion_after: str


@dataclass(frozen=True)
class GateReport:
    """The verdict on a policy, and all that it was made of. `policy`, `against`: RUN@VERSION."""

    policy: str
    against: str
    passed: bool
    confidence: float
    rules: list[Rule]
    differences: list[Difference]
    worst: list[WorsePrompt]

    def lines(self) -> list[str]:
        """A table, and a few lines for each prompt that got worst."""
        rows = [
            HEADER,
            *(_row(one, [rule for rule in self.rules if rule.metric == one.metric]) for one in self.differences),
        ]
        widths = [max(len(row[column]) for row in rows) for column in range(len(HEADER))]
        verdict = "passed" if self.passed else "FAILED"
        lines = [f"gate of {self.policy} against {self.against}: {verdict} ({self.confidence:.0%} intervals)"]
        lines += ["  " + "  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        for lost in self.worst:
            lines += [
                f"worse: {lost.prompt_id}, {lost.metric} {lost.before:.3g} -> {lost.after:.3g}",
                *(f"  {name}: {text_line(text)}" for name, text in (
                    ("prompt", lost.prompt), ("before", lost.completion_before), ("after", lost.completion_after)
                )),
            ]  # fmt: skip
        return lines


def judge_stored(run: Run, version: int | None, against: str, sets: list[str]) -> GateReport:
    """The verdict on the evaluation of a weight version, or of the newest one, by the rules of the
    run's last start, over which `sets` go. `against`: as in the config; empty: as configured, or
    base.
    """
    if others := [entry for entry in sets if not entry.startswith("evaluation.gate_")]:
        raise UserError(f"--set {others[0]}: what is stored does not change; only evaluation.gate_* may be set here")
    config = last_started(run.store, run.name)
    against = against or config.evaluation.gate_against or "base"
    config = override_config(config, [f"evaluation.gate_against={json.dumps(against)}", *sets])
    return gate_report(run, committed_version(run, version), config)


def judge(run: Run, version: int, config: PipelineConfig) -> tuple[bool, list[str]]:
    """Whether the evaluation of a weight version holds to all rules of the config, and the report
    as lines.
    """
    report = gate_report(run, version, config)
    return report.passed, report.lines()


def gate_report(run: Run, version: int, config: PipelineConfig) -> GateReport:
    """The verdict on a weight version. UserError when one of the two is not evaluated, or they were
    evaluated differently.

    The champion passes against itself: it is asked again when its run is started again.
    """
    new, against = Evaluated(run, version), config.evaluation.gate_against
    old = opponent(new, against)
    check_alike(old, new)
    scores = _scores(old, new)
    differences = {one.name: difference(one.name, one.before_N, one.after_N) for one in scores}
    rules = _rules(config, differences, stands=against == "champion" and str(old) == str(new))
    shown = [rule.metric for rule in rules if not rule.passed] or [rule.metric for rule in rules]
    worst = _worst(old, new, next(one for one in scores if one.name == shown[0]))
    passed = all(rule.passed for rule in rules)
    return GateReport(str(new), str(old), passed, CONFIDENCE, rules, list(differences.values()), worst)


@dataclass(frozen=True, eq=False)
class PairedScores:
    """The scores of both policies by one metric of a data set, on the prompts that both have one
    for.
    """

    data: str
    metric: str
    prompts: list[str]
    before_N: np.ndarray
    after_N: np.ndarray

    @property
    def name(self) -> str:
        return f"{self.data}_{self.metric}"


def _scores(old: Evaluated, new: Evaluated) -> list[PairedScores]:
    """The scores by every metric of every data set; UserError for a set of a single prompt."""
    scores = []
    for data in dict.fromkeys(data_of(group) for group in new.groups):
        before, after = old.scores(data), new.scores(data)
        scores += [_paired(data, metric, before.get(metric, {}), after[metric]) for metric in after]
    if few := [one for one in scores if len(one.before_N) < PROMPTS_MIN]:
        raise UserError(f"{few[0].data}: one prompt has no interval; raise evaluation.prompts_max, or give more rows")
    return scores


def _paired(data: str, metric: str, before: dict[str, float], after: dict[str, float]) -> PairedScores:
    shared = [prompt for prompt in after if prompt in before]
    columns = [np.array([side[prompt] for prompt in shared]) for side in (before, after)]
    return PairedScores(data, metric, shared, *columns)


def _rules(config: PipelineConfig, differences: dict[str, Difference], *, stands: bool) -> list[Rule]:
    """The rules of the config, tried. `stands`: all hold, whatever the difference."""
    evaluation = config.evaluation
    bounds = [(metric, x, f"at least {x:g}") for metric, x in evaluation.gate_at_least.items()]
    bounds += [(metric, -x, f"at most {x:g} below") for metric, x in evaluation.gate_at_most_below.items()]
    if unknown := [metric for metric, *_ in bounds if metric not in differences]:
        raise UserError(f"evaluation.gate: the evaluation has no {unknown[0]}; it has {', '.join(differences)}")
    return [Rule(metric, bound, text, stands or differences[metric].low >= bound) for metric, bound, text in bounds]


def _worst(old: Evaluated, new: Evaluated, scores: PairedScores) -> list[WorsePrompt]:
    """The prompts that lost most by a metric, at most WORST_SHOWN; equal ones by prompt id."""
    shown = int(scores.metric != "greedy")  # the rollout of the prompt
    groups = [{group[0].prompt_id: group for group in side.groups_of(scores.data)} for side in (old, new)]
    pairs = [(groups[0][prompt], groups[1][prompt]) for prompt in scores.prompts]
    lost_N = scores.after_N - scores.before_N
    return [
        WorsePrompt(
            scores.name,
            pairs[place][1][shown].prompt_id,
            pairs[place][1][shown].prompt,
            float(scores.before_N[place]),
            float(scores.after_N[place]),
            pairs[place][0][shown].completion,
            pairs[place][1][shown].completion,
        )
        for place in np.argsort(lost_N, kind="stable")[:WORST_SHOWN]
        if lost_N[place] < 0
    ]


def _row(one: Difference, rules: list[Rule]) -> list[str]:
    return [
        one.metric, f"{one.before:.3f}", f"{one.after:.3f}", f"{one.difference:+.3f}",
        f"[{one.low:+.3f}, {one.high:+.3f}]", str(one.better), str(one.worse),
        "" if one.sign_p is None else f"{one.sign_p:.2g}",
        "; ".join(f"{rule.text}: {'passed' if rule.passed else 'FAILED'}" for rule in rules),
    ]  # fmt: skip
