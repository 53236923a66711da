"""The suspect of rewards whose code changed: a part that has another value for the same
completions.
"""

from __future__ import annotations

import numpy as np

from rlpipe.algorithms.answers import likeness
from rlpipe.extras.why.around import Around
from rlpipe.extras.why.changes import NO_SHIFT, Shift, matched
from rlpipe.extras.why.suspects.finding import Finding, Findings, from_to, rows_to_show
from rlpipe.extras.why.suspects.scoring import PART_MIN, without
from rlpipe.rewards.registry import is_service
from rlpipe.rewards.score import label

KNOWN = 0.25  # R2 from which a part counts as known by the other features of a rollout
# share of the rollouts from the iteration on that some before are like,
# below which nothing can be compared
OVERLAP_MIN = 0.25
# share of the values of a side that today's code gives again, from
# which it is the code of that side
SAME = 0.99
TOLERANCE = 1e-6
GROUPS_MIN = 3  # of a side, that today's code has scored


def reward_parts(around: Around) -> Findings:
    """A part of the reward that has other values for completions than before.

    Today's code is used where it can be: if it gives the stored values for the stored text of a
    side, it is that side's code. Else rollouts are compared with similar ones before.
    """
    for name, stored_R in around.parts.items():
        difference_R = stored_R - around.today.get(name, np.full(len(stored_R), np.nan))
        same = _same(around, difference_R)
        if same and max(share.mean() for share in same) >= SAME:
            yield from _by_today(around, name, difference_R, same)
        else:  # today's code is neither side's: only likeness can show it
            yield from _by_what_is_alike(around, name)


def _same(around: Around, difference_R: np.ndarray) -> list[np.ndarray]:
    """Flags of the rollouts of each side that today's code has scored: True where it gives the
    stored value. Empty where it has scored too few groups.
    """
    sides = [side & np.isfinite(difference_R) for side in (~around.after_R, around.after_R)]
    if min(len({*around.group_R[side].tolist()}) for side in sides) < GROUPS_MIN:
        return []
    return [np.abs(difference_R[side]) <= TOLERANCE for side in sides]


def _by_today(around: Around, name: str, difference_R: np.ndarray, same: list[np.ndarray]) -> Findings:
    """A proof, or nothing: the text is stored, so only a change of the code can give it another
    value.
    """
    if min(share.mean() for share in same) >= SAME:
        return
    before, after = (f"{int(share.sum())} of {len(share)} stored values are those of today's code" for share in same)
    shift = around.shift_of(difference_R)
    evidence = [f"scored again, the same text: before, {before}; from {around.at} on, {after}"]
    yield from _finding(around, name, shift, shift.size, difference_R, evidence)


def _by_what_is_alike(around: Around, name: str) -> Findings:
    """The finding that rollouts from the iteration on have more, or less, of a part than similar
    rollouts before.
    """
    values_R, expected_R = around.parts[name], _expected(around, name)
    before, after = around.means(values_R)
    shift = _unexpected(around, name, expected_R)
    if shift.size * (after - before) <= 0 or _is_refuted(around, name):
        return
    evidence = [f"not scored again by today's code: {around.why_not_today}"] if around.why_not_today else []
    yield from _finding(around, name, shift, min(after - before, shift.size, key=abs), values_R - expected_R, evidence)


def _finding(
    around: Around, name: str, shift: Shift, size: float, surprising_R: np.ndarray, evidence: list[str]
) -> Findings:
    values_R, weight = around.parts[name], around.weight(name)
    before, after = around.means(values_R)
    if abs(shift.size) < PART_MIN * float(np.nanstd(values_R)):
        return
    others = [
        f"part {other}: {from_to(*around.means(column))}" for other, column in around.parts.items() if other != name
    ]
    lines = [*evidence, f"weight {weight:g}, part {name}: {from_to(before, after)}", *others, *_matched_lines(around)]
    if (constant := _constant(values_R[around.after_R])) is not None:
        lines.insert(0, f"all {int(around.after_R.sum())} rollouts from {around.at} on have {name} = {constant:g}")
    service = next((reward for reward in around.config.rl.rewards if is_service(reward) and label(reward) == name), "")
    title = f"reward part {name} {'falls' if size < 0 else 'rises'}" + (f" (the service {service})" if service else "")
    rows = rows_to_show(around, np.isfinite(values_R), np.nan_to_num(np.sign(size) * -surprising_R))
    yield Finding("reward_part", title, shift, weight * size, lines, rows, proof=without(around, name))


def _features(around: Around, name: str) -> np.ndarray:
    """Features of each rollout without one part: the other parts, the likeness of its answer to the
    prompt's, its length. [R, F]
    """
    columns = [column for other, column in around.parts.items() if other != name]
    if np.isfinite(around.matched_R).any():
        columns += [around.matched_R, _alike(around)]
    if not columns:
        return np.zeros((len(around.rollouts), 0))
    columns.append(around.tokens_R)
    filled = [
        np.where(np.isfinite(column), column, np.nanmean(column)) for column in columns if np.isfinite(column).any()
    ]
    return np.stack(filled, axis=1)


def _alike(around: Around) -> np.ndarray:
    """The likeness of a rollout's answer and the prompt's, from 0 to 1, [R]; nan where the prompt
    has none."""
    pairs = zip(around.answer_R, around.group_R, strict=True)
    return np.array(
        [likeness(answer, label) if (label := around.label_G[group]) else np.nan for answer, group in pairs]
    )


def _expected(around: Around, name: str) -> np.ndarray:
    """The expected value of a part for each rollout, by similar rollouts of other groups before,
    [R]; nan where it is not known.
    """
    values_R = around.parts[name]
    learnt_R = np.isfinite(values_R) & ~around.after_R & ~around.fault_R
    expected_R, known = matched(_features(around, name), values_R, learnt_R, around.group_R)
    late = np.isfinite(expected_R[around.after_R]).mean()
    return expected_R if known >= KNOWN and late >= OVERLAP_MIN else np.full(len(values_R), np.nan)


def _unexpected(around: Around, name: str, expected_R: np.ndarray) -> Shift:
    """The shift of a part beyond its expected value. A part without expectation shifts only when it
    stops varying.
    """
    values_R = around.parts[name]
    if np.isfinite(expected_R).any():
        return around.shift_of(values_R - expected_R, trend=True)
    if _constant(values_R[around.after_R]) is not None and _constant(values_R[~around.after_R]) is None:
        return around.shift_of(values_R, trend=True)
    return NO_SHIFT


def _is_refuted(around: Around, name: str) -> bool:
    """True when the reward without the part falls or rises with it, by half of its share or more:
    then the completions changed.
    """
    proof = without(around, name)
    if proof is None or proof.stored is None:
        return False
    (before, after), (rest_before, rest_after) = around.means(around.parts[name]), proof.stored
    if not before or not rest_before:
        return False
    part, rest = (after - before) / abs(before), (rest_after - rest_before) / abs(rest_before)
    return part * rest > 0 and abs(rest) >= abs(part) / 2


def _constant(values: np.ndarray) -> float | None:
    """The single value that all have; None where they differ."""
    known = values[np.isfinite(values)]
    return float(known[0]) if len(known) >= 16 and np.ptp(known) == 0 else None


def _matched_lines(around: Around) -> list[str]:
    if not np.isfinite(around.matched_R).any():
        return []
    return [f"completions whose answer is the prompt's, by its text: {from_to(*around.means(around.matched_R))}"]
