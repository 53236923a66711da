"""The turns of a rollout with several turns: the policy's text, and the messages of an environment
or an agent in between.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from rlpipe.records.prompt import Message, Messages
from rlpipe.records.rollout import Rollout

POLICY = "assistant"  # the policy's role
Decode = Callable[[list[int]], str]  # tokens to the text that rewards get


def told_ranges(rollout: Rollout) -> list[range]:
    """The ranges of the completion with messages to the policy, in order: tokens outside of the
    loss mask with a logprob of exactly 0. Empty without an environment or an agent.

    Trap: a token of the policy that is not trained (too old, or masked later) can have logprob 0,
    too. The outcome has the number of turns, so of too many ranges the longest are taken.
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
    """The messages to the policy after each of its turns, including the last one. `by_agent`:
    leaves out an agent's first messages, which are the prompt.
    """
    said = rollout.environment.messages if rollout.environment else []
    return said[1:] if by_agent else said


def turns_of(rollout: Rollout, decode: Decode, by_agent: bool) -> Messages:
    """The turns after the prompt as messages: the policy's as `assistant`, and the messages in
    between.

    Example: [assistant "<tool>37*4</tool>", tool "148", assistant "<answer>148</answer>"]; for a
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
    """Messages as text for a reader, one paragraph each.

    Example: "[user] 37*4?\n[assistant] 148".
    """
    return "\n".join(f"[{turn['role']}] {turn['content']}" for turn in turns)


def speakers(rollout: Rollout, by_agent: bool) -> dict[int, str]:
    """Maps a token of the completion to the role that speaks from there on; empty if the completion
    is one turn.
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
