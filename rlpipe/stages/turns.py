"""Rollouts in an environment: a completion, the environment's answer, the next completion, until
one of them ends it.

Tokens in, tokens out: sampled tokens are kept as they are; only the environment's messages are
encoded, by themselves. The completion of a rollout is all of it in order, the environment's tokens
with logprob 0 and mask 0.
"""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections import Counter
from dataclasses import dataclass, field, replace

import numpy as np

from rlpipe.agents.conversation import Node
from rlpipe.base.errors import UserError
from rlpipe.base.seeds import rollout_seed
from rlpipe.base.values import Metrics
from rlpipe.data.chat import ChatTokenizer
from rlpipe.data.encoding import TooLong
from rlpipe.engines.client import Completion, logprobs_of, tokens_of
from rlpipe.engines.pool import GroupRequest, NextTurn, OnGroup
from rlpipe.environments.pool import EnvironmentFault
from rlpipe.loop.session import Session
from rlpipe.loop.stage import all_ended
from rlpipe.records.prompt import Message, Prompt
from rlpipe.records.rollout import CUT_SHORT, OUT_OF_TURNS, TRUNCATED, EnvironmentOutcome, Rollout

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PlayedCompletion(Completion):
    """A rollout of several turns, in an environment or of an agent.

    `finish_reason`: "stop" (the environment was done), "length", "turns" or "fault".
    """

    prompt_tokens: list[int]
    policy_mask: list[int]  # 1 on the tokens that the policy wrote
    outcome: EnvironmentOutcome
    # the conversations of an agent: the rollout's own branch, the last one, before the others
    branches: list[Node] = field(default_factory=list)


