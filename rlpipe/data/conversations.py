"""SFT conversations to token rows, with every cut and every drop counted."""

from __future__ import annotations

import logging
from collections import Counter

from rlpipe.data.chat import ChatTokenizer, Messages
from rlpipe.types import JsonDict

logger = logging.getLogger(__name__)


def tokenise_conversations(
    conversations: list[Messages], tokenizer: ChatTokenizer, tokens_max: int
) -> tuple[list[JsonDict], dict[str, int]]:
    """Rows {"tokens", "loss_mask"} of at most `tokens_max` tokens, and what was cut: {"truncated", "dropped_empty_mask"}.

    A row is dropped when nothing of the assistant is left in it; rows keep the order of `conversations`.
    """
    assert tokens_max > 0
    counts = Counter(truncated=0, dropped_empty_mask=0)
    rows: list[JsonDict] = []
    for messages in conversations:
        tokens, loss_mask = tokenizer.encode_conversation(messages)
        counts["truncated"] += len(tokens) > tokens_max
        row = {"tokens": tokens[:tokens_max], "loss_mask": loss_mask[:tokens_max]}
        if any(row["loss_mask"]):
            rows.append(row)
        else:
            counts["dropped_empty_mask"] += 1
    assert len(rows) + counts["dropped_empty_mask"] == len(conversations)
    if counts["truncated"]:
        logger.warning(
            "%d of %d conversations are longer than model.context_tokens_max=%d and were truncated; %d were dropped, nothing of the assistant being left",
            counts["truncated"], len(conversations), tokens_max, counts["dropped_empty_mask"],
        )  # fmt: skip
    return rows, dict(counts)
