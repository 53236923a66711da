"""Rewards by name: functions, which score one rollout in a worker process, and services, which
score many at once.

A named function has a factory with typed keyword-only arguments (`rl.reward_args`), whose libraries
are imported when it is called.
"""

from __future__ import annotations

import importlib
import inspect
import math
import re
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, NamedTuple

from pydantic import Field, ValidationError, validate_call

from rlpipe.algorithms.answers import last_answer
from rlpipe.base.errors import UserError
from rlpipe.base.values import JsonDict
from rlpipe.config.extras import REWARDS, opened
from rlpipe.processes.user_code import load_function
from rlpipe.records.prompt import RewardPrompt
from rlpipe.rewards.score import ARGUMENTS, RolloutFacts, label

# (prompt, completion) or (prompt, completion, rollout) -> a number, or several by name
Reward = Callable[..., Any]
RewardArgs = dict[str, JsonDict]  # rl.reward_args: a reward's name -> its arguments
Tokens = Annotated[int, Field(ge=1)]
# ends in one non-empty answer and has no other
ONE_ANSWER = r"(?:(?!<answer>).)*<answer>[^<]+</answer>"
GIVEN = ("prompt", "completion", "rollout")  # what rlpipe itself passes to a reward function


def format_reward(*, pattern: str = ONE_ANSWER) -> Reward:
    """1 when the whole completion, stripped, matches the regular expression (`.` matches newlines),
    else 0.
    """
    try:
        wanted = re.compile(pattern, flags=re.DOTALL)
    except re.error as error:
        raise ValueError(f"pattern={pattern!r} is no regular expression: {error}") from error

    def reward(prompt: RewardPrompt, completion: str) -> float:
        return float(wanted.fullmatch(completion.strip()) is not None)

    return reward


def exact(prompt: RewardPrompt, completion: str) -> float:
    """1 when the text of the last `<answer>` is the reference answer, ignoring case; verifiers may
    accept more.
    """
    answer = last_answer(completion)
    return float(answer is not None and answer.strip().lower() == str(prompt["answer"]).strip().lower())


def length(*, target: Tokens | None = None, max: Tokens | None = None) -> Reward:
    """A score by the completion's tokens: with `target`, 1 at the target and falling to 0 at none
    and at twice as many; with `max`, 1 up to it.
    """
    if (target is None) == (max is None):
        raise ValueError(f"target={target}, max={max}: give one of the two, in tokens")

    def reward(prompt: RewardPrompt, completion: str, rollout: RolloutFacts) -> float:
        if target is None:
            assert max is not None
            return float(rollout["num_tokens"] <= max)
        return 1.0 - min(abs(rollout["num_tokens"] - target) / target, 1.0)

    return reward


def overlong(*, tokens_max: Tokens, buffer: Tokens, factor: Annotated[float, Field(gt=0)] = 1.0) -> Reward:
    """DAPO's soft punishment: min(-(len - (tokens_max - buffer)) / buffer * factor, 0), len in
    tokens.
    """
    if buffer >= tokens_max:
        raise ValueError(
            f"buffer={buffer} must be below tokens_max={tokens_max}: the punishment starts at their difference"
        )

    def reward(prompt: RewardPrompt, completion: str, rollout: RolloutFacts) -> float:
        excess_tokens = rollout["num_tokens"] - (tokens_max - buffer)
        return min(-excess_tokens / buffer * factor, 0.0)

    return reward


def environment(prompt: RewardPrompt, completion: str, rollout: RolloutFacts) -> Any:
    """The number that the rollout's environment returned; ValueError when there was no environment,
    or it returned none.
    """
    record = rollout["environment"]
    if not isinstance(record, dict) or "reward" not in record:
        raise ValueError(f"prompt {prompt['prompt_id']}: no environment gave this rollout a reward")
    return record["reward"]


def reasoning_gym() -> Reward:
    """The verifier of the generator that made the prompt."""
    # seconds, for which neither the other rewards nor the first rollout wait
    importlib.import_module("reasoning_gym")
    return load_function("rl.rewards", "rlpipe.rewards.verifier:score_answer")


NAMED: dict[str, Callable[..., Reward]] = {
    "reasoning_gym": reasoning_gym,
    "math": partial(load_function, "rl.rewards", "rlpipe.rewards.math_reward:score_math"),
    "deepscaler": partial(load_function, "rl.rewards", "rlpipe.rewards.math_reward:score_deepscaler"),
    "exact": lambda: exact,
    "format": format_reward,
    "length": length,
    "overlong": overlong,
    "environment": lambda: environment,
}
NAMES = (*NAMED, *REWARDS)
SERVICES = ("remote", "judge", "hf:<folder>")


class ExtraReward(NamedTuple):
    """A reward of an extra (`rlpipe.config.extras.REWARDS`).

    `factory`: as those of NAMED. `check`: called with its arguments and rl.reward_timeout_s, raises
    a UserError where it could not score on this machine. It is not tried: no row has what it reads.
    """

    factory: Callable[..., Reward]
    check: Callable[[JsonDict, float], None]


