"""Encodes data sets: conversations of SFT, and prompts for the policy. A row that the template
cannot write is refused with an error that names its place.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator

import numpy as np

from rlpipe.base.errors import UserError
from rlpipe.data.chat import ChatTokenizer
from rlpipe.records.prompt import Messages, Prompt, SampledTokens, Talk, Tool
from rlpipe.records.rollout import Conversation

logger = logging.getLogger(__name__)


def encode_talk(tokenizer: ChatTokenizer, talk: Talk) -> tuple[list[int], list[int]]:
    """Tokens and mask of a conversation, by `encode_conversation`, or as they were sampled.
    UserError naming its row.
    """
    if talk.sampled is not None:
        return _as_sampled(tokenizer, talk.where, talk.sampled)
    try:
        tokenizer = tokenizer.with_tools(talk.tools) if talk.tools else tokenizer
        tokenizer.check_calls(talk.messages)
        return tokenizer.encode_conversation(talk.messages)
    except UserError as error:
        raise UserError(f"{talk.where}: {error}") from error


def _as_sampled(tokenizer: ChatTokenizer, where: str, sampled: SampledTokens) -> tuple[list[int], list[int]]:
    if sampled.vocabulary != tokenizer.vocabulary:
        raise UserError(f"{where}: it was sampled with another vocabulary than this model's; use rollouts of its own")
    if not all(0 <= token < tokenizer.vocab_size for token in sampled.tokens):
        raise UserError(f"{where}: a token of 'sampled' is not one of the {tokenizer.vocab_size} of the vocabulary")
    return sampled.tokens, sampled.loss_mask


def encode_asked(tokenizer: ChatTokenizer, prompt_id: str, messages: Messages, tools: list[Tool] | None) -> list[int]:
    """Tokens of a prompt's messages, by `encode_prompt`. UserError naming the prompt."""
    try:
        tokenizer = tokenizer.with_tools(tools) if tools else tokenizer
        tokenizer.check_calls(messages)
        return tokenizer.encode_prompt(messages)
    except UserError as error:
        raise UserError(f"prompt {prompt_id}: {error}") from error


def prompt_lengths(tokenizer: ChatTokenizer, prompts: Iterable[Prompt]) -> Iterator[int]:
    """The number of tokens of each prompt."""
    return (len(encode_asked(tokenizer, row.prompt_id, row.messages, row.tools)) for row in prompts)


def tokenise_conversations(
    conversations: list[Talk], tokenizer: ChatTokenizer, tokens_max: int
) -> tuple[list[Conversation], dict[str, int]]:
    """Returns the conversations, cut to `tokens_max` tokens, and the counts {"truncated",
    "dropped_empty_mask"}.

    A row without a token of the assistant is dropped; the others keep the order of `conversations`.
    """
    assert tokens_max > 0
    rows: list[Conversation] = []
    num_truncated = 0
    for talk in conversations:
        tokens, loss_mask = encode_talk(tokenizer, talk)
        num_truncated += len(tokens) > tokens_max
        mask = np.array(loss_mask[:tokens_max], dtype=np.int8)
        rows.append(Conversation(np.array(tokens[:tokens_max], dtype=np.int32), mask))
    if not tokenizer.knows_tools and (num_with := sum(bool(talk.tools) for talk in conversations)):
        logger.warning(
            f"{num_with} of {len(rows)} conversations have tools, and the chat template writes none: set"
            " model.chat_template"
        )
    kept = [row for row in rows if row.loss_mask.any()]
    whole = [row for row in kept if len(row.tokens) < tokens_max]
    if whole and not any(row.tokens[row.loss_mask.nonzero()[0][-1]] in tokenizer.stop_token_ids for row in whole):
        logger.warning(
            f"no turn of the assistant ends with a token that stops sampling ({tokenizer.stop_token_ids}): the policy"
            " would not learn to end its turns; write one after the turn in the chat template (model.chat_template)"
        )
    num_dropped = len(rows) - len(kept)
    if num_truncated:
        logger.warning(
            f"{num_truncated} of {len(rows)} conversations are longer than model.context_tokens_max={tokens_max} and"
            f" were truncated; {num_dropped} were dropped, nothing of the assistant being left"
        )
    return kept, {"truncated": num_truncated, "dropped_empty_mask": num_dropped}
