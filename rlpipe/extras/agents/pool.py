"""The processes that run agents, and the endpoint that they talk to."""

from __future__ import annotations

import asyncio
import logging
from contextlib import closing
from dataclasses import dataclass, field

from rlpipe.config.training import RlConfig
from rlpipe.data.chat import ChatTokenizer
from rlpipe.extras.agents.endpoint import AgentEndpoint
from rlpipe.extras.agents.rollout import AgentRollout
from rlpipe.extras.agents.worker import AgentAnswer, AgentEnd, AgentFailure, AgentHello, AgentRequest
from rlpipe.loop.player import PlayFault
from rlpipe.processes.pool import WorkerPool, code_environment
from rlpipe.processes.worker import Losses, ProcessEnded, UserCode, Worker, ask_twice
from rlpipe.records.prompt import RewardPrompt

log = logging.getLogger(__name__)
MODULE = "rlpipe.extras.agents.worker"


class AgentFault(PlayFault):
    """Raised when an agent failed its rollout, for a reason of docs/faults.md."""


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
        code = UserCode(rl.world, MODULE, _hello(rl), code_environment(rl.secrets))
        self._workers = [Worker(code, Losses()) for _ in range(rl.agents_max)]
        self._idle: asyncio.LifoQueue[Worker] = asyncio.LifoQueue()
        for worker in self._workers:
            self._idle.put_nowait(worker)

    async def run(self, rollout: AgentRollout, prompt: RewardPrompt) -> AgentOutcome:
        """Runs the agent for one rollout, and again if it was killed; AgentFault.

        UserError when it cannot be loaded.
        """
        if self._starting is None:
            self._starting = asyncio.create_task(self._endpoint.start(self._rl.agent_address))
        await self._starting
        worker = await self._idle.get()
        try:
            answer = await ask_twice(lambda is_again: self._once(worker, rollout, prompt, is_again))
        except ProcessEnded as error:
            raise AgentFault("agent_crash", f"it was killed twice ({error})") from error
        finally:
            self._idle.put_nowait(worker)
        if "reason" in answer:
            raise AgentFault(answer["reason"], answer["message"])
        return AgentOutcome(answer["reward"], answer["metrics"])

    async def _once(
        self, worker: Worker, rollout: AgentRollout, prompt: RewardPrompt, is_again: bool
    ) -> AgentEnd | AgentFailure:
        """Runs the agent once; ProcessEnded when it was killed."""
        timeout_s = self._rl.agent_timeout_s
        async with rollout.one_try():
            with self._endpoint.open(rollout) as door:
                request: AgentRequest = {"prompt": prompt, "base_url": door.base_url, "api_key": door.api_key}
                try:
                    answer: AgentAnswer = await worker.ask(lambda _: (request, timeout_s), is_again)
                except ProcessEnded as error:
                    answer = {"signal": str(error)}
                except TimeoutError:
                    answer = {"reason": "agent_timeout", "message": f"took more than rl.agent_timeout_s={timeout_s:g}"}
        if "signal" in answer:
            log.warning("rl.agent, prompt %s: it was killed (%s)", prompt["prompt_id"], answer["signal"])
            raise ProcessEnded(answer["signal"])
        return answer

    async def close(self) -> None:
        """Kills the agents; callers that wait for one, or call later, get an EngineError."""
        await asyncio.gather(*(worker.close() for worker in self._workers))
        await self._endpoint.close()


def check_agent(rl: RlConfig) -> None:
    """UserError when the agent cannot be loaded. It is imported in a process of its own."""
    with closing(WorkerPool(rl.world, MODULE, _hello(rl), environment=code_environment(rl.secrets))) as trial:
        trial.start()


def _hello(rl: RlConfig) -> AgentHello:
    return {"agent": rl.agent}
