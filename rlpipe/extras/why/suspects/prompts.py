"""Suspects in the prompts: other prompts, repeated ones, another template around them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile

import numpy as np

from rlpipe.extras.why.around import Around
from rlpipe.extras.why.changes import shift
from rlpipe.extras.why.suspects.finding import Finding, Findings, from_to, rows_to_show

PROMPTS_MIN = 6  # distinct prompts of a side: with fewer, common tokens may be chance
TEMPLATE_TOKENS_MIN = 2
NEW_SHARE = 0.5  # of the prompts from the iteration on, above which those before say little of them


def template(around: Around) -> Findings:
    """Tokens at the beginning or end of all prompts of a data set that change at the iteration."""
    for source in sorted({group.prompt.source for group in around.groups}):
        sides = [_distinct(around, source, after) for after in (False, True)]
        if min(map(len, sides)) < PROMPTS_MIN:
            continue
        for where, flipped in (("begin", False), ("end", True)):
            texts = [[text[::-1] if flipped else text for text in side] for side in sides]
            own = [_common(side) for side in texts]
            shared = _common([*texts[0], *texts[1]])
            if shared > min(own) - TEMPLATE_TOKENS_MIN:
                continue
            in_source = np.array([group.prompt.source == source for group in around.groups])[around.group_R]
            yield Finding(
                "template",
                f"the prompts of {source} {where} with other tokens",
                around.reward_change,
                None,
                [
                    (
                        f"all {len(sides[0])} distinct prompts before {where} with the same {own[0]} tokens, all"
                        f" {len(sides[1])} from {around.at} on with the same {own[1]}; of these only {shared} are the"
                        " same"
                    ),
                    f"before: {_messages(around, source, False)}",
                    f"from {around.at} on: {_messages(around, source, True)}",
                ],
                rows_to_show(around, in_source, around.reward_R),
                certain=True,
            )
            break


def _distinct(around: Around, source: str, after: bool) -> list[tuple[int, ...]]:
    pairs = zip(around.groups, around.after_G, around.texts(), strict=True)
    return list(dict.fromkeys(text for group, late, text in pairs if group.prompt.source == source and late == after))


def _common(texts: Sequence[Sequence[int]]) -> int:
    """The number of tokens that all texts share at their beginning."""
    return sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, zip(*texts, strict=False)))


def _messages(around: Around, source: str, after: bool) -> str:
    pairs = zip(around.groups, around.after_G, strict=True)
    prompt = next(group.prompt for group, late in pairs if group.prompt.source == source and late == after)
    return " | ".join(
        f"{message.get('role')}: {' '.join(str(message.get('content')).split())}" for message in prompt.messages
    )[:300]


def template_tokens(around: Around) -> np.ndarray:
    """The number of tokens of each group's prompt that all prompts of its data set and side share
    at their beginning or end, [G].
    """
    tokens: dict[tuple[str, bool], int] = {}
    for source in {group.prompt.source for group in around.groups}:
        for after in (False, True):
            side = _distinct(around, source, after)
            if len(side) >= PROMPTS_MIN:
                tokens[source, after] = _common(side) + _common([text[::-1] for text in side])
    pairs = zip(around.groups, around.after_G, strict=True)
    return np.array([tokens.get((group.prompt.source, bool(after)), 0) for group, after in pairs])


def mix(around: Around) -> Findings:
    """Other prompts than before: of other data sets, longer ones, ones with longer answers.

    The change of the reward is split in two (Oaxaca, Kitagawa): the reward that the same policy
    gets for prompts like these, and the rest. For prompts that are unlike all earlier ones no split
    is possible: their change counts as rest too.
    """
    features, first = _features(around), _first_of_each_prompt(around)
    shifts = {name: shift(values_G[first], around.iteration_G[first], around.at) for name, values_G in features.items()}
    if not shifts:
        return
    strongest = min(shifts, key=lambda name: shifts[name].p)
    widest = shifts[strongest]
    share = float(np.dot(_slopes(around, features), [entry.size for entry in shifts.values()]))
    new = _outside(features[strongest], around.after_G)
    evidence = [f"{name}: {from_to(entry.before, entry.after)} (p = {entry.p:.1g})" for name, entry in shifts.items()]
    evidence.append(f"by what such prompts get on either side, that is {share:+.3f} of the reward")
    if new > NEW_SHARE:
        evidence.append(f"{new:.0%} of the prompts are like none before, so more of the change may be theirs")
    order_R = -np.sign(widest.size) * features[strongest][around.group_R]
    yield Finding(
        "mix",
        f"other prompts: {strongest} {from_to(widest.before, widest.after)}",
        replace(widest, p=min(1.0, widest.p * len(shifts))),
        None if new > NEW_SHARE else share,
        [*evidence, *_recurring(around)],
        rows_to_show(around, np.ones(len(order_R), bool), order_R),
    )


def _outside(values_G: np.ndarray, after_G: np.ndarray) -> float:
    """The share of the groups from the iteration on whose value is outside of the range of those
    before.
    """
    before, after = values_G[~after_G], values_G[after_G]
    return float(((after < before.min()) | (after > before.max())).mean())


def _features(around: Around) -> dict[str, np.ndarray]:
    """Numbers about each group's prompt that are known before it is answered, by name, [G]; only
    those that vary.
    """
    prompts = [group.prompt for group in around.groups]
    lengths_G = np.array([len(prompt.prompt_tokens) for prompt in prompts]) - template_tokens(around)
    columns = {"prompt tokens beside the template": lengths_G.astype(float)}
    if all(prompt.answer is not None for prompt in prompts):
        columns["characters of the answer"] = np.array([len(str(prompt.answer)) for prompt in prompts], dtype=float)
    sources = sorted({prompt.source for prompt in prompts})
    columns |= {
        f"share of {source}": np.array([float(prompt.source == source) for prompt in prompts]) for source in sources[1:]
    }
    return {name: column for name, column in columns.items() if np.ptp(column) > 0}


def _first_of_each_prompt(around: Around) -> np.ndarray:
    """The positions of groups, one for each prompt of a side: a repeated prompt gives no new
    information.
    """
    seen: dict[tuple[bool, tuple[int, ...]], int] = {}
    for index, key in enumerate(zip(around.after_G.tolist(), around.texts(), strict=True)):
        seen.setdefault(key, index)
    return np.array(sorted(seen.values()))


def _slopes(around: Around, features: dict[str, np.ndarray]) -> np.ndarray:
    """The reward per unit of each feature, fitted together and within each side, with a little
    ridge.
    """
    rewards_G = around.per_group(np.where(around.fault_R, np.nan, around.reward_R))
    known_G = np.isfinite(rewards_G)
    design = np.stack([*features.values(), around.after_G.astype(float)], axis=1)[known_G]
    spread = design.std(0)
    scale = np.where(spread > 0, spread, 1.0)
    units = (design - design.mean(0)) / scale
    ridge = 1e-3 * len(units) * np.eye(design.shape[1])
    moments = units.T @ (rewards_G[known_G] - rewards_G[known_G].mean())
    return (np.linalg.solve(units.T @ units + ridge, moments) / scale)[:-1]


def _recurring(around: Around) -> list[str]:
    """Lines on the reward of prompts that were drawn on both sides, which no change of the mix
    explains.
    """
    rewards: dict[tuple[int, ...], tuple[list[float], list[float]]] = {}
    for text, after, reward in zip(around.texts(), around.after_G, around.per_group(around.reward_R), strict=True):
        rewards.setdefault(text, ([], []))[int(after)].append(float(reward))
    both = [(np.mean(before), np.mean(after)) for before, after in rewards.values() if before and after]
    if not both:
        return []
    before, after = np.mean(both, axis=0)
    return [f"the {len(both)} prompts that were drawn on both sides: reward {from_to(float(before), float(after))}"]


def duplicates(around: Around) -> Findings:
    """The same prompt several times within an iteration."""
    repeats_G = around.repeats_G()
    if not repeats_G.any():
        return
    rise = shift(repeats_G.astype(float), around.iteration_G, around.at)
    if rise.size <= 0:
        return
    rewards_G = around.per_group(around.reward_R)
    late = repeats_G & around.after_G
    others = rewards_G[~repeats_G]
    usual = float(np.nanmean(others)) if len(others) else float(np.nanmean(rewards_G))
    counts = Counter(text for text, wanted in zip(around.texts(), late, strict=True) if wanted)
    top_text, top = counts.most_common(1)[0]
    num_after = int(around.after_G.sum())
    name = next(group.prompt for group, text in zip(around.groups, around.texts(), strict=True) if text == top_text)
    evidence = [
        f"groups whose prompt comes again in their iteration: {rise.before:.1%} -> {rise.after:.1%}",
        (
            f"distinct prompts from {around.at} on:"
            f" {len({text for text, after in zip(around.texts(), around.after_G, strict=True) if after})} in"
            f" {num_after} groups"
        ),
        f"the most frequent one has {top} groups: {' '.join(str(name.messages[-1].get('content')).split())[:120]}",
    ]
    explains = rise.size * (float(np.nanmean(rewards_G[late])) - usual)
    yield Finding("duplicates", f"the same prompts again: {rise.before:.1%} -> {rise.after:.1%} of the groups", rise,
                  explains, evidence, rows_to_show(around, repeats_G[around.group_R]))  # fmt: skip
