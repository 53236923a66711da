"""The turns of a rollout of several turns: what the policy wrote, and what an environment or an
agent told it between."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from rlpipe.records.prompt import Message, Messages
from rlpipe.records.rollout import Rollout

POLICY = "assistant"  # its role
Decode = Callable[[list[int]], str]  # tokens to text, as rewards read it


def told_ranges(rollout: Rollout) -> list[range]:
    """The ranges of the completion in which the policy was told something, in order: tokens in no
    loss with a logprob of exactly 0. Without an environment and without an agent there is none.

    A token that the policy wrote can have that logprob too where it is not trained (too old, or
    masked later): of too many places the longest are taken, because the outcome says how many turns
    there are.
    """
    outcome = rollout.environment
    if outcome is None:
        return []
    is_told = (np.asarray(rollout.loss_mask) == 0) & (np.asarray(rollout.rollout_logprobs) == 0)
    borders = np.flatnonzero(np.diff(np.concatenate([[False], is_told, [False]]).astype(np.int8))).tolist()
    places = [range(start, stop) for start, stop in zip(borders[::2], borders[1::2], strict=True) if start]
    num_told = max(outcome.num_turns - (not rollout.is_cut_short), 0)
    return sorted(sorted(places, key=len, reverse=True)[:num_told], key=lambda place: place.start)


def answers_of(rollout: Rollout, by_agent: bool) -> list[Messages]:
    """The messages that the policy was told after each of its turns, also those after the last.
    `by_agent`: an agent's first messages are the prompt."""
    said = rollout.environment.messages if rollout.environment else []
    return said[1:] if by_agent else said


def turns_of(rollout: Rollout, decode: Decode, by_agent: bool) -> Messages:
    """The turns after the prompt, a message each: the policy's as `assistant`, and the messages
    that it was told between.

    Example: [assistant "<tool>37*4</tool>", tool "148", assistant "<answer>148</answer>"]; of a
    rollout without an environment the completion alone.
    """
    places = told_ranges(rollout)
    if not places:
        return [_assistant(rollout.completion)]
    tokens, turns, start = rollout.completion_tokens, list[Message](), 0
    for place, messages in zip(places, answers_of(rollout, by_agent), strict=False):
        turns += [_assistant(decode(tokens[start : place.start].tolist())), *messages]
        start = place.stop
    last = [_assistant(decode(tokens[start:].tolist()))] if start < len(tokens) else []
    return turns + last


def transcript(turns: Messages) -> str:
    """Messages as a text for a reader, a paragraph each.

    Example: "[user] 37*4?\n[assistant] 148".
    """
    return "\n".join(f"[{turn['role']}] {turn['content']}" for turn in turns)


def speakers(rollout: Rollout, by_agent: bool) -> dict[int, str]:
    """Token of the completion -> who speaks from there on, by role; empty where all of it is one
    turn.
    """
    places = told_ranges(rollout)
    if not places:
        return {}
    starts = {0: POLICY}
    for place, messages in zip(places, answers_of(rollout, by_agent), strict=False):
        starts |= {place.start: ", ".join(message["role"] for message in messages), place.stop: POLICY}
    return starts


def _assistant(text: str) -> Message:
    return {"role": POLICY, "content": text}
