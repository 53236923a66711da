"""Rollouts in an environment: a completion, the environment's answer, the next completion, until one of them ends it.

Tokens in, tokens out: what an engine sampled is kept as it is; only what the environment says is encoded, by itself. A rollout's
completion is all of it in order, the environment's tokens with logprob 0 and mask 0.
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, replace

import numpy as np

from rlpipe.engines.client import NOTHING_YET, Completion, logprobs_of, tokens_of
from rlpipe.engines.pool import GroupRequest, NextTurn
from rlpipe.environments.pool import EnvironmentFault, RemoteEnvironment
from rlpipe.records.prompt import Message, Prompt
from rlpipe.records.rollout import CUT_SHORT, EnvironmentOutcome, Rollout
from rlpipe.stages.session import Session
from rlpipe.stages.stage import all_ended
from rlpipe.types import Metrics, UserError, rollout_seed

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PlayedCompletion(Completion):
    """A rollout of several turns. `finish_reason`: "stop" (the environment was done), "length", "turns" or "fault"."""

    prompt_tokens: list[int]
    policy_mask: list[int]  # 1 on the tokens that the policy wrote
    outcome: EnvironmentOutcome


class Turns:
    """One rollout on its way: what there is of it (`completion`), and what its environment has answered."""

    def __init__(self, session: Session, environment: RemoteEnvironment, prompt_tokens: list[int], tokens_max: int) -> None:
        self.session = session
        self.environment = environment
        self.prompt_tokens = prompt_tokens
        self.tokens_max = tokens_max
        self.completion = NOTHING_YET
        self.policy_mask: list[int] = []
        self.num_turns = 0
        self.reward = 0.0
        self.metrics: Counter[str] = Counter()
        self.fault = ""
        self.messages: list[list[Message]] = []

    async def take(self, longer: Completion) -> None:
        """The policy's next turn: `longer` is `completion` and what was sampled after it. Afterwards it is unfinished, or final."""
        before = len(self.completion.tokens)
        assert longer.tokens[:before] == self.completion.tokens and longer.finish_reason in ("stop", "length")
        self.num_turns += 1
        self.policy_mask += [1] * (len(longer.tokens) - before)
        self.completion = longer
        if longer.finish_reason == "stop":
            try:
                await self._answer(self.session.tokenizer.decode(longer.tokens[before:].tolist()))
            except EnvironmentFault as fault:
                self._end("fault")
                self.fault = fault.reason
                log.warning("rl.environment, prompt %s: %s: %s", self.environment.prompt["prompt_id"], fault.reason, fault)
        if self.completion.finished:
            self.environment.drop()
        assert len(self.policy_mask) == len(self.completion.tokens) <= self.tokens_max

    async def _answer(self, text: str) -> None:
        """The environment's answer is appended, unless it ends the rollout, or leaves the policy no token."""
        step, tokenizer = await self.environment.step(text), self.session.tokenizer
        if self.num_turns == 1 and tokenizer.encode_prompt(self.environment.start_messages or []) != self.prompt_tokens:
            raise EnvironmentFault("environment_invalid", "start gave other messages than when the prompt was sampled")
        self.reward += step.reward
        self.metrics.update(step.metrics)
        self.messages.append(step.messages)
        if step.done or self.num_turns == self.session.config.rl.turns_max:
            return self._end("stop" if step.done else "turns")
        try:
            answer = tokenizer.encode_continuation(step.messages)
        except UserError as error:  # preflight has tried the template; this is about these messages
            raise EnvironmentFault("environment_invalid", str(error)) from error
        if len(self.completion.tokens) + len(answer) >= self.tokens_max:  # the policy would have no token left to go on with
            return self._end("length")
        version, _ = self.completion.spans[-1]
        said = Completion(
            tokens_of(answer), logprobs_of([0.0] * len(answer)), CUT_SHORT, [(version, len(answer))], self.completion.engine
        )
        self.completion = self.completion.then(said)
        self.policy_mask += [0] * len(answer)
        return None

    def _end(self, reason: str) -> None:
        self.completion = replace(self.completion, finish_reason=reason)

    def played(self) -> PlayedCompletion:
        """The rollout, which is over."""
        assert self.completion.finished
        outcome = EnvironmentOutcome(self.reward, self.num_turns, self.fault, dict(self.metrics), self.messages)
        return PlayedCompletion(
            **vars(self.completion), prompt_tokens=self.prompt_tokens, policy_mask=self.policy_mask, outcome=outcome
        )