def extra_reward(name: str) -> ExtraReward:
    """The reward of an extra by its name in REWARDS; UserError where this installation lacks the
    extra."""
    return opened(REWARDS[name], f"rl.rewards.{name}")


def is_service(name: str) -> bool:
    """True when a reward scores many rollouts at once, outside the worker processes."""
    return name in SERVICES or name.startswith("hf:")


def can_be_refused(name: str, args: RewardArgs) -> bool:
    """True when loading a reward function may fail: one of the user's, or one with arguments."""
    return ":" in name or bool(args.get(name)) or bool(inspect.signature(_factory(name)).parameters)


def resolve(name: str, args: JsonDict | None = None) -> Reward:
    """The reward function called `name`, its libraries imported; UserError lists the existing ones.

    Called with (prompt, completion), or, where it has a parameter `rollout`, with (prompt,
    completion, rollout=facts).
    """
    args = args or {}
    if ":" not in name:
        return built(name, _factory(name), args)
    function = load_function("rl.rewards", name)
    _check_call(name, function, args)
    return partial(function, **args) if args else function


def wants_rollout(function: Reward) -> bool:
    """True when a reward function has a parameter `rollout`, for the facts about the rollout."""
    try:
        return "rollout" in inspect.signature(function).parameters
    except ValueError:  # a compiled function may tell no signature
        return False


def check_names(rewards: dict[str, float], args: RewardArgs) -> None:
    """UserError when a name, weight or argument is not valid, or when two rewards share a label."""
    for name, weight in rewards.items():
        if not math.isfinite(weight):
            raise UserError(f"rl.rewards.{name}={weight}: a weight is a finite number")
        if ":" not in name and not is_service(name):
            _factory(name)
    unused = next((name for name in args if name not in rewards), None)
    if unused is not None:
        raise UserError(
            f"rl.reward_args.{unused}: rl.rewards has no {unused!r}, but {', '.join(rewards)}; name it there too"
        )
    labels = [label(name) for name in rewards]
    twice = next((name for name in labels if labels.count(name) > 1), None)
    if twice is not None:
        raise UserError(f"rl.rewards: two rewards are called {twice!r}; rename one of the functions")


def built(name: str, factory: Callable[..., Any], args: JsonDict, *given: Any) -> Any:
    """Returns the object that the factory makes from its arguments, `given` before them.

    UserError names `rl.reward_args.<name>.<argument>` when one does not fit its annotation, or the
    factory refuses it.
    """
    # a class checks its own
    checked = factory if isinstance(factory, type) else validate_call(config=ARGUMENTS)(factory)
    try:
        return checked(*given, **args)
    except ValidationError as error:
        raise UserError(f"rl.reward_args.{name}{_refusal(name, factory, error)}") from None  # it holds all arguments
    except ValueError as error:
        raise UserError(f"rl.reward_args.{name}: {error}") from error


def _refusal(name: str, factory: Callable[..., Any], error: ValidationError) -> str:
    """The first argument that is refused, its value, and the reason."""
    first = error.errors(include_url=False)[0]
    where = "".join(f".{part}" for part in first["loc"])
    if first["type"] == "unexpected_keyword_argument":
        parameters = inspect.signature(factory).parameters.values()
        existing = (
            ", ".join(parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY) or "none"
        )
        return f"{where}: there is no such argument; the reward {name!r} has: {existing}"
    value = f"={first['input']!r}" if where and not first["type"].startswith("missing") else ""
    return f"{where}{value}: {first['msg'].removeprefix('Value error, ')}"


def _check_call(name: str, function: Reward, args: JsonDict) -> None:
    """UserError when a function of the user's cannot be called as
    `function(prompt, completion, **args)`.
    """
    given = next((arg for arg in args if arg in GIVEN), None)
    if given is not None:
        raise UserError(
            f"rl.reward_args.{name}.{given}: rlpipe itself gives {', '.join(GIVEN)}; call the argument otherwise"
        )
    try:
        signature = inspect.signature(function)
    except ValueError:
        return
    try:
        signature.bind({}, "", **({"rollout": {}} if wants_rollout(function) else {}), **args)
    except TypeError as error:
        unknown = next((f".{arg}" for arg in args if arg not in signature.parameters), "")
        raise UserError(
            f"rl.reward_args.{name}{unknown}: it cannot be called with these arguments ({error}); it is"
            f" {name}{signature}, and is called with prompt, completion, the arguments given and, where it has that"
            " parameter, rollout"
        ) from error


def _factory(name: str) -> Callable[..., Reward]:
    if name in REWARDS:
        return extra_reward(name).factory
    if name not in NAMED:
        existing = ", ".join((*NAMES, *SERVICES))
        raise UserError(f"rl.rewards: there is no reward {name!r}; use {existing}, or package.module:function")
    return NAMED[name]
