"""The formulas of docs/algorithms.md once more, as plain loops over Python floats:
what the tests compare ours with.

Written from the specification, one token at a time; nothing here may import rlpipe. Rows are lists;
a mark is 1 where a token counts.
"""

from __future__ import annotations

import math

Row = list[float]
Rows = list[Row]


def clamp(value: float, low: float, high: float) -> float:
    return max(low, min(high, value))


def mean(values: Row) -> float:
    return math.fsum(values) / len(values)


def variance(values: Row) -> float:
    """ddof = 1; of one value 0."""
    centre = mean(values)
    return math.fsum((value - centre) ** 2 for value in values) / max(len(values) - 1, 1)


def group_advantages(rewards: Row, groups: list[int], estimator: str, lengths: Row, eps: float = 1e-6) -> Row:
    found = []
    for reward, group in zip(rewards, groups, strict=True):
        members = [index for index, other in enumerate(groups) if other == group]
        among = [rewards[index] for index in members]
        if len(set(among)) == 1:
            found.append(0.0)
        elif estimator == "grpo":
            found.append((reward - mean(among)) / (math.sqrt(variance(among)) + eps))
        elif estimator == "dr_grpo":
            found.append(reward - mean(among))
        elif estimator == "rloo":
            # against the mean of the others, which is the same as (r - mean) * G / (G - 1)
            found.append(reward - (math.fsum(among) - reward) / (len(among) - 1))
        elif estimator == "maxrl":
            found.append((reward - mean(among)) / mean(among) if mean(among) > 0 else 0.0)
        else:
            assert estimator == "opo"
            tokens = sum(lengths[index] for index in members)
            baseline = math.fsum(lengths[index] * rewards[index] for index in members) / tokens if tokens else reward
            found.append(reward - baseline)
    return found


def whitened(rows: Rows, mask: list[list[int]]) -> Rows:
    """Over all unmasked tokens of the batch; masked ones become 0."""
    kept = [
        value for row, marks in zip(rows, mask, strict=True) for value, mark in zip(row, marks, strict=True) if mark
    ]
    if not kept:
        return [[0.0] * len(row) for row in rows]
    centre, scale = mean(kept), math.sqrt(variance(kept) + 1e-8)
    return [
        [(value - centre) / scale if mark else 0.0 for value, mark in zip(row, marks, strict=True)]
        for row, marks in zip(rows, mask, strict=True)
    ]


def reinforce_plus_plus(rewards: Row, mask: list[list[int]], gamma: float, kl: Rows | None, kl_coef: float) -> Rows:
    rows = []
    for index, (reward, marks) in enumerate(zip(rewards, mask, strict=True)):
        row = [0.0] * len(marks)
        total, last = 0.0, True
        for token in range(len(marks) - 1, -1, -1):
            if marks[token]:
                own = -kl_coef * kl[index][token] if kl is not None else 0.0
                total = own + (reward if last else gamma * total)
                row[token], last = total, False
        rows.append(row)
    return whitened(rows, mask)


def reinforce_plus_plus_baseline(rewards: Row, groups: list[int], mask: list[list[int]]) -> Rows:
    centred = []
    for reward, group in zip(rewards, groups, strict=True):
        among = [other for other, its in zip(rewards, groups, strict=True) if its == group]
        centred.append(0.0 if len(set(among)) == 1 else reward - mean(among))
    return whitened([[value] * len(marks) for value, marks in zip(centred, mask, strict=True)], mask)


def gdpo(parts: list[Row], weights: Row, groups: list[int]) -> Row:
    """Of each rollout; `parts`: of each part, its values."""
    apart = [group_advantages(values, groups, "grpo", [1] * len(groups)) for values in parts]
    total = [sum(weight * own[row] for weight, own in zip(weights, apart, strict=True)) for row in range(len(groups))]
    return [row[0] for row in whitened([[value] for value in total], [[1]] * len(groups))]


def clipped_surrogate(ratio: float, advantage: float, low: float, high: float, dual_clip: float | None) -> float:
    loss = max(-ratio * advantage, -clamp(ratio, 1 - low, 1 + high) * advantage)
    return min(loss, -dual_clip * advantage) if dual_clip is not None and advantage < 0 else loss


