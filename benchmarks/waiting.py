"""Environments that wait, for benchmarks/environments.py: as one waits for a browser, a sandbox or
a service. They import next to nothing."""

from __future__ import annotations

import asyncio
import time

from rlpipe.extras.environments.protocol import Step
from rlpipe.records.prompt import Messages, RewardPrompt


class AsyncWait:
    """Answers each completion after `seconds`, and is done after `turns`."""

    def __init__(self, seconds: float, turns: int) -> None:
        self.seconds = seconds
        self.turns = turns

    async def start(self, prompt: RewardPrompt) -> Messages:
        return prompt["messages"]

    async def step(self, completion: str) -> Step:
        await asyncio.sleep(self.seconds)
        return self.answer()

    def answer(self) -> Step:
        self.turns -= 1
        return Step([{"role": "user", "content": "go on"}], done=self.turns == 0, reward=1.0)


class SyncWait(AsyncWait):
    """The same with ordinary methods: a process waits for one at a time."""

    def start(self, prompt: RewardPrompt) -> Messages:  # pyright: ignore[reportIncompatibleMethodOverride]
        return prompt["messages"]

    def step(self, completion: str) -> Step:  # pyright: ignore[reportIncompatibleMethodOverride]
        time.sleep(self.seconds)
        return self.answer()
