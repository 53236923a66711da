"""The processes that run agents, and the endpoint that they talk to."""

from __future__ import annotations

import asyncio
import logging
from contextlib import closing
from dataclasses import dataclass, field

from rlpipe.agents.endpoint import AgentEndpoint, Door
from rlpipe.agents.rollout import AgentRollout
from rlpipe.agents.worker import AgentAnswer, AgentRequest
from rlpipe.config.training import RlConfig
from rlpipe.data.chat import ChatTokenizer
from rlpipe.processes.pool import Child, ChildPool, ProcessEnded, code_environment
from rlpipe.records.prompt import RewardPrompt

log = logging.getLogger(__name__)
TRIES_MAX = 2  # of a rollout whose agent was killed
MODULE = "rlpipe.agents.worker"


class AgentFault(Exception):
    """Raised when an agent failed its rollout.

    Reasons: agent_error, _timeout, _crash (it was killed, twice), _invalid, _silent.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True)
class AgentOutcome:
    """The outcome of a rollout, as its agent returns it; reward None where it returns none."""

    reward: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)


class Agents:
    """Runs at most `rl.agents_max` agents at once, each in a process that is started when first
    needed; `close` ends them.
    """

    def __init__(self, rl: RlConfig, tokenizer: ChatTokenizer) -> None:
        self._rl = rl
        self._endpoint = AgentEndpoint(tokenizer)
        self._starting: asyncio.Task[None] | None = None
        self._children = _children(rl, rl.agents_max)
        self._idle: asyncio.LifoQueue[Child] = asyncio.LifoQueue()
        for child in self._children.children:
            self._idle.put_nowait(child)

    async def run(self, rollout: AgentRollout, prompt: RewardPrompt) -> AgentOutcome:
        """Runs the agent for one rollout, and again if it was killed; AgentFault.

        UserError when it cannot be loaded.
        """
        if self._starting is None:
            self._starting = asyncio.create_task(self._endpoint.start(self._rl.agent_address))
        await self._starting
        child, signals = await self._idle.get(), []
        try:
            while len(signals) < TRIES_MAX:
                async with rollout.one_try():
                    with self._endpoint.open(rollout) as door:
                        answer = await asyncio.wrap_future(child.thread.submit(self._ask, child, prompt, door))
                if "reason" in answer:
                    raise AgentFault(answer["reason"], answer["message"])
                if "signal" not in answer:
                    return AgentOutcome(answer["reward"], answer["metrics"])
                signals.append(answer["signal"])
                log.warning("rl.agent, prompt %s: it was killed (%s)", prompt["prompt_id"], signals[-1])
        finally:
            self._idle.put_nowait(child)
        raise AgentFault("agent_crash", f"it was killed {TRIES_MAX} times ({', '.join(signals)})")

    def _ask(self, child: Child, prompt: RewardPrompt, door: Door) -> AgentAnswer:
        """The child's answer; called in its thread."""
        child.start()
        try:
            request: AgentRequest = {"prompt": prompt, "base_url": door.base_url, "api_key": door.api_key}
            return child.ask(request, self._rl.agent_timeout_s)
        except ProcessEnded as error:
            return {"signal": str(error)}
        except TimeoutError:
            message = f"took more than rl.agent_timeout_s={self._rl.agent_timeout_s:g}"
            return {"reason": "agent_timeout", "message": message}

    async def close(self) -> None:
        """Kills the agents; callers that wait for one, or call later, get an EngineError."""
        await asyncio.to_thread(self._children.close)
        await self._endpoint.close()


def check_agent(rl: RlConfig) -> None:
    """UserError when the agent cannot be loaded. It is imported in a process of its own."""
    with closing(_children(rl, 1)) as children:
        children.on_all(Child.start)


def _children(rl: RlConfig, workers: int) -> ChildPool:
    hello, environment = {"agent": rl.agent}, code_environment(rl.secrets)
    return ChildPool(f"rl.agent={rl.agent!r}", MODULE, hello, workers=workers, environment=environment)
