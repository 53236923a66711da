"""Converts messages to tokens and back, and finds the assistant's tokens in a conversation.

Imports neither torch nor transformers.
"""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from tokenizers import Tokenizer

from rlpipe.base.errors import UserError
from rlpipe.data.encoding import Encoder, Span, any_of
from rlpipe.data.template import ChatTemplate
from rlpipe.data.token_bytes import TokenBytes
from rlpipe.data.tokenizer_files import folder_template, read_tokenizer, special_texts, vocabulary_sha256
from rlpipe.records.messages import content_text
from rlpipe.records.prompt import Message, Messages, Tool

ControlTokens = Literal["text", "as_written"]
NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# stands for the text of a turn, to find what the template writes around it
PLACEHOLDER = "rlpipe-placeholder"
# two conversations that end with the assistant's turn: a continuation must not depend on what was
# said
DUMMY_TALKS: list[Messages] = [
    [{"role": "user", "content": "ask"}, {"role": "assistant", "content": "RLPIPE-SAID"}],
    [
        {"role": "user", "content": "first"},
        {"role": "assistant", "content": "second"},
        {"role": "user", "content": "third"},
        {"role": "assistant", "content": "RLPIPE-SAID-MORE"},
    ],
]


class ChatTokenizer:
    """A tokenizer with its chat template.

    Example, with the tiny tokenizer: encode_conversation([user "hi", assistant "yo"]) gives the
    tokens of "<|user|>hi<|end|><|assistant|>yo<|end|>" and the mask [0, 0, 0, 0, 0, 1, 1, 1].
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        chat_template: str,
        special_tokens: dict[str, str],
        variables: Mapping[str, Any] | None = None,
        control_tokens: ControlTokens = "text",
    ) -> None:
        """`control_tokens`: how to encode the text of a control token in messages and tools, except
        in the assistant's own text: as letters, or as the token.
        """
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._template = ChatTemplate(chat_template, special_tokens, variables)
        self._encoder = Encoder(tokenizer)
        self._specials = self._encoder.specials
        self._controls = any_of(self._specials) if control_tokens == "text" else None
        self._named = {name: token for name, token in special_tokens.items() if name in NAMED_TOKENS}
        self.eos_token_id = self._id_of(special_tokens, "eos_token")
        self.pad_token_id = (
            self._id_of(special_tokens, "pad_token") if "pad_token" in special_tokens else self.eos_token_id
        )
        self.vocab_size = tokenizer.get_vocab_size(with_added_tokens=True)
        assert max(self.eos_token_id, self.pad_token_id) < self.vocab_size

    @cached_property
    def vocabulary(self) -> str:
        """The digest of its vocabulary, with which `SampledTokens` are compared."""
        return vocabulary_sha256(self._tokenizer)

    @cached_property
    def stop_token_ids(self) -> list[int]:
        """The ids of the tokens that end the assistant's turn: the end-of-text token, and the
        special token that the template writes after a turn.

        In base models these differ: Qwen's text ends with <|endoftext|>, its turns with <|im_end|>.
        """
        return sorted({self.eos_token_id, self._turn_end_id})

    @cached_property
    def _turn_end_id(self) -> int:
        """The special token that the template writes after a turn of the assistant; the end-of-text
        token if it writes none.
        """
        talk = DUMMY_TALKS[0]
        try:
            tail = self._template.render(talk).rpartition(talk[-1]["content"])[2].lstrip()
        except UserError:  # the template does not accept this conversation
            return self.eos_token_id
        end = max((token for token in self._specials if tail.startswith(token)), key=len, default="")
        end_id = self._tokenizer.token_to_id(end) if end else None
        assert end_id is None or end_id < self.vocab_size, f"{end} is outside the vocabulary"
        return self.eos_token_id if end_id is None else end_id

    @cached_property
    def _unheard(self) -> dict[int, str]:
        """The tokens, by id, that are left out of a completion's text: those that begin, end or pad
        a text or a turn. All other special tokens may be marks.
        """
        stops = (self._tokenizer.id_to_token(token_id) for token_id in self.stop_token_ids)
        ids = {token: self._tokenizer.token_to_id(token) for token in (*self._named.values(), *stops) if token}
        return {token_id: token for token, token_id in ids.items() if token_id is not None}

    @cached_property
    def token_bytes(self) -> TokenBytes:
        """Returns the function that gives the bytes of each token of a text, also of special
        tokens.
        """
        return TokenBytes(self._tokenizer)

    @classmethod
    def from_folder(
        cls,
        folder: Path | str,
        chat_template: str = "",
        variables: Mapping[str, Any] | None = None,
        control_tokens: ControlTokens = "text",
    ) -> ChatTokenizer:
        """Loads the tokenizer of a model folder in HF format. `chat_template`: replaces the
        folder's; `variables`: for the template.

        UserError naming what is missing.
        """
        folder = Path(folder)
        tokenizer, settings = read_tokenizer(folder)
        template = chat_template or folder_template(folder, settings)
        if not template:
            raise UserError(f"model.path={folder}: its tokenizer has no chat template; set model.chat_template")
        return cls(tokenizer, template, special_texts(settings), variables, control_tokens)

    def _id_of(self, special_tokens: dict[str, str], name: str) -> int:
        token = special_tokens.get(name)
        token_id = self._tokenizer.token_to_id(token or "")
        if token_id is None:
            raise UserError(
                f"tokenizer_config.json: {name}={token!r} is not a token of tokenizer.json; name one that is"
            )
        return token_id

    def encode_prompt(self, messages: Messages, tokens_max: int | None = None) -> list[int]:
        """Encodes the prompt of the policy: `messages` and the head of the assistant's turn.

        TooLong when no token of `tokens_max` would be left.
        """
        text = self._template.render(messages, add_generation_prompt=True)
        self._encoder.check_fits(text, tokens_max)
        return self._encoder.encode(text, self._letters(messages, text, add_generation_prompt=True))

    def encode_text(self, text: str, tokens_max: int | None = None) -> list[int]:
        """Encodes a text as it is, without the chat template; control tokens in it count as such.

        TooLong as `encode_prompt`.
        """
        self._encoder.check_fits(text, tokens_max)
        return self._encoder.encode(text)

    def encode_conversation(self, messages: Messages) -> tuple[list[int], list[int]]:
        """Returns the tokens of `messages`, and a mask that is 1 on the assistant's tokens in every
        turn, including its end-of-turn token.

        UserError when the assistant's turns cannot be found in the template's text.
        """
        text, spans = self._template.render_marked(messages)
        if not self._template.has_marks:
            turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
            spans = [self._turn_span(messages, index, text) for index in turns]
            assert all(before[1] <= after[0] for before, after in itertools.pairwise(spans)), "turns do not overlap"
        return self._encode_masked(text, spans, self._letters(messages, text))

    def encode_continuation(self, messages: Messages, tokens_max: int | None = None) -> list[int]:
        """Returns the tokens of `messages` after the assistant's end-of-turn token, with the head
        of the assistant's next turn.

        UserError when the template cannot continue a conversation with them; TooLong as
        `encode_prompt`.
        """
        (text, letters), other = (self._continuation(talk, messages) for talk in DUMMY_TALKS)
        self._encoder.check_fits(text, tokens_max)
        tokens = self._encoder.encode(text, letters, before=[self._turn_end_id])
        if (text, letters) != other or self._normal(self.decode_raw(tokens)) != self._normal(text):
            raise _no_continuation(messages)
        return tokens

    def _continuation(self, talk: Messages, messages: Messages) -> tuple[str, list[Span]]:
        """Returns the text after the last turn of `talk`, which is the assistant's, and its spans
        that are encoded as letters.
        """
        last_text = talk[-1]["content"]
        turn_end = self._without_tail(self._template.render(talk).rpartition(last_text)[2])
        longer = self._template.render([*talk, *messages], add_generation_prompt=True)
        after_last = longer.partition(last_text)[2]
        rest = after_last.removeprefix(turn_end)
        said = [content_text(message).strip() for message in messages]
        if not (turn_end and after_last.startswith(turn_end) and all(text in rest for text in said)):
            raise _no_continuation(messages)
        letters, start = self._letters([*talk, *messages], longer, add_generation_prompt=True), len(longer) - len(rest)
        return rest, _within(letters, start, len(longer))

    def _normal(self, text: str) -> str:
        """The text as the tokenizer normalises it (NFC, lower case), without spaces."""
        normalizer = self._tokenizer.normalizer
        return "".join((normalizer.normalize_str(text) if normalizer else text).replace("\u2581", " ").split())

    def _letters(self, messages: Messages, text: str, add_generation_prompt: bool = False) -> list[Span]:
        """The spans of `text`, the rendered `messages`, that look like control tokens but were not
        written by the template.
        """
        if self._controls is None:
            return []
        return self._template.spans_from_outside(self._controls, messages, text, add_generation_prompt)

    def with_tools(self, tools: list[Tool]) -> ChatTokenizer:
        """The same tokenizer with these tools for its template."""
        other = copy.copy(self)
        other._template = self._template.with_tools(tools)
        return other

    @property
    def knows_tool_calls(self) -> bool:
        """True when the template writes the `tool_calls` of messages."""
        return self._template.argument_form != "none"

    @property
    def template_text(self) -> str:
        """The chat template for a model's folder, with the values of its variables, except the
        tools of a conversation.
        """
        return self._template.text

    @property
    def knows_tools(self) -> bool:
        """True when the template writes tools."""
        return self._template.knows_tools

    def check_calls(self, messages: Messages) -> None:
        """Raises UserError when the template leaves out a tool call, or a part of one."""
        self._template.check_calls(messages)

    def decode(self, tokens: list[int]) -> str:
        """The text of `tokens` as rewards, environments and agents get it: with marks such as
        [THINK], even if they are special tokens, but without tokens that begin, end or pad a text
        or a turn.
        """
        return self.decode_raw([token for token in tokens if token not in self._unheard])

    def heard(self, text: str) -> str:
        """Returns what `decode` gives for a completion with this text. UserError when a token that
        is left out is inside it.
        """
        ends = any_of(self._unheard.values())
        assert ends is not None, "there is an end of text"
        inside = re.sub(rf"^(\s|{ends.pattern})+|(\s|{ends.pattern})+$", "", text)
        if end := ends.search(inside):
            raise UserError(
                f"{end[0]!r} in a completion ({text!r:.80}) is a token with which this model begins, ends or pads a"
                " text; it is removed before rewards are computed, so write other text there"
            )
        return self.decode(self._encoder.encode(text))

    def _turn_span(self, messages: Messages, index: int, text: str) -> Span:
        """The span of turn `index` in `text`, from the end of the turn's prompt to its end-of-turn
        token, inclusive.
        """
        alone = text if index + 1 == len(messages) else self._template.render(messages[: index + 1])
        if index:
            head = self._template.render(messages[:index], add_generation_prompt=True)
        else:  # it has no earlier messages, and many templates refuse an empty list
            head = self._template.render([{**messages[0], "content": PLACEHOLDER}]).partition(PLACEHOLDER)[0]
        start = len(head)
        turn = self._without_tail(alone[start:])
        if not (text.startswith(head) and alone.startswith(head) and turn):
            span = _turn_in_place(self._template.render, messages, index, text, self._specials) if index else None
            if span is None:
                raise _unstable(messages[index])
            return span
        if text.startswith(turn, start):
            return start, start + len(turn)
        # an earlier turn may be shorter than when it was the last one: Qwen3 removes its reasoning
        end_of_turn = max((token for token in self._specials if turn.endswith(token)), key=len, default="")
        end = text.find(end_of_turn, start)
        kept = text[start:end].strip()
        if end < 0 or not kept or not turn.removesuffix(end_of_turn).rstrip().endswith(kept):
            raise _unstable(messages[index])
        return start, end + len(end_of_turn)

    def _without_tail(self, turn: str) -> str:
        """`turn` without the line breaks after its end-of-turn token, which the policy never
        writes.
        """
        stripped = turn.rstrip()
        return stripped if stripped.endswith(self._specials) else turn

    def _encode_masked(self, text: str, spans: list[Span], letters: list[Span]) -> tuple[list[int], list[int]]:
        """Encodes a text piece by piece, so that no token crosses a border of `spans`, and the
        prompt has the same tokens as while sampling. Returns tokens and mask.
        """
        tokens: list[int] = []
        mask: list[int] = []
        borders = [0, *(border for span in spans for border in span), len(text)]
        for index, (start, end) in enumerate(itertools.pairwise(borders)):
            piece = self._encoder.encode(text[start:end], _within(letters, start, end), before=tokens)
            tokens += piece
            mask += [index % 2] * len(piece)
        whole, offsets = self._encoder.whole(text)
        if letters or tokens == whole or self.decode_raw(tokens) == self.decode_raw(whole):
            return tokens, mask
        # the tokenizer drops spaces, so the pieces differ from the whole
        return whole, [int(any(start < right <= end for start, end in spans)) for _, right in offsets]

    def decode_plain(self, tokens: list[int]) -> str:
        """The text of `tokens` without any special token."""
        return self._tokenizer.decode(tokens, skip_special_tokens=True)

    def decode_raw(self, tokens: list[int]) -> str:
        """The text of `tokens` with special tokens."""
        return self._tokenizer.decode(tokens, skip_special_tokens=False)


def _turn_in_place(
    render: Callable[[Messages, bool], str],
    messages: Messages,
    index: int,
    text: str,
    specials: tuple[str, ...],
) -> Span | None:
    """The span of turn `index`, of the assistant, in `text`, the whole conversation; None where it
    cannot be determined. `render`: (messages, with the head of the assistant's turn) -> text.

    For a template that writes earlier messages differently once others follow: Mistral's puts the
    tools before the last message of the user; Hermes' ends the last tool result differently from
    earlier ones. The conversation is rendered again with another text in place of the turn: the
    text around it that both have is not part of the turn.
    """
    assert index > 0, "something was asked"
    other = {"role": messages[index]["role"], "content": PLACEHOLDER}
    before, placed, after = render([*messages[:index], other, *messages[index + 1 :]], False).partition(PLACEHOLDER)
    end = max((token for token in specials if after.startswith(token)), key=len, default="")
    prompt, bare = render(messages[:index], True), render(messages[:index], False)
    own = render([*messages[:index], other], False).partition(PLACEHOLDER)[0]
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


def _within(spans: list[Span], start: int, end: int) -> list[Span]:
    """The parts of the spans between `start` and `end`, with positions relative to `start`."""
    cut = [(max(left, start) - start, min(right, end) - start) for left, right in spans]
    return [(left, right) for left, right in cut if left < right]


def _unstable(message: Message) -> UserError:
    return UserError(
        "the chat template rewrites earlier turns, so the assistant's tokens cannot be found (at"
        f" {content_text(message)[:80]!r}); put {{% generation %}}...{{% endgeneration %}} around the assistant's text"
        " in the template, and set model.chat_template to it"
    )


def _no_continuation(messages: Messages) -> UserError:
    roles = ", ".join(dict.fromkeys(message["role"] for message in messages))
    return UserError(
        f"the chat template does not continue a conversation with messages of role {roles} (at"
        f" {messages[0]['content'][:80]!r}) in a way that depends only on these messages, so rl.environment cannot"
        " answer the policy: use other roles in the environment, or set model.chat_template to a template that"
        " appends each message to the text before it"
    )
