"""Rollouts in an environment: a completion, the environment's answer, the next completion, until one of them ends it.

Tokens in, tokens out: what an engine sampled is kept as it is; only what the environment says is encoded, by itself. A rollout's
completion is all of it in order, the environment's tokens with logprob 0 and mask 0.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter
from dataclasses import dataclass, replace

import numpy as np

from rlpipe.engines.client import NOTHING_YET, Completion
from rlpipe.engines.pool import GroupRequest
from rlpipe.environments.pool import EnvironmentFault, RemoteEnvironment
from rlpipe.environments.protocol import Message
from rlpipe.rollouts import prompt_of
from rlpipe.stages.seeds import rollout_seed
from rlpipe.stages.session import Session
from rlpipe.types import JsonDict, UserError

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Played(Completion):
    """A rollout of several turns. `finish_reason`: "stop" (the environment was done), "length", "turns" or "fault"."""

    policy_mask: list[int]  # 1 on the tokens that the policy wrote
    record: JsonDict  # reward, num_turns, fault, metrics, messages


def policy_only(completion: Completion, mask: list[int]) -> list[int]:
    """`mask` without the environment's tokens."""
    if not isinstance(completion, Played):
        return mask
    return [kept * written for kept, written in zip(mask, completion.policy_mask, strict=True)]


class Turns:
    """One rollout on its way: what there is of it (`done`), and what its environment has answered."""

    def __init__(self, session: Session, environment: RemoteEnvironment, prompt_tokens: list[int], tokens_max: int) -> None:
        self.session = session
        self.environment = environment
        self.prompt_tokens = prompt_tokens
        self.tokens_max = tokens_max
        self.done = NOTHING_YET
        self.policy_mask: list[int] = []
        self.num_turns = 0
        self.reward = 0.0
        self.metrics: Counter[str] = Counter()
        self.fault = ""
        self.messages: list[list[Message]] = []

    async def take(self, completion: Completion) -> None:
        """The policy's next turn: `completion` is `done` and what was sampled after it. Afterwards `done` is unfinished, or final."""
        before = len(self.done.tokens)
        assert completion.tokens[:before] == self.done.tokens and completion.finish_reason in ("stop", "length")
        self.num_turns += 1
        self.policy_mask += [1] * (len(completion.tokens) - before)
        self.done = completion
        if completion.finish_reason == "stop":
            try:
                await self._answer(self.session.tokenizer.decode(completion.tokens[before:]))
            except EnvironmentFault as fault:
                self._end("fault")
                self.fault = fault.reason
                log.warning("rl.environment, prompt %s: %s: %s", self.environment.prompt["prompt_id"], fault.reason, fault)
        if self.done.finished:
            self.environment.drop()
        assert len(self.policy_mask) == len(self.done.tokens) <= self.tokens_max

    async def _answer(self, said: str) -> None:
        step = await self.environment.step(said)
        if self.num_turns == 1 and self._encoded(self.environment.asked or []) != self.prompt_tokens:
            raise EnvironmentFault("environment_invalid", "start gave other messages than when the prompt was sampled")
        self.reward += step.reward
        self.metrics.update(step.metrics)
        self.messages.append(step.messages)
        if step.done:
            self._end("stop")
        elif self.num_turns == self.session.config.rl.turns_max:
            self._end("turns")
        else:
            self._go_on(self._continuation(step.messages))

    def _continuation(self, messages: list[Message]) -> list[int]:
        try:
            return self.session.tokenizer.encode_continuation(messages)
        except UserError as error:  # preflight has tried the template; this is about these messages
            raise EnvironmentFault("environment_invalid", str(error)) from error

    def _encoded(self, messages: list[Message]) -> list[int]:
        return self.session.tokenizer.encode_prompt(messages)

    def _end(self, reason: str) -> None:
        self.done = replace(self.done, finish_reason=reason)

    def _go_on(self, told: list[int]) -> None:
        """The environment's tokens, if they leave the policy a token to answer with."""
        if len(self.done.tokens) + len(told) >= self.tokens_max:
            return self._end("length")
        version, _ = self.done.spans[-1]
        self.done = self.done.then(Completion(told, [0.0] * len(told), "abort", [(version, len(told))], self.done.engine))
        self.policy_mask += [0] * len(told)
        return None

    def played(self) -> Played:
        """The rollout, which is over."""
        assert self.done.finished
        record = {
            "reward": self.reward,
            "num_turns": self.num_turns,
            "fault": self.fault,
            "metrics": dict(self.metrics),
            "messages": self.messages,
        }
        return Played(**vars(self.done), policy_mask=self.policy_mask, record=record)


