"""Finds a turn in a conversation whose template writes earlier messages differently once others
follow.

Mistral's puts the tools before the last message of the user; Hermes' ends the last tool result
differently from earlier ones.
"""

from __future__ import annotations

from collections.abc import Callable

from rlpipe.records.prompt import Messages

# (messages, with the head of the assistant's turn) -> text
Render = Callable[[Messages, bool], str]
STANDS_IN = "rlpipe-stands-in"


def turn_in_place(
    render: Render, messages: Messages, index: int, text: str, specials: tuple[str, ...]
) -> tuple[int, int] | None:
    """The span of turn `index`, of the assistant, in `text`, the whole conversation; None where it
    cannot be determined.

    The conversation is rendered again with another text in place of the turn: the text around it
    that both have is not part of the turn.
    """
    assert index > 0, "something was asked"
    other = {"role": messages[index]["role"], "content": STANDS_IN}
    before, placed, after = render([*messages[:index], other, *messages[index + 1 :]], False).partition(STANDS_IN)
    end = max((token for token in specials if after.startswith(token)), key=len, default="")
    prompt, bare = render(messages[:index], True), render(messages[:index], False)
    own = render([*messages[:index], other], False).partition(STANDS_IN)[0]
    # text that the template puts before the turn's text, but not into the prompt, is part of the
    # turn
    lead = own[len(prompt) :] if own.startswith(prompt) else ""
    start = len(before) - len(lead)
    head = prompt.removeprefix(bare)
    known = prompt.startswith(bare) and (head or own.startswith(prompt))
    stop = len(text) - len(after) + len(end)
    fits = (
        before.endswith(head + lead)
        and text.startswith(before[:start])
        and text.endswith(after)
        and stop - len(end) > start
    )
    return (start, stop) if placed and end and known and fits else None
