"""Environments of the package verifiers (0.4), with the policy in the seat of their one agent.

    pip install verifiers
    rlpipe run PRESET --set rl.environment=examples.verifiers_seat:Seat \
        --set 'rl.environment_args={taskset = "my-taskset"}' \
        --set data.NAME.source=examples.verifiers_seat:tasks \
        --set 'data.NAME.args={taskset = "my-taskset"}' ...

In verifiers an environment calls its agent: `run(task, agents)` asks for one turn after another.
Here that call waits for the policy's next completion, so that what verifiers sees as one long
coroutine is a rollout of several steps. Many wait side by side in one process.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import verifiers.v1 as vf
from verifiers.v1 import graph
from verifiers.v1.episode import EnvInfo
from verifiers.v1.state import state_cls

from rlpipe.extras.environments.protocol import Step
from rlpipe.records.prompt import Messages, RewardPrompt


class Seat:
    """A task of a verifiers taskset, by the number that is the prompt's answer.

    Its rewards, weighted, are the step reward at the end.

    `seat`: the agent that the policy plays. An environment that asks another one (a judge, a
    modelled user) fails by name. Neither tools nor containers are started: a reward that needs a
    runtime is skipped, as verifiers does without one.
    """

    def __init__(self, taskset: str, seat: str = "agent", **settings: Any) -> None:
        self.env = vf.load_environment(vf.resolve_env_config({"taskset": {"id": taskset, **settings}}))
        self.seat = seat
        self.asked: asyncio.Queue[Messages] = asyncio.Queue()  # what the environment says to its agent
        self.completions: asyncio.Queue[str] = asyncio.Queue()
        self.traces: list[vf.Trace] = []

    async def start(self, prompt: RewardPrompt) -> Messages:
        """What the environment says before the first turn of its agent."""
        task = next(itertools.islice(self.env.taskset, int(prompt["answer"] or 0), None))
        self.playing = asyncio.create_task(self._play(task))
        messages = await self._next()
        if messages is None:
            raise ValueError(f"the environment of {self.env.config.env_id} asked its agent nothing")
        return messages

    async def step(self, completion: str) -> Step:
        """What it says next; the rewards and metrics of the trace
        once `run` has come to its end."""
        self.completions.put_nowait(completion)
        messages = await self._next()
        if messages is not None:
            return Step(messages)
        rewards = sum(trace.reward for trace in self.traces)
        values = {name: value for trace in self.traces for name, value in trace.metrics.items() if value is not None}
        return Step(
            done=True, reward=rewards, metrics={name: value for name, value in values.items() if name.isidentifier()}
        )

    async def close(self) -> None:
        """A rollout may be over before the environment is."""
        self.playing.cancel()
        await asyncio.wait({self.playing})

    async def _play(self, task: vf.Task) -> None:
        agents: Any = SimpleNamespace(**{self.seat: self})
        await self.env.setup(agents)
        await self.env.run(task, agents)
        await self.env.finalize(task, vf.Episode(env=EnvInfo(), task=_trace_task(task), traces=self.traces))

    async def _next(self) -> Messages | None:
        """What the agent is asked next; None once the environment has come to its end.

        Raises what it raised.
        """
        asked = asyncio.create_task(self.asked.get())
        await asyncio.wait({asked, self.playing}, return_when=asyncio.FIRST_COMPLETED)
        if asked.done():
            return asked.result()
        asked.cancel()
        self.playing.result()
        return None

    # what an environment calls its agent by

    @asynccontextmanager
    async def interaction(self, task: vf.Task, **_: Any) -> AsyncIterator[Conversation]:
        """A conversation about a task; it is scored when it has ended."""
        conversation = Conversation(self, task)
        yield conversation
        await task.score(conversation.trace)
        self.traces.append(conversation.trace)

    async def run(self, task: vf.Task, **_: Any) -> vf.Trace:
        """One turn."""
        async with self.interaction(task) as conversation:
            await conversation.turn()
        return conversation.trace


class Conversation:
    """The turns of one agent, and the trace of them."""

    def __init__(self, seat: Seat, task: vf.Task) -> None:
        self.seat = seat
        self.trace: vf.Trace = vf.Trace(
            task=_trace_task(task),
            state=state_cls(type(task))(),
            agent=vf.AgentInfo(config=vf.AgentConfig(), name=seat.seat),
        )
        data = task.data
        opening = [vf.UserMessage(content=data.prompt)] if isinstance(data.prompt, str) else [*(data.prompt or [])]
        self.messages: vf.Messages = [
            *([vf.SystemMessage(content=data.system_prompt)] if data.system_prompt else []),
            *opening,
        ]
        self.num_said = 0  # of the messages, how many the policy has been told

    async def turn(self, message: str | vf.Messages | None = None) -> vf.Segment:
        """Says what is new to the policy, and gives its completion."""
        said = [vf.UserMessage(content=message)] if isinstance(message, str) else [*(message or [])]
        self.messages += said
        new = self.messages[self.num_said :]
        self.seat.asked.put_nowait([{"role": one.role, "content": content_text(one)} for one in new])
        reply = vf.AssistantMessage(content=await self.seat.completions.get())
        response = vf.Response(id="", created=int(time.time()), model="policy", message=reply, finish_reason="stop")
        graph.prepare_turn(self.trace, self.messages).commit(response)
        self.messages.append(reply)
        self.num_said = len(self.messages)
        return vf.Segment(messages=[reply])


def tasks(seed: int, rows_max: int, taskset: str, **settings: Any) -> list[dict[str, str]]:
    """The first tasks of a taskset as prompts, each with its number as answer: a data set.

    `seed` is not used: a taskset has its own order.
    """
    env = vf.load_environment(vf.resolve_env_config({"taskset": {"id": taskset, **settings}}))
    numbered: Iterator[tuple[int, vf.Task]] = enumerate(itertools.islice(env.taskset, rows_max))
    return [{"prompt": task.data.prompt_text or task.key, "answer": str(number)} for number, task in numbered]


def content_text(message: Any) -> str:
    if isinstance(message.content, str):
        return message.content
    return "\n".join(part.text for part in message.content or [] if part.type == "text")


def _trace_task(task: vf.Task) -> Any:
    return vf.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)
