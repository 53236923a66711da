"""A rollout of an agent in front of a pool, and an engine that is
asked for what no agent waits for."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rlpipe.data.chat import ChatTokenizer
from rlpipe.engines.client import Completion, Sampling
from rlpipe.engines.pool import EnginePool
from rlpipe.extras.agents.rollout import AgentRollout, CallKey, Keep, Replies, Terms
from tests.agent_world import tokenizer_in
from tests.deadlines import until_async
from tests.slow_engine import SlowEngine

FOR_EVER = 1 << 20  # tokens of a completion, of which an engine samples a hundred in a second
TICK_S = 0.01


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    return tokenizer_in(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def engine() -> SlowEngine:
    return SlowEngine("a", TICK_S)


def rollout_in_flight(pool: Any, tokenizer: ChatTokenizer, kept: Replies, keep: Keep, tokens: int = 40) -> AgentRollout:
    return AgentRollout(pool, tokenizer, Terms("x/0", Sampling(tokens, seed=7), 1000, tokens + 400), kept, keep)


async def reached(engine: SlowEngine, num_requests: int, num_tokens: int = 1) -> None:
    """Until the engine has been asked so often, and has sampled so much since."""
    await until_async(lambda: len(engine.asked) >= num_requests, "it is asked")
    num_tokens += engine.num_sampled
    await until_async(lambda: engine.num_sampled >= num_tokens, "it samples")


async def check_idle(engine: SlowEngine, pool: EnginePool, num_requests: int) -> None:
    """Nothing is asked of the engine any more: it was told to end all that it was asked."""
    assert len(engine.asked) == len({*engine.aborts}) == num_requests
    num_sampled = engine.num_sampled
    await pool.release([])
    await asyncio.sleep(10 * TICK_S)
    assert engine.num_sampled == num_sampled and not any(load.in_flight for load in pool._loads.values())


async def keep_nothing(call: CallKey, completions: list[Completion]) -> None: ...
