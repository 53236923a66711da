"""A stored policy on engines of this machine: for `rlpipe serve` and `rlpipe chat`."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import tempfile
from array import array
from bisect import bisect_left
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from rlpipe.base.errors import UserError
from rlpipe.base.seeds import rollout_seed
from rlpipe.config.pipeline import PipelineConfig
from rlpipe.data.chat import ChatTokenizer
from rlpipe.engines.client import NOTHING_YET, Completion, Sampling
from rlpipe.engines.commands import check_python
from rlpipe.engines.fleet import Host
from rlpipe.engines.host import EngineHost
from rlpipe.engines.pool import EnginePool, GroupRequest
from rlpipe.loop.run_data import RunData
from rlpipe.loop.scratch import work_dir_of
from rlpipe.loop.session import probe_of
from rlpipe.processes.launch import raise_file_limit
from rlpipe.store.artifacts import is_pruned
from rlpipe.store.run import Run
from rlpipe.stored.remaking import committed_version

# while training, engines send tokens in large batches; somebody who reads wants them at once
STREAM_FLAGS = ["--stream-interval", "1"]  # of SGLang and vLLM
STREAM_VARIABLES = {"RLPIPE_STREAM_S": "0.05"}  # of the local engine
UNFINISHED = "\ufffd"  # the text of a character of which some bytes are not there yet
OnText = Callable[[str, Completion], None]  # the text so far that will not change, and its tokens


@dataclass(frozen=True)
class Spoken:
    """What a policy said: the text before the first stop string, and the tokens up to its end."""

    text: str
    completion: Completion


@dataclass(frozen=True)
class ServedPolicy:
    """A policy that engines serve. `name`: RUN@VERSION."""

    name: str
    config: PipelineConfig
    tokenizer: ChatTokenizer
    pool: EnginePool
    _asked: itertools.count[int] = field(default_factory=itertools.count)

    def room(self, prompt_tokens: list[int]) -> int:
        """The number of tokens that may follow a prompt; at most 0: none."""
        return self.config.model.context_tokens_max - len(prompt_tokens)

    def new_seed(self) -> int:
        """The seed of a request that gives none: the same for the n-th one of each start."""
        return rollout_seed(self.config.seed, "serve", next(self._asked))

    async def say(
        self, prompt_tokens: list[int], params: Sampling, stops: tuple[str, ...] = (), on_text: OnText | None = None
    ) -> Spoken:
        """Samples after a prompt until the policy ends its turn, or a stop string is complete.

        EngineError when no engine answers. A caller that is cancelled ends the sampling.
        """
        enough = asyncio.Event()
        decode = self.tokenizer.decode

        def hear(so_far: Completion) -> None:
            text = decode(so_far.tokens.tolist())
            if has_stop(text, stops):
                enough.set()
            elif on_text is not None:
                on_text(settled(text, stops), so_far)

        own = replace(params, stop_token_ids=tuple(self.tokenizer.stop_token_ids))
        group = GroupRequest(self.name, prompt_tokens, [own], [NOTHING_YET], hear=hear if stops or on_text else None)
        [[completion]] = await self.pool.generate([group], enough=enough)
        return cut(completion, decode, stops)


def has_stop(text: str, stops: tuple[str, ...]) -> bool:
    return any(stop in text for stop in stops)


def settled(text: str, stops: tuple[str, ...]) -> str:
    """The part of a text that further tokens leave as it is: without a character that is not whole,
    and without what may be the beginning of a stop string.
    """
    text = text.rstrip(UNFINISHED)
    held = max((size for stop in stops for size in range(1, len(stop)) if text.endswith(stop[:size])), default=0)
    return text[: len(text) - held]


def cut(completion: Completion, decode: Callable[[list[int]], str], stops: tuple[str, ...]) -> Spoken:
    """A completion up to the stop string that is complete first, however many tokens came after
    it. The finish reason is then "stop".
    """
    tokens = completion.tokens.tolist()
    text = decode(tokens)
    if not has_stop(text, stops):
        return Spoken(text, completion)
    size = 1 + bisect_left(range(1, len(tokens)), True, key=lambda size: has_stop(decode(tokens[:size]), stops))
    text = decode(tokens[:size])
    end, begin = min((text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text)
    assert begin < end, "a stop string is not empty"
    version, _ = completion.spans[-1]
    logprobs: array[float] = completion.rollout_logprobs[:size]
    kept = Completion(completion.tokens[:size], logprobs, "stop", [(version, size)], completion.engine)
    return Spoken(text[:begin], kept)


@contextlib.asynccontextmanager
async def served(run: Run, version: int | None) -> AsyncIterator[ServedPolicy]:
    """Starts the engines of the run's config on a policy, for the body.

    UserError when it is not committed, or was pruned; EngineError when no engine serves it.
    Copies of weights and logs of engines are in a folder below `scratch` that is removed at the
    end.
    """
    number = await asyncio.to_thread(committed_version, run, version)
    policy, _ = await asyncio.to_thread(run.policy, number)
    if await asyncio.to_thread(is_pruned, run.store, policy.folder):
        raise UserError(f"version {number} of run {run.name} was pruned; `rlpipe show {run.name}` says which were kept")
    await asyncio.to_thread(check_python, run.config.engines)
    raise_file_limit()
    engines = run.config.engines
    quick = engines.model_copy(
        update={
            "flags": [*engines.flags, *STREAM_FLAGS],
            "environment": {**engines.environment, **STREAM_VARIABLES},
        }
    )
    config = run.config.model_copy(update={"engines": quick})
    parent = work_dir_of(config)
    parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="serve-", dir=parent) as folder:
        host = EngineHost(config, run.store, Path(folder), name=f"engine-{number}")

        async def hosts() -> list[Host]:
            return [host]

        pool = EnginePool(hosts, engines.in_flight_max, engines.progress_timeout_s)
        try:
            probe = await asyncio.to_thread(probe_of, run, policy)
            tokenizer = await asyncio.to_thread(lambda: RunData(run, Path(folder)).tokenizer)
            await pool.serve(policy, number, probe)
            yield ServedPolicy(f"{run.name}@{number}", config, tokenizer, pool)
        finally:
            await host.close()
