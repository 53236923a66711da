"""The players of rollouts: a `Player` makes a `PlayedRollout` of each request for one.

`PoolPlayer`, one completion a rollout, is in the core. Rollouts of several turns, in an environment
or of an agent, are played by extras (`PLAYERS` in rlpipe/config/extras.py).
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from rlpipe.base.errors import UserError
from rlpipe.config.extras import PLAYERS, opened
from rlpipe.config.pipeline import PipelineConfig
from rlpipe.config.training import RlConfig
from rlpipe.data.chat import ChatTokenizer
from rlpipe.engines.client import Completion
from rlpipe.engines.pool import EnginePool, GroupRequest
from rlpipe.records.prompt import Message, Prompt
from rlpipe.records.rollout import Branch, EnvironmentOutcome, PromptGroup
from rlpipe.store.backend import Store


@dataclass(frozen=True)
class PlayedRollout:
    """One played rollout.

    `completion`: all tokens after the prompt, of every turn; those that the policy did not write
    have logprob 0. `policy_mask`: 1 on the policy's tokens; None where it wrote all. `outcome`: of
    its environment or agent. `branches`: further branches of an agent's conversation.
    """

    prompt_tokens: list[int]
    completion: Completion
    policy_mask: bytes | None = None
    outcome: EnvironmentOutcome | None = None
    branches: list[Branch] = field(default_factory=list)


class PlayFault(Exception):
    """Raised when an environment or an agent failed its rollout; `reason`: why, in the outcome."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


OnPlayed = Callable[[int, list[PlayedRollout]], Awaitable[None]]


@dataclass(frozen=True)
class Hooks:
    """The requests of a stage while rollouts are played.

    `on_group` (index, played rollouts) is awaited as each group finishes. Once `enough` is set,
    what is unfinished is cut: its completion ends with "abort". Agents use neither of the two: they
    keep the replies that they got in the folder `replies` of the store; empty: nowhere.
    """

    on_group: OnPlayed | None = None
    enough: asyncio.Event | None = None
    replies: str = ""


@dataclass(frozen=True)
class PlayerParts:
    """The parts of a session that players use."""

    config: PipelineConfig
    pool: EnginePool
    tokenizer: ChatTokenizer
    store: Store

    @property
    def rl(self) -> RlConfig:
        return self.config.rl


class Player(ABC):
    """Plays rollouts; belongs to one event loop."""

    @abstractmethod
    async def play(
        self, requests: list[GroupRequest], groups: list[PromptGroup], hooks: Hooks
    ) -> list[list[PlayedRollout]]:
        """The played rollouts of each group, in order. UserError when a rollout had a fault that
        stops the run by `rl.faults`.
        """

    async def first_messages(self, prompts: list[Prompt]) -> list[list[Message]]:
        """The messages with which the rollouts of each prompt begin."""
        return [prompt.messages for prompt in prompts]

    async def close(self) -> None:
        """Ends its processes, if it has any; callers that wait for one, or call later, get an
        EngineError.
        """
        return


class PlayerKind(ABC):
    """One kind of player of several turns."""

    @abstractmethod
    def player(self, parts: PlayerParts) -> Player:
        """The player of a run."""

    @abstractmethod
    def check(self, rl: RlConfig) -> list[str]:
        """Loads what `rl` names, in a process of its own. UserError when that fails.

        Returns the roles of the messages that the policy will get; none where they are not known.
        """


@dataclass(frozen=True)
class PoolPlayer(Player):
    """Plays one completion a rollout."""

    pool: EnginePool

    async def play(
        self, requests: list[GroupRequest], groups: list[PromptGroup], hooks: Hooks
    ) -> list[list[PlayedRollout]]:
        async def finished(index: int, completions: list[Completion]) -> None:
            if hooks.on_group is not None:
                await hooks.on_group(index, _played(requests[index], completions))

        sampled = await self.pool.generate(requests, finished, hooks.enough)
        return [_played(*pair) for pair in zip(requests, sampled, strict=True)]


def _played(request: GroupRequest, completions: list[Completion]) -> list[PlayedRollout]:
    return [PlayedRollout(request.prompt_tokens, completion) for completion in completions]


def player_of(parts: PlayerParts) -> Player:
    """The player of a run. UserError when this installation lacks its extra."""
    kind = kind_of_player(parts.rl)
    return kind.player(parts) if kind else PoolPlayer(parts.pool)


def kind_of_player(rl: RlConfig) -> PlayerKind | None:
    """The kind of player of several turns that a run needs, if any. UserError when this
    installation lacks its extra.
    """
    name = "agent" if rl.agent else "environment" if rl.environment else ""
    return opened(PLAYERS[name], rl.world) if name else None


def check_faults(rl: RlConfig, played: list[list[PlayedRollout]]) -> None:
    """Raises UserError where a rollout had a fault that stops the run by `rl.faults`."""
    outcomes = [rollout.outcome for group in played for rollout in group]
    faults = Counter(outcome.fault for outcome in outcomes if outcome and outcome.fault)
    if rl.stops_at(faults):
        raise UserError(
            f"{rl.world}, rl.faults={rl.faults}: {faults.total()} of {len(outcomes)} rollouts had a fault"
            f" ({dict(faults)}; the log says which); mend the {'agent' if rl.agent else 'environment'} and start again"
            " (what was committed is kept), or start a run or fork with other rl.faults"
        )