def policy_loss(
    policy: Row,
    proximal: Row,
    advantages: Row,
    marks: list[int],
    objective: str,
    low: float,
    high: float,
    dual_clip: float | None,
) -> Row:
    """The token losses of one sequence."""
    at = [token for token, mark in enumerate(marks) if mark]
    logs = {token: clamp(policy[token] - proximal[token], -20, 20) for token in at}
    losses = [0.0] * len(marks)
    for token in at:
        advantage, ratio = advantages[token], math.exp(logs[token])
        if objective == "ppo":
            losses[token] = clipped_surrogate(ratio, advantage, low, high, dual_clip)
        elif objective == "gspo":
            ratio = math.exp(mean(list(logs.values())))
            losses[token] = clipped_surrogate(ratio, advantage, low, high, dual_clip)
        elif objective == "cispo":
            losses[token] = -clamp(ratio, 1 - low, 1 + high) * advantage * policy[token]
        elif objective == "sapo":
            tau = 1.0 if advantage > 0 else 1.05
            losses[token] = -(4 / tau) / (1 + math.exp(-tau * (ratio - 1))) * advantage
        elif objective == "dppo":
            moved = math.exp(policy[token]) - math.exp(proximal[token])
            keep = not ((advantage > 0 and moved > high) or (advantage <= 0 and moved < -low))
            losses[token] = -ratio * advantage if keep else 0.0
        else:
            assert objective == "reinforce"
            losses[token] = -advantage * policy[token]
    return losses


def clipped(
    policy: Row, proximal: Row, advantages: Row, objective: str, low: float, high: float, dual_clip: float | None
) -> list[tuple[bool, bool]]:
    """Where the clip takes a token's gradient (cispo: where it bounds its weight),
    below and above; all tokens count."""
    found = []
    whole = math.exp(mean([clamp(p - q, -20, 20) for p, q in zip(policy, proximal, strict=True)]))
    for p, q, advantage in zip(policy, proximal, advantages, strict=True):
        moved = {"gspo": whole - 1, "dppo": math.exp(p) - math.exp(q)}.get(
            objective, math.exp(clamp(p - q, -20, 20)) - 1
        )
        below, above = moved < -low, moved > high
        if objective in ("sapo", "reinforce"):
            below = above = False
        elif objective != "cispo":
            dual = dual_clip is not None and advantage < 0 and moved + 1 > dual_clip
            below, above = below and advantage < 0, (above and advantage > 0) or dual
        found.append((below, above))
    return found


def kl(policy: float, reference: float, estimator: str) -> float:
    d = policy - reference
    if estimator == "k3":
        d = clamp(d, -20, 20)
        return clamp(math.exp(-d) + d - 1, -10, 10)
    return {"k1": d, "k2": d * d / 2, "abs": abs(d)}[estimator]


def importance_weights(proximal: Row, rollout: Row, marks: list[int], mode: str, low: float, high: float) -> Row:
    """Of one sequence; 1 where masked."""
    logs = [clamp(p - q, -20, 20) if mark else 0.0 for p, q, mark in zip(proximal, rollout, marks, strict=True)]
    whole = math.exp(clamp(math.fsum(logs), -20, 20))
    of_sequence = {"sequence_truncate": min(whole, high), "sequence_mask": whole if whole <= high else 0.0}
    weights = []
    for log, mark in zip(logs, marks, strict=True):
        w = math.exp(log)
        of_token = {"none": 1.0, "token_truncate": clamp(w, low, high), "token_mask": w if low <= w <= high else 0.0}
        weights.append((of_token | of_sequence)[mode] if mark else 1.0)
    return weights


def aggregate(values: Rows, mask: list[list[int]], mode: str, length: float) -> float:
    """Over this batch's own tokens and sequences; nothing to average over is 0."""
    rows = [
        [value for value, mark in zip(row, marks, strict=True) if mark] for row, marks in zip(values, mask, strict=True)
    ]
    rows = [row for row in rows if row]
    if not rows:
        return 0.0
    if mode == "token_mean":
        return mean([value for row in rows for value in row])
    if mode == "sequence_mean":
        return mean([mean(row) for row in rows])
    assert mode == "fixed_length"
    return math.fsum(value for row in rows for value in row) / (len(rows) * length)


def entropy(logits: Row) -> float:
    weights = [math.exp(logit - max(logits)) for logit in logits]
    shares = [weight / math.fsum(weights) for weight in weights]
    return -math.fsum(share * math.log(share) for share in shares if share)
