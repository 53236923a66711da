"""Finds the answers in completions, and computes the metrics of evaluation sets: pass@k, majority
votes. Pure.

Answers are found in one pass, in linear time: a policy may write thousands of tags and braces that
are never closed.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from difflib import SequenceMatcher

import numpy as np

from rlpipe.base.values import powers_of_two
from rlpipe.records.rollout import Group, Rollout

# \{ and \} are printed braces of a formula, and close nothing
_BRACES = re.compile(r"\\(?:boxed|fbox)\s*\{|(?<!\\)\\[{}]|[{}]")
_BARE_BOX = re.compile(r"\\(?:boxed|fbox)[ \t]+([^\s{}$\\]*[^\s{}$\\.,;:])")  # \boxed 42
_SAYS = re.compile(r"\S")
# between two boxes that are one answer
_BETWEEN = re.compile(r"[\s$]*(?:[,;]|(?:,\s*)?\b(?:and|or)\b)[\s$]*")
_HASHED = re.compile(r"(?<!#)####(?!#)(.*)")  # GSM8K's mark; with a fifth # it is a heading
_NUMBER_FIRST = re.compile(r"(?:\\?\$|[€£¥])?[+-]?[.\d]")
_COUNTED = re.compile(r"\d+[.):]\s")  # a heading: "#### 1. Check"
COMPARED_CHARS = 200  # of each of the two answers
STDERR = "_stderr"  # the end of the name of a metric's standard error
LATEX_TEXT = re.compile(r"\\(?:text\w*|mathrm|mbox)\s*\{[^{}]*\}")  # words inside a formula


def likeness(one: str, other: str) -> float:
    """The similarity of two answers, from 0 to 1, by Ratcliff and Obershelp, over the first
    COMPARED_CHARS characters of each.
    """
    return SequenceMatcher(None, one[:COMPARED_CHARS], other[:COMPARED_CHARS], autojunk=False).ratio()


def last_answer(completion: str) -> str | None:
    """The text of the last `<answer>` element that is closed; None when there is none.

    A regular expression would take quadratic time.
    """
    end = completion.rfind("</answer>")
    start = completion.rfind("<answer>", 0, max(end, 0))
    return completion[start + len("<answer>") : end] if start >= 0 else None


def boxed_answer(text: str) -> str | None:
    """The content of the last box: `\\boxed{...}` or `\\fbox{...}` whose braces close, or
    `\\boxed 42`; None when there is none.

    A box that is empty or not closed does not count. Boxes with only a comma, "and" or "or" between
    them are one answer, joined by commas.
    """
    box = _boxes(text)
    return box[2] if box else None


def marked_answer(completion: str) -> str | None:
    """The text that the completion marks as its answer, stripped; None when it marks none.

    It is the last `<answer>` element (the last box in it, where it has one), or else the last of
    these: a box (`boxed_answer`), or `####` followed by only a number or formula on its line. Where
    there is no box, words may follow the number.
    """
    if (tagged := last_answer(completion)) is not None:
        return boxed_answer(tagged) or tagged.strip()
    box = _boxes(completion)
    for mark in reversed(list(_HASHED.finditer(completion, box[1] if box else 0))):
        line = mark[1].strip().strip("*").rstrip(".").strip()
        if is_value(line) or (box is None and _NUMBER_FIRST.match(line) and not _COUNTED.match(line)):
            return line
    return box[2] if box else None


def answer_text(completion: str) -> str:
    """The text that counts as the answer: the marked one (`marked_answer`), else the whole
    completion; stripped.
    """
    marked = marked_answer(completion)
    return completion.strip() if marked is None else marked


def is_value(line: str) -> bool:
    """True when a line is only a number or a formula: without words outside of `\\text{}`, and not
    the number of a heading.
    """
    if _COUNTED.match(line) or sum(map(line.count, "([")) != sum(map(line.count, ")]")):
        return False
    bare = re.sub(r"\\[A-Za-z]+", "", LATEX_TEXT.sub("", line))
    says = re.search(r"\d|\\[A-Za-z]", line) or re.fullmatch(r"\(?[A-Za-z]\)?", line)
    return says is not None and re.search(r"[A-Za-z]{3,}", bare) is None


def _boxes(text: str) -> tuple[int, int, str] | None:
    """The start, end and content of the last box; None without a box. Boxes that are one answer
    count as one.

    Boxes may be nested thousands deep: only the content of the boxes next to each other at the end
    is read.
    """
    # start and end of each box, and of its content
    boxes = [(*bare.span(), *bare.span(1)) for bare in _BARE_BOX.finditer(text)]
    # for each open brace the start of its box and of the content; None if it is not of a box
    opened: list[tuple[int, int] | None] = []
    for brace in _BRACES.finditer(text):
        sign = brace[0]
        if sign == "{":
            opened.append(None)
        elif len(sign) > 2:
            opened.append(brace.span())
        elif sign == "}" and opened and (begin := opened.pop()) and _SAYS.search(text, begin[1], brace.start()):
            boxes.append((begin[0], brace.end(), begin[1], brace.start()))
    boxes.sort()
    first = end = -1
    parts: list[str] = []  # the last one first
    while boxes and (not parts or (boxes[-1][1] <= first and _BETWEEN.fullmatch(text, boxes[-1][1], first))):
        begin_at, end_at, *within = boxes.pop()
        inside = text[slice(*within)].strip()
        first, end = begin_at, end if parts else end_at
        if inside not in parts[-1:]:
            parts.append(inside)
    return (first, end, ", ".join(reversed(parts))) if parts else None


def pass_at_k(num_completions: int, num_passed: int, k: int) -> float:
    """The probability that at least one of k completions, drawn without replacement, passes: 1 -
    C(n-c, k) / C(n, k).

    The unbiased estimator of Chen et al. 2021 (arXiv 2107.03374, section 2.1), computed in
    integers.
    """
    assert 0 <= num_passed <= num_completions and 1 <= k <= num_completions
    return 1.0 - math.comb(num_completions - num_passed, k) / math.comb(num_completions, k)


def majority_passes(answers: list[str], passed: list[bool]) -> bool:
    """True when a completion with the most frequent answer passed; among equally frequent answers
    the first one counts.
    """
    assert len(answers) == len(passed) > 0
    chosen = Counter(answers).most_common(1)[0][0]  # ties are in the order of first appearance
    return any(right for answer, right in zip(answers, passed, strict=True) if answer == chosen)


def set_metrics(name: str, rollouts: Group, threshold: float) -> dict[str, float]:
    """The metrics of one evaluation set from its scored rollouts; rollout 0 of each prompt is
    greedy, the others are sampled.

    `<set>_greedy`, `_pass_at_1`, `_reward_mean`, `_length_tokens_mean`; with n > 1 sampled
    completions `_pass_at_<k>` for k = 2, 4, 8, ... up to n, and `_maj_at_<n>`; `_format_rate` where
    the reward has such a part. Those of which there is no rollout are not there. Where there are
    two prompts or more, each mean of `prompt_scores` has its standard error over prompts,
    `_<metric>_stderr`: their standard deviation (with n - 1) over the square root of n.
    """
    sampled = [rollout for rollout in rollouts if rollout.rollout_index > 0]
    scores = prompt_scores(rollouts, threshold)
    values: dict[str, Sequence[float]] = {
        **{key: [*by_prompt.values()] for key, by_prompt in scores.items()},
        # over all completions at once, as older runs have them: means of means may have other bits
        "pass_at_1": [_passes(rollout, threshold) for rollout in sampled],
        "reward_mean": [rollout.reward or 0.0 for rollout in sampled],
        "length_tokens_mean": [len(rollout.completion_tokens) for rollout in sampled],
        "format_rate": [rollout.reward_parts["format"] for rollout in sampled if "format" in rollout.reward_parts],
    }
    metrics = {key: np.mean(entries) for key, entries in values.items() if len(entries)}
    for key, by_prompt in scores.items():
        if len(by_prompt) > 1:
            metrics[f"{key}{STDERR}"] = np.std([*by_prompt.values()], ddof=1) / math.sqrt(len(by_prompt))
    return {f"{name}_{key}": float(value) for key, value in metrics.items()}


def prompt_scores(rollouts: Group, threshold: float) -> dict[str, dict[str, float]]:
    """By metric of an evaluation set (greedy, pass_at_<k>, maj_at_<n>, reward_mean) the score of
    each prompt by its id, in the order of their first rollouts. Of pass@k it is the unbiased
    estimator. A prompt of which rollouts are left out has those for which it has enough.
    """
    prompts: dict[str, Group] = {}
    for rollout in rollouts:
        prompts.setdefault(rollout.prompt_id, []).append(rollout)
    count = max((sum(rollout.rollout_index > 0 for rollout in group) for group in prompts.values()), default=0)
    scores: dict[str, dict[str, float]] = {}
    for prompt_id, group in prompts.items():
        for metric, score in _scores_of(group, threshold, count).items():
            scores.setdefault(metric, {})[prompt_id] = score
    return scores


def _scores_of(group: Group, threshold: float, count: int) -> dict[str, float]:
    """The scores of one prompt. `count`: completions of a prompt of which none is left out."""
    sampled = [rollout for rollout in group if rollout.rollout_index > 0]
    passed = [_passes(rollout, threshold) for rollout in sampled]
    greedy = next((rollout for rollout in group if rollout.rollout_index == 0), None)
    scores = {} if greedy is None else {"greedy": float(_passes(greedy, threshold))}
    if not sampled:
        return scores
    scores["reward_mean"] = float(np.mean([rollout.reward or 0.0 for rollout in sampled]))
    for k in powers_of_two(len(sampled)):
        scores[f"pass_at_{k}"] = pass_at_k(len(passed), sum(passed), k)
    if len(sampled) == count > 1:
        answers = [answer_text(rollout.completion) for rollout in sampled]
        scores[f"maj_at_{count}"] = float(majority_passes(answers, passed))
    return scores


def _passes(rollout: Rollout, threshold: float) -> bool:
    assert rollout.reward is not None, "an evaluation counts scored rollouts"
    return rollout.reward >= threshold
