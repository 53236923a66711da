"""`rlpipe chat`: a conversation with one policy in a terminal, or with two at once."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Protocol

from rlpipe.base.errors import UserError
from rlpipe.data.encoding import TooLong
from rlpipe.engines.client import Completion, Sampling
from rlpipe.extras.serve.policy import ServedPolicy, served
from rlpipe.records.prompt import Messages
from rlpipe.store.run import Run

READ_BYTES = 1 << 16
STDIN = 0


class Show(Protocol):
    """Prints a text, with the end of the line unless told otherwise."""

    def __call__(self, text: str, *, end: str = "\n") -> None: ...


@dataclass(frozen=True)
class Party:
    """A policy that is talked to. Each has a conversation of its own."""

    policy: ServedPolicy
    temperature: float
    tokens_max: int | None
    said: Messages = field(default_factory=list)

    async def reply(self, line: str, show: Show) -> None:
        """Shows the reply to a line as it is sampled. Where the context has no room for it, the
        conversation begins anew with this line.
        """
        show(f"{self.policy.name}> ", end="")
        self.said.append({"role": "user", "content": line})
        prompt = await asyncio.to_thread(self._prompt)
        if not prompt and len(self.said) > 1:
            show("(the context is full: the conversation begins anew) ", end="")
            del self.said[:-1]
            prompt = await asyncio.to_thread(self._prompt)
        if not prompt:
            show("(this is too long for the context)")
            self.said.clear()
            return
        shown = ""

        def on_text(text: str, _: Completion) -> None:
            nonlocal shown
            if text.startswith(shown):  # else an engine that took over has not come so far yet
                show(text[len(shown) :], end="")
                shown = text

        room = self.policy.room(prompt)
        tokens_max = room if self.tokens_max is None else min(room, self.tokens_max)
        params = Sampling(tokens_max, self.temperature, seed=self.policy.new_seed())
        spoken = await self.policy.say(prompt, params, on_text=on_text)
        show(spoken.text[len(shown) :] + ("" if spoken.completion.finish_reason == "stop" else " (cut off)"))
        self.said.append({"role": "assistant", "content": spoken.text})

    def _prompt(self) -> list[int]:
        """The tokens of the conversation; empty where no reply has room after them."""
        try:
            tokens = self.policy.tokenizer.encode_prompt(self.said, self.policy.config.model.context_tokens_max)
        except TooLong:
            return []
        return tokens if self.policy.room(tokens) > 0 else []


async def lines() -> AsyncIterator[str]:
    """The lines of stdin that are not blank, until its end. It is read in a thread that may be left
    behind in a read when the program ends, so not with Python's own buffer, whose lock it would
    keep.
    """
    loop, parts = asyncio.get_running_loop(), asyncio.Queue[bytes]()

    def read() -> None:
        part = b"first"
        with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
            while part:
                try:
                    part = os.read(STDIN, READ_BYTES)
                except OSError:  # its terminal has gone
                    part = b""
                loop.call_soon_threadsafe(parts.put_nowait, part)

    threading.Thread(target=read, daemon=True, name="stdin").start()
    unread, is_open = b"", True
    while is_open:
        part = await parts.get()
        is_open = bool(part)
        *whole, unread = (unread + part).split(b"\n")
        for line in [*whole, *([] if is_open else [unread])]:
            if text := line.decode(errors="replace").strip():
                yield text


async def talk(parties: list[tuple[Run, int | None]], temperature: float, tokens_max: int | None, show: Show) -> None:
    """Answers each line of stdin by every policy, until its end.

    UserError when there is no such policy; EngineError when no engine serves it.
    """
    if sys.stdin is None:  # its number is that of whatever was opened first
        raise UserError("stdin is closed: pipe lines in, or type them in a terminal")
    async with contextlib.AsyncExitStack() as stack:
        talkers = [
            Party(await stack.enter_async_context(served(run, version)), temperature, tokens_max)
            for run, version in parties
        ]
        prompt = "you> " if os.isatty(STDIN) else ""
        names = " and ".join(party.policy.name for party in talkers)
        show(f"{names}: a line is a message; Ctrl-D ends")
        show(prompt, end="")
        async for line in lines():
            for party in talkers:
                try:
                    await party.reply(line, show)
                except UserError as error:  # the chat template refuses it
                    show(f"({error})")
                    party.said.clear()
            show(prompt, end="")
        show("")