async def play(session: Session, requests: list[GroupRequest], prompts: list[JsonDict]) -> list[list[Completion]]:
    """The rollouts (`Played`) of groups whose `prompts` (stored rows) are put by the environment. Groups advance by themselves.

    UserError when one had a fault and there is no `rl.reward_fallback`.
    """
    environments, groups = session.environments, []
    for request, prompt in zip(requests, prompts, strict=True):
        assert not any(prior.tokens for prior in request.prior), "an environment's rollouts are not carried"
        told = prompt_of(prompt)
        groups.append(
            [Turns(session, environments.open(told), request.prompt_tokens, params.max_new_tokens) for params in request.params]
        )

    async def on_group(index: int, completions: list[Completion]) -> GroupRequest | None:
        group, turn = groups[index], max(turns.num_turns for turns in groups[index]) + 1
        moving = [(turns, new) for turns, new in zip(group, completions, strict=True) if not turns.done.finished]
        outcomes = await asyncio.gather(*(turns.take(new) for turns, new in moving), return_exceptions=True)
        for outcome in outcomes:
            if outcome is not None:
                raise outcome
        if all(turns.done.finished for turns in group):
            return None
        params = [replace(first, seed=rollout_seed(first.seed, "turn", turn)) for first in requests[index].params]
        return replace(requests[index], params=params, prior=[turns.done for turns in group])

    try:
        await session.pool.generate(requests, on_group)
    finally:
        for turns in (turns for group in groups for turns in group):
            turns.environment.drop()
    played = [[turns.played() for turns in group] for group in groups]
    _check_faults(session, [rollout.record["fault"] for group in played for rollout in group])
    return [[*group] for group in played]


def _check_faults(session: Session, faults: list[str]) -> None:
    counts = Counter(fault for fault in faults if fault)
    if counts and session.config.rl.reward_fallback is None:
        raise UserError(
            f"rl.environment={session.config.rl.environment!r}, rl.reward_fallback=none: {counts.total()} of {len(faults)} rollouts "
            f"had a fault ({dict(counts)}; the log says which); mend the environment and start again (what was committed is kept), "
            "or start a run or fork with a rl.reward_fallback"
        )


async def asked_by_environment(session: Session, prompts: list[JsonDict]) -> list[list[Message]]:
    """What an environment asks the policy for each prompt (as a reward gets it); UserError naming the prompt it fails on.

    A start that took too long is tried once more.
    """

    async def start(prompt: JsonDict) -> list[Message]:
        environment = session.environments.open(prompt)
        try:
            return await environment.start()
        finally:
            environment.drop()

    async def ask(prompt: JsonDict) -> list[Message]:
        try:
            try:
                return await start(prompt)
            except EnvironmentFault as fault:
                if fault.reason != "environment_timeout":
                    raise
                return await start(prompt)
        except EnvironmentFault as fault:
            more_time = ", or set a longer rl.environment_timeout_s," if fault.reason == "environment_timeout" else ""
            raise UserError(
                f"rl.environment={session.config.rl.environment!r} cannot start with prompt {prompt['prompt_id']} "
                f"({fault.reason}: {fault}); mend the environment{more_time} and start again: what was committed is kept. The prompts "
                "of a run cannot change: to do without this one, start another run"
            ) from fault

    outcomes = await asyncio.gather(*(ask(prompt) for prompt in prompts), return_exceptions=True)
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
    return [outcome for outcome in outcomes if not isinstance(outcome, BaseException)]


def environment_metrics(rows: list[JsonDict], names_from: list[JsonDict] | None = None) -> dict[str, float]:
    """Means over rollouts of their turns, the environment's reward and its own metrics; empty where there is no environment.

    A metric that a rollout lacks is 0 for it; `names_from`: the rollouts that say which there are, where these are a part of them.
    """
    records = [json.loads(row["environment"]) for row in rows if row["environment"]]
    if not records:
        return {}
    names = {name for row in names_from or rows if row["environment"] for name in json.loads(row["environment"])["metrics"]}
    told = {"turns_mean": [record["num_turns"] for record in records]}
    told["environment_reward_mean"] = [record["reward"] for record in records]
    told |= {f"environment_{name}_mean": [record["metrics"].get(name, 0.0) for record in records] for name in sorted(names)}
    return {name: float(np.mean(values)) for name, values in told.items()}
