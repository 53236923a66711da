"""Rollouts in an environment: a completion, the environment's answer, the next completion, until
one of them ends it.

Tokens in, tokens out: sampled tokens are kept as they are; only the environment's messages are
encoded, by themselves. The completion of a rollout is all of it in order, the environment's tokens
with logprob 0 and mask 0.
"""

from __future__ import annotations

import logging
from array import array
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from rlpipe.base.errors import UserError
from rlpipe.data.chat import ChatTokenizer
from rlpipe.data.encoding import TooLong
from rlpipe.engines.client import Completion
from rlpipe.extras.environments.pool import EnvironmentFault, RemoteEnvironment
from rlpipe.extras.environments.wire import History
from rlpipe.loop.player import PlayedRollout
from rlpipe.records.prompt import Message
from rlpipe.records.rollout import OUT_OF_TURNS, TRUNCATED, EnvironmentOutcome

log = logging.getLogger(__name__)
NOT_BEGUN = EnvironmentOutcome(0.0, 0, "")


class Turns:
    """One rollout in progress: its `completion` so far, and the answers of its environment."""

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        opened: Callable[[History], RemoteEnvironment],
        prompt_tokens: list[int],
        limits: tuple[int, int],
        prior: Completion,
        outcome: EnvironmentOutcome = NOT_BEGUN,
    ) -> None:
        """`opened`: opens the environment, which has answered its argument already. `limits`: most
        tokens after the prompt, most turns. `prior`, `outcome`: of an earlier iteration.
        """
        self.prompt_tokens = prompt_tokens
        self.completion = prior
        self.num_turns = outcome.num_turns
        self.reward = outcome.reward
        self.metrics: Counter[str] = Counter(outcome.metrics)
        self.fault = outcome.fault
        self.messages = [*outcome.messages]
        self._tokenizer = tokenizer
        self._tokens_max, self._turns_max = limits
        turns = policy_turns(tokenizer, prior.tokens, self.messages)
        self.policy_mask = bytearray(len(prior.tokens))
        for turn in turns:
            self.policy_mask[turn.start : turn.stop] = bytes([1]) * len(turn)
        *answered, last = turns
        texts = [tokenizer.decode(prior.tokens[turn.start : turn.stop].tolist()) for turn in answered]
        self.environment = opened([*zip(texts, self.messages, strict=False)])
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
                await self._answer(self._tokenizer.decode(longer.tokens[self._turn_start :].tolist()))
            except EnvironmentFault as fault:
                self._end("fault")
                self.fault = fault.reason
                log.warning(
                    "rl.environment, prompt %s: %s: %s", self.environment.prompt["prompt_id"], fault.reason, fault
                )
        if self.completion.finished:
            self.environment.drop()
        self._turn_start = len(self.completion.tokens)
        assert len(self.policy_mask) == len(self.completion.tokens) <= self._tokens_max

    def keep(self, longer: Completion) -> None:
        """Adds sampled tokens: `longer` is `completion` and what was sampled after it, of a turn
        that may have been cut.
        """
        before = len(self.completion.tokens)
        assert longer.tokens[:before] == self.completion.tokens
        self.policy_mask += bytes([1]) * (len(longer.tokens) - before)
        self.completion = longer

    async def _answer(self, text: str) -> None:
        """Appends the environment's answer, unless it ends the rollout, or leaves the policy no
        token.
        """
        step = await self.environment.step(text)
        self._num_answers += 1
        if self._num_answers == 1:
            self._check_start()
        self.reward += step.reward
        self.metrics.update(step.metrics)
        self.messages.append(step.messages)
        if step.done or self.num_turns == self._turns_max:
            return self._end("stop" if step.done else OUT_OF_TURNS)
        try:
            answer = self._tokenizer.encode_continuation(step.messages, self._tokens_max)
        except TooLong:
            return self._end(TRUNCATED)
        except UserError as error:  # preflight has tried the template: the fault is in these messages
            raise EnvironmentFault("environment_invalid", str(error)) from error
        # the policy would have no token left to go on with
        if len(self.completion.tokens) + len(answer) >= self._tokens_max:
            return self._end(TRUNCATED)
        self.completion = self.completion.told(answer)
        self.policy_mask += bytes(len(answer))
        return None

    def _check_start(self) -> None:
        """EnvironmentFault when the environment began otherwise than it did for the prompt."""
        if self._tokenizer.encode_prompt(self.environment.start_messages or []) != self.prompt_tokens:
            message = "start gave other messages than when the prompt was sampled"
            raise EnvironmentFault("environment_unavailable", message)

    def _end(self, reason: str) -> None:
        self.completion = replace(self.completion, finish_reason=reason)

    def played(self) -> PlayedRollout:
        """The rollout so far."""
        outcome = EnvironmentOutcome(self.reward, self.num_turns, self.fault, dict(self.metrics), self.messages)
        return PlayedRollout(self.prompt_tokens, self.completion, bytes(self.policy_mask), outcome)


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
