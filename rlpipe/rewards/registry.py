"""Rewards by name: functions, which score one rollout in a worker process, and services, which score many at once.

A named function has a factory with typed keyword-only arguments (`rl.reward_args`), whose libraries are imported when it is called.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

from rlpipe.by_path import load_function
from rlpipe.rewards.arguments import arguments_of, built, check_call, checked_arguments
from rlpipe.rewards.code import code
from rlpipe.rewards.score import label
from rlpipe.rewards.simple import Reward, environment, exact, format_reward, length, overlong
from rlpipe.types import JsonDict, UserError


def _of(path: str) -> Callable[[], Reward]:
    """A factory without arguments; it imports the reward, and the library behind it, when it is called."""
    return lambda: load_function("rl.rewards", path)


NAMED: dict[str, Callable[..., Reward]] = {
    "reasoning_gym": _of("rlpipe.rewards.verifier:score_answer"),
    "math": _of("rlpipe.rewards.math_answers:score_math"),
    "deepscaler": _of("rlpipe.rewards.math_answers:score_deepscaler"),
    "code": code,
    "exact": exact,
    "format": format_reward,
    "length": length,
    "overlong": overlong,
    "environment": environment,
}
SERVICES = ("remote", "judge", "hf:<folder>")


def is_service(name: str) -> bool:
    """Whether a reward scores many rollouts at once, outside the worker processes."""
    return name in ("remote", "judge") or name.startswith("hf:")


def can_be_refused(name: str) -> bool:
    """Whether loading a reward function may fail: one of the user's, or one with arguments."""
    return ":" in name or bool(arguments_of(_factory(name)))


def resolve(name: str, args: JsonDict | None = None) -> Reward:
    """The reward function called `name`, its libraries imported; UserError names what exists.

    Called with (prompt, completion), or, where it has a parameter `rollout`, with (prompt, completion, rollout=facts).
    """
    if ":" in name:
        function = load_function("rl.rewards", name)
        check_call(name, function, args or {})
        return partial(function, **args) if args else function
    return built(name, _factory(name), args or {})


def check_names(rewards: dict[str, float], args: dict[str, JsonDict]) -> None:
    """UserError when there is nothing to score with, a name, weight or argument is no good, or two rewards share a label."""
    if not rewards:
        raise UserError("rl.rewards is empty: name at least one, for example rewards = { math = 1.0 }")
    for name, weight in rewards.items():
        if not math.isfinite(weight):
            raise UserError(f"rl.rewards.{name}={weight}: a weight is a finite number")
        if ":" not in name and not is_service(name):
            checked_arguments(name, _factory(name), args.get(name, {}))
    unused = next((name for name in args if name not in rewards), None)
    if unused is not None:
        raise UserError(f"rl.reward_args.{unused}: rl.rewards has no {unused!r}, but {', '.join(rewards)}; name it there too")
    labels = [label(name) for name in rewards]
    twice = next((name for name in labels if labels.count(name) > 1), None)
    if twice is not None:
        raise UserError(f"rl.rewards: two rewards are called {twice!r}; rename one of the functions")


def _factory(name: str) -> Callable[..., Reward]:
    if name not in NAMED:
        existing = ", ".join((*NAMED, *SERVICES))
        raise UserError(f"rl.rewards: there is no reward {name!r}; use {existing}, or package.module:function")
    return NAMED[name]