class Turns:
    """One rollout in progress: its `completion` so far, and the answers of its environment."""

    def __init__(
        self, session: Session, prompt: Prompt, prompt_tokens: list[int], tokens_max: int, prior: Completion
    ) -> None:
        """`prior`: the completion of an earlier iteration, `NOTHING_YET` for none."""
        tokenizer, outcome = session.data.tokenizer, EnvironmentOutcome(0.0, 0, "")
        self.policy_mask: list[int] = []
        if isinstance(prior, PlayedCompletion):
            outcome, self.policy_mask = prior.outcome, [*prior.policy_mask]
        self.session = session
        self.prompt_tokens = prompt_tokens
        self.tokens_max = tokens_max
        self.completion = prior
        self.num_turns = outcome.num_turns
        self.reward = outcome.reward
        self.metrics: Counter[str] = Counter(outcome.metrics)
        self.fault = outcome.fault
        self.messages = [*outcome.messages]
        *answered, last = policy_turns(tokenizer, prior.tokens, self.messages)
        texts = [tokenizer.decode(prior.tokens[turn.start : turn.stop].tolist()) for turn in answered]
        self.environment = session.environments.open(prompt.for_reward(), [*zip(texts, self.messages, strict=False)])
        self._turn_start = last.start  # of the turn in progress, in tokens
        self._num_answers = 0  # of the environment since it was opened here

    async def take(self, longer: Completion) -> None:
        """Adds the policy's next turn: `longer` is `completion` and what was sampled after it.

        Afterwards the rollout is unfinished, or final.
        """
        assert longer.finish_reason in ("stop", TRUNCATED)
        self.keep(longer)
        self.num_turns += 1
        if longer.finish_reason == "stop":
            try:
                await self._answer(self.session.data.tokenizer.decode(longer.tokens[self._turn_start :].tolist()))
            except EnvironmentFault as fault:
                self._end("fault")
                self.fault = fault.reason
                log.warning(
                    "rl.environment, prompt %s: %s: %s", self.environment.prompt["prompt_id"], fault.reason, fault
                )
        if self.completion.finished:
            self.environment.drop()
        self._turn_start = len(self.completion.tokens)
        assert len(self.policy_mask) == len(self.completion.tokens) <= self.tokens_max

    def keep(self, longer: Completion) -> None:
        """Adds sampled tokens: `longer` is `completion` and what was sampled after it, of a turn
        that may have been cut.
        """
        before = len(self.completion.tokens)
        assert longer.tokens[:before] == self.completion.tokens
        self.policy_mask += [1] * (len(longer.tokens) - before)
        self.completion = longer

    async def _answer(self, text: str) -> None:
        """Appends the environment's answer, unless it ends the rollout, or leaves the policy no
        token.
        """
        step, tokenizer = await self.environment.step(text), self.session.data.tokenizer
        self._num_answers += 1
        if (
            self._num_answers == 1
            and tokenizer.encode_prompt(self.environment.start_messages or []) != self.prompt_tokens
        ):
            raise EnvironmentFault("environment_invalid", "start gave other messages than when the prompt was sampled")
        self.reward += step.reward
        self.metrics.update(step.metrics)
        self.messages.append(step.messages)
        if step.done or self.num_turns == self.session.config.rl.turns_max:
            return self._end("stop" if step.done else OUT_OF_TURNS)
        try:
            answer = tokenizer.encode_continuation(step.messages, self.tokens_max)
        except TooLong:
            return self._end(TRUNCATED)
        except UserError as error:  # preflight has tried the template: the fault is in these messages
            raise EnvironmentFault("environment_invalid", str(error)) from error
        if (
            len(self.completion.tokens) + len(answer) >= self.tokens_max
        ):  # the policy would have no token left to go on with
            return self._end(TRUNCATED)
        version, _ = self.completion.spans[-1]
        said = Completion(
            tokens_of(answer),
            logprobs_of([0.0] * len(answer)),
            CUT_SHORT,
            [(version, len(answer))],
            self.completion.engine,
        )
        self.completion = self.completion.then(said)
        self.policy_mask += [0] * len(answer)
        return None

    def _end(self, reason: str) -> None:
        self.completion = replace(self.completion, finish_reason=reason)

    def played(self) -> PlayedCompletion:
        """The completion of the rollout so far, with the outcome of its environment."""
        done = self.completion
        outcome = EnvironmentOutcome(self.reward, self.num_turns, self.fault, dict(self.metrics), self.messages)
        return PlayedCompletion(
            done.tokens,
            done.rollout_logprobs,
            done.finish_reason,
            done.spans,
            done.engine,
            self.prompt_tokens,
            self.policy_mask,
            outcome,
        )


def policy_turns(tokenizer: ChatTokenizer, tokens: array[int], messages: list[list[Message]]) -> list[range]:
    """The ranges of the policy's turns in a completion.

    Each turn ends with its first stop token; the environment's answer follows. The last range is
    the turn in progress, perhaps empty; in a rollout that the environment ended it is the final
    turn.
    """
    turns, start = [], 0
    for answer in messages:
        end = next(
            (index + 1 for index in range(start, len(tokens)) if tokens[index] in tokenizer.stop_token_ids), len(tokens)
        )
        if end == len(tokens):  # the policy did not get its answer
            break
        said = tokenizer.encode_continuation(answer)
        assert tokens[end : end + len(said)].tolist() == said, (
            "a carried rollout has other tokens than its environment said"
        )
        turns.append(range(start, end))
        start = end + len(said)
    return [*turns, range(start, len(tokens))]


def played_before(
    tokenizer: ChatTokenizer, prompt_tokens: list[int], completion: Completion, outcome: EnvironmentOutcome
) -> PlayedCompletion:
    """The completion that an earlier iteration has of a rollout, with the mask of the policy's
    tokens.
    """
    policy_mask = [0] * len(completion.tokens)
    for turn in policy_turns(tokenizer, completion.tokens, outcome.messages):
        policy_mask[turn.start : turn.stop] = [1] * len(turn)
    return PlayedCompletion(**vars(completion), prompt_tokens=prompt_tokens, policy_mask=policy_mask, outcome=outcome)


