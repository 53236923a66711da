"""The place of a turn in a conversation whose template writes earlier messages in another way once
more have followed.

Mistral's puts the tools before the last message of the user, Hermes' ends the last result of a tool
otherwise than those before it.
"""

from __future__ import annotations

from collections.abc import Callable

from rlpipe.records.prompt import Messages

Render = Callable[[Messages, bool], str]  # with the head of the assistant's turn, or without
STANDS_IN = "rlpipe-stands-in"


def turn_in_place(
    render: Render, messages: Messages, index: int, text: str, specials: tuple[str, ...]
) -> tuple[int, int] | None:
    """The characters of `text`, the whole conversation, that turn `index` of the assistant has;
    None where they cannot be known.

    The conversation is written with another text in the place of the turn: what is around it in
    both is not the turn's.
    """
    assert index > 0, "something was asked"
    other = {"role": messages[index]["role"], "content": STANDS_IN}
    before, placed, after = render([*messages[:index], other, *messages[index + 1 :]], False).partition(STANDS_IN)
    end = max((token for token in specials if after.startswith(token)), key=len, default="")
    prompt, bare = render(messages[:index], True), render(messages[:index], False)
    own = render([*messages[:index], other], False).partition(STANDS_IN)[0]
    # what the template itself puts before the turn's text, but not into what the policy is asked
    # with: it is the turn's
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