async def play(session: Session, requests: list[GroupRequest], prompts: list[Prompt]) -> list[list[Completion]]:
    """The rollouts (`PlayedCompletion`) of groups whose prompts are put by the environment. Each advances by itself.

    UserError when one had a fault and there is no `rl.reward_fallback`.
    """
    assert not any(prior.tokens for request in requests for prior in request.prior), "an environment's rollouts are not carried"
    groups = [
        [
            Turns(session, session.environments.open(prompt.for_reward()), request.prompt_tokens, params.max_new_tokens)
            for params in request.params
        ]
        for request, prompt in zip(requests, prompts, strict=True)
    ]

    async def on_rollout(number: int, index: int, longer: Completion) -> NextTurn | None:
        turns, first = groups[number][index], requests[number].params[index]
        await turns.take(longer)
        if turns.completion.finished:
            return None
        return replace(first, seed=rollout_seed(first.seed, "turn", turns.num_turns + 1)), turns.completion

    try:
        await session.pool.generate(requests, on_rollout=on_rollout)
    finally:
        for turns in (turns for group in groups for turns in group):
            turns.environment.drop()
    faults = Counter(turns.fault for group in groups for turns in group if turns.fault)
    if faults and session.config.rl.reward_fallback is None:
        raise UserError(
            f"rl.environment={session.config.rl.environment!r}, rl.reward_fallback=none: {faults.total()} of "
            f"{sum(map(len, groups))} rollouts had a fault ({dict(faults)}; the log says which); mend the environment and start again "
            "(what was committed is kept), or start a run or fork with a rl.reward_fallback"
        )
    return [[turns.played() for turns in group] for group in groups]


async def environment_prompts(session: Session, prompts: list[Prompt]) -> list[list[Message]]:
    """What an environment asks the policy for each prompt; UserError naming the prompt it fails on.

    A start that took too long is tried once more.
    """

    async def start(prompt: Prompt, is_last: bool) -> list[Message]:
        environment = session.environments.open(prompt.for_reward())
        try:
            return await environment.start()
        except EnvironmentFault as fault:
            too_slow = fault.reason == "environment_timeout"
            if is_last or not too_slow:
                more_time = ", or set a longer rl.environment_timeout_s," if too_slow else ""
                raise UserError(
                    f"rl.environment={session.config.rl.environment!r} cannot start with prompt {prompt.prompt_id} "
                    f"({fault.reason}: {fault}); mend the environment{more_time} and start again: what was committed is kept. The "
                    "prompts of a run cannot change: to do without this one, start another run"
                ) from fault
        finally:
            environment.drop()
        return await start(prompt, is_last=True)

    return await all_ended([start(prompt, is_last=False) for prompt in prompts])


def environment_metrics(rollouts: list[Rollout], names_from: list[Rollout] | None = None) -> Metrics:
    """Means over rollouts of their turns, the environment's reward and its own metrics; empty where there is no environment.

    A metric that a rollout lacks is 0 for it; `names_from`: the rollouts that say which there are, where these are a part of them.
    """
    outcomes = [rollout.environment for rollout in rollouts if rollout.environment]
    if not outcomes:
        return {}
    names = {name for rollout in names_from or rollouts if rollout.environment for name in rollout.environment.metrics}
    values = {
        "turns_mean": [float(outcome.num_turns) for outcome in outcomes],
        "environment_reward_mean": [outcome.reward for outcome in outcomes],
    }
    values |= {f"environment_{name}_mean": [outcome.metrics.get(name, 0.0) for outcome in outcomes] for name in sorted(names)}
    return {name: float(np.mean(entries)) for name, entries in values.items()}