async def play(
    session: Session,
    requests: list[GroupRequest],
    prompts: list[Prompt],
    on_group: OnGroup | None = None,
    enough: asyncio.Event | None = None,
) -> list[list[Completion]]:
    """The rollouts (`PlayedCompletion`) of groups whose prompts come from the environment.

    Each rollout advances by itself. `on_group` and `enough` as in `EnginePool.generate`: a partial
    rollout goes on in a later iteration, in an environment that gets the earlier turns again.
    UserError when a rollout had a fault and there is no `rl.reward_fallback`.
    """
    groups = [
        [
            Turns(session, prompt, request.prompt_tokens, params.max_new_tokens, prior)
            for params, prior in zip(request.params, request.prior, strict=True)
        ]
        for request, prompt in zip(requests, prompts, strict=True)
    ]

    async def on_rollout(number: int, index: int, longer: Completion) -> NextTurn | None:
        turns, first = groups[number][index], requests[number].params[index]
        if not turns.completion.finished:  # else it was finished before
            await turns.take(longer)
        if turns.completion.finished:
            return None
        return replace(first, seed=rollout_seed(first.seed, "turn", turns.num_turns + 1)), turns.completion

    async def on_played(number: int, _: list[Completion]) -> None:
        if on_group is not None:
            await on_group(number, [turns.played() for turns in groups[number]])

    try:
        sampled = await session.pool.generate(requests, on_group=on_played, enough=enough, on_rollout=on_rollout)
    finally:
        for turns in (turns for group in groups for turns in group):
            turns.environment.drop()
    for group, completions in zip(groups, sampled, strict=True):
        for turns, completion in zip(group, completions, strict=True):
            if not turns.completion.finished:
                turns.keep(completion)
    faults = Counter(turns.fault for group in groups for turns in group if turns.fault)
    if faults and session.config.rl.reward_fallback is None:
        raise UserError(
            f"rl.environment={session.config.rl.environment!r}, rl.reward_fallback=none: {faults.total()} of"
            f" {sum(map(len, groups))} rollouts had a fault ({dict(faults)}; the log says which); mend the environment"
            " and start again (what was committed is kept), or start a run or fork with a rl.reward_fallback"
        )
    return [[turns.played() for turns in group] for group in groups]


async def environment_prompts(session: Session, prompts: list[Prompt]) -> list[list[Message]]:
    """The first messages of the environment for each prompt.

    UserError naming the prompt that it fails on. A start that took too long is tried once more.
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
                    f"rl.environment={session.config.rl.environment!r} cannot start with prompt {prompt.prompt_id}"
                    f" ({fault.reason}: {fault}); mend the environment{more_time} and start again: what was committed"
                    " is kept. The prompts of a run cannot change: to do without this one, start another run"
                ) from fault
        finally:
            environment.drop()
        return await start(prompt, is_last=True)

    return await all_ended([start(prompt, is_last=False) for prompt in prompts])


def environment_metrics(rollouts: list[Rollout], names_from: list[Rollout] | None = None) -> Metrics:
    """Means over rollouts of their turns, the environment's reward and its own metrics, and the
    fraction of rollouts that were out of turns; empty where there is no environment.

    A metric that a rollout lacks is 0 for it. `names_from`: the rollouts whose metrics give the
    names, where `rollouts` are a part of them.
    """
    played = [(rollout, rollout.environment) for rollout in rollouts if rollout.environment]
    if not played:
        return {}
    outcomes = [outcome for _, outcome in played]
    names = {name for rollout in names_from or rollouts if rollout.environment for name in rollout.environment.metrics}
    values = {
        "turns_mean": [float(outcome.num_turns) for outcome in outcomes],
        "environment_reward_mean": [outcome.reward for outcome in outcomes],
        "out_of_turns_fraction": [float(rollout.finish_reason == OUT_OF_TURNS) for rollout, _ in played],
    }
    values |= {
        f"environment_{name}_mean": [outcome.metrics.get(name, 0.0) for outcome in outcomes] for name in sorted(names)
    }
    return {name: float(np.mean(entries)) for name, entries in values.items()}
