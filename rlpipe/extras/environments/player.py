"""The player of rollouts in an environment (`rl.environment`)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from rlpipe.base.errors import UserError
from rlpipe.base.seeds import rollout_seed
from rlpipe.config.training import RlConfig
from rlpipe.data.chat import ChatTokenizer
from rlpipe.engines.client import Completion
from rlpipe.engines.pool import EnginePool, GroupRequest, NextTurn
from rlpipe.extras.environments.pool import EnvironmentFault, EnvironmentPool, check_environment
from rlpipe.extras.environments.turns import NOT_BEGUN, Turns
from rlpipe.loop.player import Hooks, PlayedRollout, Player, PlayerKind, PlayerParts, check_faults
from rlpipe.loop.stage import all_ended
from rlpipe.processes.pool import code_environment
from rlpipe.records.prompt import Message, Prompt
from rlpipe.records.rollout import PromptGroup


@dataclass(frozen=True)
class EnvironmentPlayer(Player):
    """Plays rollouts whose prompts come from the environment.

    A partial rollout goes on in a later iteration, in an environment that gets the earlier turns
    again.
    """

    rl: RlConfig
    pool: EnginePool
    tokenizer: ChatTokenizer
    environments: EnvironmentPool

    async def play(
        self, requests: list[GroupRequest], groups: list[PromptGroup], hooks: Hooks
    ) -> list[list[PlayedRollout]]:
        """As `Player.play`; each rollout advances by itself."""
        in_progress = [self._turns(request, group) for request, group in zip(requests, groups, strict=True)]

        async def on_rollout(number: int, index: int, longer: Completion) -> NextTurn | None:
            turns, first = in_progress[number][index], requests[number].params[index]
            if not turns.completion.finished:  # else it was finished before
                await turns.take(longer)
            if turns.completion.finished:
                return None
            return replace(first, seed=rollout_seed(first.seed, "turn", turns.num_turns + 1)), turns.completion

        async def on_group(number: int, _: list[Completion]) -> None:
            if hooks.on_group is not None:
                await hooks.on_group(number, [turns.played() for turns in in_progress[number]])

        try:
            sampled = await self.pool.generate(requests, on_group=on_group, enough=hooks.enough, on_rollout=on_rollout)
        finally:
            for turns in (turns for group in in_progress for turns in group):
                turns.environment.drop()
        for group, completions in zip(in_progress, sampled, strict=True):
            for turns, completion in zip(group, completions, strict=True):
                if not turns.completion.finished:
                    turns.keep(completion)
        played = [[turns.played() for turns in group] for group in in_progress]
        check_faults(self.rl, played)
        return played

    def _turns(self, request: GroupRequest, group: PromptGroup) -> list[Turns]:
        """The rollouts of a group, none of them asked yet."""
        opened = partial(self.environments.open, group.prompt.for_reward())
        limits = [(params.max_new_tokens, self.rl.turns_max) for params in request.params]
        begun = [rollout.environment or NOT_BEGUN for rollout in group.carried] or [NOT_BEGUN] * len(request.params)
        return [
            Turns(self.tokenizer, opened, request.prompt_tokens, *own)
            for own in zip(limits, request.prior, begun, strict=True)
        ]

    async def first_messages(self, prompts: list[Prompt]) -> list[list[Message]]:
        """The first messages of the environment for each prompt.

        UserError naming the prompt that it fails on. A start that took too long is tried once more.
        """
        return await all_ended([self._start(prompt, is_last=False) for prompt in prompts])

    async def _start(self, prompt: Prompt, is_last: bool) -> list[Message]:
        environment = self.environments.open(prompt.for_reward())
        try:
            return await environment.start()
        except EnvironmentFault as fault:
            too_slow = fault.reason == "environment_timeout"
            if is_last or not too_slow:
                more_time = ", or set a longer rl.environment_timeout_s," if too_slow else ""
                raise UserError(
                    f"{self.rl.world} cannot start with prompt {prompt.prompt_id}"
                    f" ({fault.reason}: {fault}); mend the environment{more_time} and start again: what was committed"
                    " is kept. The prompts of a run cannot change: to do without this one, start another run"
                ) from fault
        finally:
            environment.drop()
        return await self._start(prompt, is_last=True)

    async def close(self) -> None:
        await self.environments.close()


class EnvironmentKind(PlayerKind):
    """Environments: the classes of users, and rlpipe's calculator."""

    def player(self, parts: PlayerParts) -> EnvironmentPlayer:
        rl = parts.rl
        environments = EnvironmentPool(
            rl.environment,
            rl.environment_args,
            rl.reward_workers,
            rl.environment_timeout_s,
            rl.environment_total_s,
            code_environment(rl.secrets),
        )
        return EnvironmentPlayer(rl, parts.pool, parts.tokenizer, environments)

    def check(self, rl: RlConfig) -> list[str]:
        return check_environment(rl.environment, rl.environment_args, code_environment(rl.secrets))


ENVIRONMENT = EnvironmentKind()
