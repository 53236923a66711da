"""The suspect of wrong labels, distinguished from a policy that is sure of a wrong answer."""

from __future__ import annotations

from collections import Counter

import numpy as np

from rlpipe.algorithms.answers import likeness
from rlpipe.extras.why.around import Around
from rlpipe.extras.why.changes import evenly, more_often
from rlpipe.extras.why.suspects.finding import Finding, Findings, rows_to_show

AGREEMENT = 0.75  # share of a group's rollouts with the same answer, from which the policy is sure
# the p of the share among them, above which the label may be wrong as often as before
BY_CHANCE = 0.01
OTHERS_MAX = 64  # labels of other prompts that an answer is compared with
ALIKE_MIN = 0.5  # of two answers of which one may be the other with a mistake
# share of them that are less like the answer than its own label: from here on
# it is that label with a mistake
UNLIKE = 0.9
OFTEN = 3.0  # times as often given as it is a label: an answer that the policy gives to any prompt


def labels(around: Around) -> Findings:
    """Prompts for which the policy is sure of an answer and the label is another, more than before.

    Prompts do not count where the fault is probably the policy's: the answer is the label with a
    mistake, or is given to any prompt, or the same prompt with the same label was answered before.
    The share is tested among all groups, and among the groups that are sure: a policy that is only
    sure more often is no change of labels.
    """
    if not np.isfinite(around.matched_R).any():
        return
    sure_G, wrong_G = _sure_and_wrong(around)
    share = more_often(wrong_G[sure_G], around.after_G[sure_G])
    rise = more_often(wrong_G, around.after_G)
    if min(share.size, rise.size) <= 0 or share.p > BY_CHANCE:
        return
    rewards_G = around.per_group(around.reward_R)
    right, wrong = rewards_G[sure_G & ~wrong_G], rewards_G[sure_G & wrong_G]
    lost = (float(right.mean()) if len(right) else 0.0) - (float(wrong.mean()) if len(wrong) else 0.0)
    before, after = (sure_G & (around.after_G == side) for side in (False, True))
    evidence = [
        f"of the groups whose rollouts agree ({AGREEMENT:.0%} or more give one answer) the label is quite another in "
        f"{int(wrong_G[before].sum())} of {int(before.sum())} before, {int(wrong_G[after].sum())} of "
        f"{int(after.sum())} from {around.at} on",
        (f"their reward: {float(right.mean()) if len(right) else float('nan'):.3g} where the label agrees, "
         f"{float(wrong.mean()) if len(wrong) else float('nan'):.3g} where not"),
    ]  # fmt: skip
    rows = rows_to_show(around, (wrong_G & sure_G)[around.group_R])
    yield Finding("labels",
                  f"labels against a policy that is sure: {share.before:.1%} -> {share.after:.1%} of such groups", rise,
                  -rise.size * lost, evidence, rows)  # fmt: skip


def _sure_and_wrong(around: Around) -> tuple[np.ndarray, np.ndarray]:
    """Two flags of each group, [G]: its rollouts agree; and they agree on an answer that is not the
    label, without a sign of the policy's own fault.
    """
    agreed = [_agreed(around, index) for index in range(len(around.groups))]
    own = [label or "" for label in around.label_G]
    wrong = np.array([bool(answer) and not is_right for answer, is_right in agreed])
    answers = [answer for answer, _ in agreed]
    excused = _given_to_all(answers, own, around.after_G) | _right_before(around, agreed)
    for index in np.flatnonzero(wrong & ~excused):
        excused[index] = _is_a_mistake(answers[index], own[index], own)
    return np.array([bool(answer) for answer in answers]), wrong & ~excused


def _agreed(around: Around, index: int) -> tuple[str, bool]:
    """The answer of a group that is sure, and True when it is the label; empty where it is not
    sure.

    A truncated rollout has no answer.
    """
    rows = np.flatnonzero(around.group_R == index)
    answers = ["" if around.truncated_R[row] else around.answer_R[row] for row in rows]
    answer, count = Counter(answers).most_common(1)[0]
    if len(rows) < 2 or not answer or count < AGREEMENT * len(rows):
        return "", False
    return answer, around.matched_R[rows[answers.index(answer)]] != 0


def _given_to_all(answers: list[str], own: list[str], after_G: np.ndarray) -> np.ndarray:
    """True for each group whose answer the policy gives, on the group's side, more than OFTEN times
    as often as it is a label, [G].
    """
    flags = np.zeros(len(answers), bool)
    for side in (False, True):
        groups = np.flatnonzero(after_G == side)
        given, labelled = (Counter(texts[index] for index in groups) for texts in (answers, own))
        for index in groups:
            answer = answers[index]
            flags[index] = bool(answer) and given[answer] > 1 and given[answer] > OFTEN * labelled[answer]
    return flags


def _right_before(around: Around, agreed: list[tuple[str, bool]]) -> np.ndarray:
    """True for each group after one with the same prompt and label whose rollouts agreed on that
    label, [G]: then the label was not wrong."""
    right_before: set[tuple[tuple[int, ...], str | None]] = set()
    texts, flags = around.texts(), np.zeros(len(agreed), bool)
    for index in np.argsort(around.iteration_G, kind="stable"):
        key, (answer, is_right) = (texts[index], around.label_G[index]), agreed[index]
        flags[index] = key in right_before
        if answer and is_right:
            right_before.add(key)
    return flags


def _is_a_mistake(answer: str, label: str, labels: list[str]) -> bool:
    """True when the answer is more like its label than like those of nearly all other prompts."""
    others = [other for other in dict.fromkeys(labels) if other not in (label, answer)]
    chosen = [others[place] for place in evenly(len(others), OTHERS_MAX)]
    alike = likeness(answer, label)
    return (
        bool(chosen)
        and alike >= ALIKE_MIN
        and float(np.mean([likeness(answer, other) < alike for other in chosen])) > UNLIKE
    )
