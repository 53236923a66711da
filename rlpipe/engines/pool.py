"""The pool: spreads groups over engines, bounds what is in flight, sends what a lost engine left to another one."""

from __future__ import annotations

import asyncio
import logging
import zlib
from dataclasses import dataclass

from rlpipe.engines.client import EngineUnavailable
from rlpipe.engines.host import Engine, EngineHost
from rlpipe.types import EngineError, JsonDict, StoreError
from rlpipe.weights import Weights

log = logging.getLogger(__name__)
ATTEMPTS_MAX = 6
BACKOFF_S = 0.2


@dataclass(frozen=True)
class GroupRequest:
    """All completions wanted for one prompt: they go to one engine, which computes the prompt once.

    Example: GroupRequest("words/17", [5, 9, 300], [{"max_new_tokens": 16, "sampling_seed": 7, ...}] * 8)
    """

    prompt_id: str
    prompt_tokens: list[int]
    sampling_params: list[JsonDict]  # one per completion


@dataclass(frozen=True)
class Completion:
    """What an engine sampled. `rollout_logprobs` are of the temperature-scaled distribution."""

    tokens: list[int]
    rollout_logprobs: list[float]
    finish_reason: str  # "stop" or "length"
    weight_version: int
    engine: str


class EnginePool:
    """The engines of the host as one place to send groups to."""

    def __init__(self, host: EngineHost) -> None:
        self.host = host
        self._slots: dict[int, asyncio.Semaphore] = {}
        self._version: int | None = None

    async def start(self, weights: Weights) -> None:
        await self.host.start(weights)
        self._version = weights.version
        config = self.host.config
        groups_max = max(1, config.engines.in_flight_max // config.rl.group_size)
        self._slots = {engine.index: asyncio.Semaphore(groups_max) for engine in self.host.engines}

    @property
    def started(self) -> bool:
        return bool(self._slots)

    @property
    def version(self) -> int | None:
        """The weight version that all engines serve; None before the start and after a reload that failed."""
        return self._version

    async def reload(self, weights: Weights) -> None:
        before, self._version = self._version, None
        try:
            await self.host.reload(weights)
        except StoreError:  # refused before any engine saw it: the old weights keep serving
            self._version = before
            raise
        self._version = weights.version

    async def generate(self, groups: list[GroupRequest]) -> list[list[Completion]]:
        """The completions of every group, in order; EngineError when a group found no engine within its attempts."""
        try:
            async with asyncio.TaskGroup() as tasks:
                pending = [tasks.create_task(self._generate_group(group)) for group in groups]
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None  # one group's fault says it; hundreds of them say no more
        return [task.result() for task in pending]

    async def _generate_group(self, group: GroupRequest) -> list[Completion]:
        assert group.prompt_tokens and group.sampling_params, f"{group.prompt_id} asks for nothing"
        engines = self.host.engines
        # the same prompt goes to the same engine whatever else is asked, so its prefix stays cached there
        first = zlib.crc32(group.prompt_id.encode()) % len(engines)
        reason = ""
        for attempt in range(ATTEMPTS_MAX):
            engine = engines[(first + attempt) % len(engines)]
            try:
                return await self._ask(engine, group)
            except EngineUnavailable as error:
                reason = str(error)
                log.warning("group %s goes elsewhere: %s", group.prompt_id, error)
                await asyncio.sleep(BACKOFF_S * attempt)
                await self.host.restart(engine)
        raise EngineError(f"{group.prompt_id} was given up after {ATTEMPTS_MAX} attempts; last: {reason}")

    async def _ask(self, engine: Engine, group: GroupRequest) -> list[Completion]:
        body = {
            "input_ids": [group.prompt_tokens] * len(group.sampling_params),
            "sampling_params": group.sampling_params,
            "return_logprob": True,
        }
        async with self._slots[engine.index]:
            answers = await engine.client.generate(body, self.host.config.engines.request_timeout_s)
        if len(answers) != len(group.sampling_params):
            raise EngineUnavailable(f"{engine.client.url} answered {len(answers)} of {len(group.sampling_params)} completions")
        return [self._completion(engine, answer) for answer in answers]

    def _completion(self, engine: Engine, answer: JsonDict) -> Completion:
        meta = answer["meta_info"]
        tokens = answer["output_ids"]
        triples = meta["output_token_logprobs"]
        if meta["finish_reason"]["type"] == "abort":  # comes with HTTP 200 and partial tokens
            raise EngineUnavailable(f"{engine.client.url} aborted a request")
        version = int(meta["weight_version"])
        if version != self.version:
            raise EngineUnavailable(f"{engine.client.url} sampled with weight version {version}, expected {self.version}")
        assert [triple[1] for triple in triples] == tokens, "logprobs and tokens of a completion differ"
        return Completion(
            tokens=tokens,
            rollout_logprobs=[triple[0] for triple in triples],
            finish_reason=meta["finish_reason"]["type"],
            weight_version=version,
            engine=f"engine-{engine.index}",
        )

    async def close(self) -> None:
        await self.host.close()
